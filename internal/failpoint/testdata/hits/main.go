// Command hits comes to a point three times and prints the number each time it has passed it.
package main

import (
	"fmt"

	"github.com/pgonce/pgonce/internal/failpoint"
)

func main() {
	for i := range 3 {
		failpoint.Hit(failpoint.CommitSent)
		fmt.Println(i + 1)
	}
	fmt.Println(failpoint.Enabled, failpoint.Hits()[failpoint.CommitSent])
}
