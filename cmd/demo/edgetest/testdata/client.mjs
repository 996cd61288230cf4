// The problems that the same request, sent again with the same key, may end otherwise than.
const retryable = ["in-progress", "outcome-unknown", "unavailable", "internal"].map((name) => "urn:pgonce:problem:" + name);

// send sends one request, with the same key and the same bytes, until there is an answer that is final. If it throws, nobody
// knows whether it was done: keep the key, and send the same again later.
export async function send(url, { key, body, method = "POST", attempts = 8, timeout = 30_000 }) {
	const bytes = JSON.stringify(body); // once: another spelling would be another request
	for (let attempt = 1; ; attempt++) {
		let pause = Math.min(100 * 2 ** attempt, 5_000) * (0.5 + Math.random() / 2);
		try {
			const response = await fetch(url, {
				method,
				headers: { "Content-Type": "application/json", "Idempotency-Key": `"${key}"` },
				body: bytes,
				signal: AbortSignal.timeout(timeout),
			});
			const text = await response.text(); // which may break off too
			const replayed = response.headers.get("Idempotent-Replayed") === "true";
			const retryAfter = response.headers.get("Retry-After"); // in seconds, from this library
			const answer = { status: response.status, replayed, retryAfter, text, headers: response.headers };
			if (attempt === attempts || replayed || !worthARetry(answer)) return answer;
			pause = Math.max(pause, 1000 * (Number(retryAfter) || 0));
		} catch (lost) {
			if (attempt === attempts) throw lost;
		}
		await new Promise((resolve) => setTimeout(resolve, pause));
	}
}

function worthARetry({ status, headers, text }) {
	if (status === 429) return true;
	if (status < 400 || !headers.get("Content-Type")?.startsWith("application/problem+json")) return false;
	return retryable.includes(JSON.parse(text).type);
}
