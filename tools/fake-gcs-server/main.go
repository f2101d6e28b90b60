// A server of Google Cloud Storage for tests: fake-gcs-server, spoken to by the XML API.
//
// Clients of many languages read and write objects by that API (PUT /bucket/object, x-goog-if-generation-match), of which
// fake-gcs-server knows reads and deletes alone. Its JSON API has the same writes, with conditions that it checks under one
// lock. So an upload is translated into that, and listings, which it gives without pages, are answered here, in pages.
package main

import (
	"encoding/xml"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/url"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/fsouza/fake-gcs-server/fakestorage"
)

const pageSize = 1000 // what Google answers at most

type listed struct {
	Key          string
	Size         int64
	LastModified string
	ETag         string
}

type listing struct {
	XMLName               xml.Name `xml:"ListBucketResult"`
	Name                  string
	Prefix                string
	IsTruncated           bool
	NextContinuationToken string `xml:",omitempty"`
	Contents              []listed
}

type refusal struct {
	XMLName xml.Name `xml:"Error"`
	Code    string
	Message string
}

func answer(w http.ResponseWriter, status int, document any) {
	w.Header().Set("Content-Type", "application/xml; charset=UTF-8")
	w.WriteHeader(status)
	fmt.Fprint(w, xml.Header)
	if err := xml.NewEncoder(w).Encode(document); err != nil {
		log.Print(err)
	}
}

func list(server *fakestorage.Server, w http.ResponseWriter, bucket string, query url.Values) {
	size := pageSize
	if asked, err := strconv.Atoi(query.Get("max-keys")); err == nil && asked < size {
		size = asked
	}
	after := max(query.Get("start-after"), query.Get("continuation-token"))
	found, err := server.ListObjectsWithOptionsPaginated(bucket, fakestorage.ListOptions{Prefix: query.Get("prefix")})
	if err != nil {
		answer(w, http.StatusInternalServerError, refusal{Code: "InternalError", Message: err.Error()})
		return
	}
	page := listing{Name: bucket, Prefix: query.Get("prefix")}
	for _, object := range found.Objects {
		if object.Name <= after {
			continue
		}
		if len(page.Contents) == size {
			page.IsTruncated, page.NextContinuationToken = true, page.Contents[size-1].Key
			break
		}
		page.Contents = append(page.Contents, listed{
			Key: object.Name, Size: object.Size, LastModified: object.Updated.UTC().Format(time.RFC3339), ETag: object.Etag,
		})
	}
	answer(w, http.StatusOK, page)
}

func upload(next http.Handler, w http.ResponseWriter, r *http.Request, bucket, object string) {
	query := url.Values{"uploadType": {"media"}, "name": {object}}
	if condition := r.Header.Get("x-goog-if-generation-match"); condition != "" {
		query.Set("ifGenerationMatch", condition)
	}
	inner := r.Clone(r.Context())
	inner.Method = http.MethodPost
	inner.URL = &url.URL{Path: "/upload/storage/v1/b/" + bucket + "/o", RawQuery: query.Encode()}
	inner.RequestURI = inner.URL.RequestURI()
	w.Header().Set("ETag", `"0"`) // before the head is out; the next read tells the right one
	next.ServeHTTP(w, inner)
}

func main() {
	server, err := fakestorage.NewServerWithOptions(fakestorage.Options{NoListener: true, PublicHost: os.Args[1], Writer: io.Discard})
	if err != nil {
		log.Fatal(err)
	}
	next := server.HTTPHandler()
	handler := func(w http.ResponseWriter, r *http.Request) {
		path := r.URL.EscapedPath()
		escaped, rest, isObject := strings.Cut(strings.TrimPrefix(path, "/"), "/")
		bucket, _ := url.PathUnescape(escaped)
		object, _ := url.PathUnescape(rest)
		if bucket == "" || strings.HasPrefix(path, "/storage/") || strings.HasPrefix(path, "/upload/") || strings.HasPrefix(path, "/_internal/") {
			next.ServeHTTP(w, r)
			return
		}
		r.Host = os.Args[1] // whatever name or proxy the client came by
		if _, err := server.Backend().GetBucket(bucket); err != nil {
			answer(w, http.StatusNotFound, refusal{Code: "NoSuchBucket", Message: "The specified bucket does not exist."})
			return
		}
		switch {
		case isObject && r.Method == http.MethodPut:
			upload(next, w, r, bucket, object)
		case !isObject && r.Method == http.MethodGet:
			list(server, w, bucket, r.URL.Query())
		default:
			next.ServeHTTP(w, r)
		}
	}
	log.Fatal(http.ListenAndServe(os.Args[1], http.HandlerFunc(handler)))
}
