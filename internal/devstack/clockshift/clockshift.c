/* Preloaded into a PostgreSQL whose clock is to be another than the machine's. libfaketime moves the clock too, but
 * PostgreSQL's timers (statement_timeout, deadlock_timeout) then do not fire. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static long shift;

__attribute__((constructor)) static void read_shift(void) {
	const char *seconds = getenv("PGONCE_CLOCK_SHIFT");
	shift = seconds ? atol(seconds) : 0;
}

int clock_gettime(clockid_t id, struct timespec *t) {
	int result = (int)syscall(SYS_clock_gettime, id, t);
	if (result == 0 && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE))
		t->tv_sec += shift; /* the monotonic clock, which pauses are measured with, stays */
	return result;
}

int gettimeofday(struct timeval *restrict v, void *restrict zone) {
	struct timespec t;
	int result = clock_gettime(CLOCK_REALTIME, &t);
	(void)zone;
	v->tv_sec = t.tv_sec;
	v->tv_usec = t.tv_nsec / 1000;
	return result;
}

time_t time(time_t *out) {
	struct timespec t;
	clock_gettime(CLOCK_REALTIME, &t);
	if (out)
		*out = t.tv_sec;
	return t.tv_sec;
}
