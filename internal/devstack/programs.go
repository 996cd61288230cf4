package devstack

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
)

// programs are clients that tests run against a service, by the name that Program knows them by.
var programs = map[string]extra{
	"curl":     {name: "curl", pkg: "curl", find: onPath("curl")},
	"node":     {name: "Node.js", pkg: "nodejs", find: onPath("node")},
	"npm":      {name: "npm", pkg: "npm", find: onPath("npm")},
	"chromium": {name: "Chromium", pkg: "chromium", find: onPath("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")},
}

// Program returns where curl, node, npm or chromium is. One that is here is used; otherwise root on a Debian-like system gets the
// distribution's package, once, whichever process asks first. cfg's Out and NoInstall count, and PGONCE_NO_INSTALL.
func Program(ctx context.Context, cfg *Config, name string) (path string, err error) {
	wanted, known := programs[name]
	if !known {
		return "", fmt.Errorf("devstack: no program %q is known, but %s", name, strings.Join(slices.Sorted(maps.Keys(programs)), ", "))
	}
	return thisMachine().locateExtra(ctx, cfg.withDefaults(), wanted)
}
