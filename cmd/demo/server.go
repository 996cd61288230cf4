package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"syscall"
	"time"
)

// shutdownGrace is how long running requests may take to end when the demo stops.
const shutdownGrace = 3 * time.Second

// listen takes the address asked for. Where none was, it takes a free port if the usual one is taken.
func listen(ctx context.Context, addr string) (net.Listener, error) {
	var config net.ListenConfig
	if addr != "" {
		listener, err := config.Listen(ctx, "tcp", addr)
		if err != nil {
			return nil, fmt.Errorf("listen (choose another -addr): %w", err)
		}
		return listener, nil
	}
	listener, err := config.Listen(ctx, "tcp", defaultAddr)
	if errors.Is(err, syscall.EADDRINUSE) {
		listener, err = config.Listen(ctx, "tcp", "127.0.0.1:0")
	}
	if err != nil {
		return nil, fmt.Errorf("listen: %w", err)
	}
	return listener, nil
}

// listenAll takes an address for each of n instances: the one asked for, and free ports beside it.
func listenAll(ctx context.Context, addr string, n int) (listeners []net.Listener, err error) {
	defer func() {
		if err != nil {
			closeListeners(listeners)
			listeners = nil
		}
	}()
	for len(listeners) < n {
		if len(listeners) > 0 {
			host, _, err := net.SplitHostPort(listeners[0].Addr().String())
			if err != nil {
				return listeners, fmt.Errorf("read own address: %w", err)
			}
			addr = net.JoinHostPort(host, "0")
		}
		listener, err := listen(ctx, addr)
		if err != nil {
			return listeners, err
		}
		listeners = append(listeners, listener)
	}
	return listeners, nil
}

// closeListeners closes those that were never served; the others are closed already.
func closeListeners(listeners []net.Listener) {
	for _, listener := range listeners {
		_ = listener.Close()
	}
}

// baseURL is where a client on this machine reaches the listener.
func baseURL(listener net.Listener) (*url.URL, error) {
	host, port, err := net.SplitHostPort(listener.Addr().String())
	if err != nil {
		return nil, fmt.Errorf("read own address: %w", err)
	}
	if ip := net.ParseIP(host); ip != nil && ip.IsUnspecified() {
		host = "127.0.0.1"
	}
	return &url.URL{Scheme: "http", Host: net.JoinHostPort(host, port)}, nil
}

// serve serves until the function it returns is called. That lets running requests end, for a short time.
func serve(ctx context.Context, listener net.Listener, handler http.Handler, log *slog.Logger) (stop func()) {
	server := &http.Server{
		Handler:           handler,
		ReadHeaderTimeout: 5 * time.Second,
		ReadTimeout:       30 * time.Second,
		IdleTimeout:       2 * time.Minute,
		ErrorLog:          slog.NewLogLogger(log.Handler(), slog.LevelWarn),
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		if err := server.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
			log.ErrorContext(ctx, "serving ended", slog.Any("error", err))
		}
	}()
	return func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), shutdownGrace)
		defer cancel()
		if err := server.Shutdown(ctx); err != nil {
			_ = server.Close() // cancels what still runs
		}
		<-done
	}
}
