// A mount of a shared file system for tests: a directory of this machine as a client of NFS would show it.
//
// Usage: shared-mount [-cache S] [-repeat-links] [-no-links] DIRECTORY MOUNTPOINT
//
// It does what such clients do and a local file system does not. Attributes, names and the absence of names are believed
// for a while (-cache), so a second mount of the same directory shows what the first one did only later. With
// -repeat-links every link is asked for twice, as after a lost answer, and the second answer counts: EEXIST. -no-links
// refuses hard links, as some file systems do. It prints "mounted" and serves until it is unmounted or gets SIGTERM.
package main

import (
	"context"
	"flag"
	"fmt"
	"log"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/hanwen/go-fuse/v2/fs"
	"github.com/hanwen/go-fuse/v2/fuse"
)

var (
	cache       = flag.Float64("cache", 1, "seconds for which attributes and names are believed")
	repeatLinks = flag.Bool("repeat-links", false, "ask for each link twice")
	noLinks     = flag.Bool("no-links", false, "refuse hard links")
)

type node struct{ fs.LoopbackNode }

func (n *node) WrapChild(_ context.Context, child fs.InodeEmbedder) fs.InodeEmbedder {
	return &node{*child.(*fs.LoopbackNode)}
}

func (n *node) Link(ctx context.Context, target fs.InodeEmbedder, name string, out *fuse.EntryOut) (*fs.Inode, syscall.Errno) {
	if *noLinks {
		return nil, syscall.ENOTSUP
	}
	inode, errno := n.LoopbackNode.Link(ctx, target, name, out)
	if errno == 0 && *repeatLinks {
		return nil, syscall.EEXIST
	}
	return inode, errno
}

func main() {
	flag.Parse()
	if flag.NArg() != 2 {
		flag.Usage()
		os.Exit(2)
	}
	loopback, err := fs.NewLoopbackRoot(flag.Arg(0))
	if err != nil {
		log.Fatal(err)
	}
	root := &node{*loopback.(*fs.LoopbackNode)}
	root.RootData.RootNode = root
	believed := time.Duration(*cache * float64(time.Second))
	options := &fs.Options{AttrTimeout: &believed, EntryTimeout: &believed, NegativeTimeout: &believed}
	options.MountOptions = fuse.MountOptions{
		Name: "shared-mount", FsName: flag.Arg(0), DirectMountStrict: true, Options: []string{"default_permissions"},
	}
	server, err := fs.Mount(flag.Arg(1), root, options)
	if err != nil {
		log.Fatal(err)
	}
	stop := make(chan os.Signal, 1)
	signal.Notify(stop, syscall.SIGTERM, syscall.SIGINT)
	go func() {
		<-stop
		if err := server.Unmount(); err != nil {
			log.Fatal(err)
		}
	}()
	fmt.Println("mounted")
	server.Wait()
}
