// A registry of images and charts for tests: the one of go-containerregistry, in memory, on loopback.
package main

import (
	"fmt"
	"log"
	"net"
	"net/http"
	"os"
	"time"

	"github.com/google/go-containerregistry/pkg/registry"
)

func main() {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	fmt.Println(listener.Addr())
	server := &http.Server{
		Handler:           registry.New(registry.Logger(log.New(os.Stderr, "", 0))),
		ReadHeaderTimeout: 10 * time.Second,
	}
	fmt.Fprintln(os.Stderr, server.Serve(listener))
	os.Exit(1)
}
