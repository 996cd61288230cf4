package main

import (
	"context"
	"fmt"
	"maps"
	"net/url"
	"slices"

	"github.com/testcontainers/testcontainers-go"
	"github.com/testcontainers/testcontainers-go/modules/postgres"
	"github.com/testcontainers/testcontainers-go/modules/redis"
)

// start runs the server that was asked for, and leaves no container behind if that fails.
func start(ctx context.Context, r request) (server, error) {
	switch r.Server {
	case "postgres":
		return startPostgres(ctx, r)
	case "redis":
		return startRedis(ctx, r)
	}
	return server{}, fmt.Errorf("there is no server called %q: postgres or redis", r.Server)
}

func startPostgres(ctx context.Context, r request) (server, error) {
	c, err := postgres.Run(ctx, r.Image,
		postgres.WithPassword(r.Password),
		testcontainers.WithCmd(postgresCommand(r.Settings)...),
		postgres.BasicWaitStrategies(),
	)
	if c == nil {
		return server{}, err
	}
	return running(c.Container, err, func() (string, error) { return c.ConnectionString(ctx, "sslmode=disable") })
}

// postgresCommand replaces the module's own, which turns fsync off without being asked.
func postgresCommand(settings map[string]string) []string {
	command := []string{"postgres"}
	for _, name := range slices.Sorted(maps.Keys(settings)) {
		command = append(command, "-c", name+"="+settings[name])
	}
	return command
}

func startRedis(ctx context.Context, r request) (server, error) {
	c, err := redis.Run(ctx, r.Image, testcontainers.WithCmdArgs("--requirepass", r.Password))
	if c == nil {
		return server{}, err
	}
	return running(c.Container, err, func() (string, error) {
		address, err := c.ConnectionString(ctx)
		if err != nil {
			return "", err
		}
		return redisURL(address, r.Password)
	})
}

func redisURL(address, password string) (string, error) {
	u, err := url.Parse(address)
	if err != nil {
		return "", err
	}
	u.User, u.Path = url.UserPassword("", password), "/0"
	return u.String(), nil
}

// running is the container's server, once its address is known; without it the container goes.
func running(c testcontainers.Container, err error, address func() (string, error)) (server, error) {
	s := server{remove: func() error {
		// At once: nobody wants what is in it.
		return testcontainers.TerminateContainer(c, testcontainers.StopTimeout(0))
	}}
	if err == nil {
		s.url, err = address()
	}
	if err != nil {
		_ = s.remove() // the first error is the one to tell
		return server{}, err
	}
	return s, nil
}
