// A gateway in front of replicas of a model server: the least loaded one answers, streams pass through as they come,
// more than `limit` requests at once are refused, and a replica that cannot be reached is passed over.
package main

import (
	"bytes"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
)

type replica struct {
	url     string
	running int
}

type gateway struct {
	lock     sync.Mutex
	replicas []*replica
	running  int
	limit    int
}

// enter counts a request; false when `limit` run already.
func (g *gateway) enter() bool {
	// begin answer: return false
	g.lock.Lock()
	defer g.lock.Unlock()
	if g.running >= g.limit {
		return false
	}
	g.running++
	return true
	// end answer
}

func (g *gateway) leave() {
	// begin answer: return
	g.lock.Lock()
	g.running--
	g.lock.Unlock()
	// end answer
}

// take counts a request at the replica with the fewest of them, apart from those that were tried; nil when none is left.
func (g *gateway) take(tried map[*replica]bool) *replica {
	// begin answer: return nil
	g.lock.Lock()
	defer g.lock.Unlock()
	var best *replica
	for _, one := range g.replicas {
		if !tried[one] && (best == nil || one.running < best.running) {
			best = one
		}
	}
	if best != nil {
		best.running++
	}
	return best
	// end answer
}

func (g *gateway) release(one *replica) {
	// begin answer: return
	g.lock.Lock()
	one.running--
	g.lock.Unlock()
	// end answer
}

// forward sends the request to one replica and its answer to the client, piece by piece as it comes.
// An error means that nothing has been sent to the client yet.
func forward(w http.ResponseWriter, r *http.Request, body []byte, one *replica) error {
	// begin answer: return fmt.Errorf("your code here")
	request, err := http.NewRequestWithContext(r.Context(), r.Method, one.url+r.URL.RequestURI(), bytes.NewReader(body))
	if err != nil {
		return err
	}
	request.Header = r.Header.Clone()
	answer, err := http.DefaultClient.Do(request)
	if err != nil {
		return err
	}
	defer answer.Body.Close()
	for name, values := range answer.Header {
		w.Header()[name] = values
	}
	w.WriteHeader(answer.StatusCode)
	piece := make([]byte, 32<<10)
	for {
		count, err := answer.Body.Read(piece)
		w.Write(piece[:count])
		w.(http.Flusher).Flush()
		if err != nil {
			return nil
		}
	}
	// end answer
}

// ServeHTTP answers 429 with Retry-After above the limit, and 502 when no replica can be reached.
func (g *gateway) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	// begin answer: w.WriteHeader(501)
	if !g.enter() {
		w.Header().Set("Retry-After", "1")
		http.Error(w, "too many requests", 429)
		return
	}
	defer g.leave()
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return
	}
	tried := map[*replica]bool{}
	for len(tried) < len(g.replicas) {
		one := g.take(tried)
		tried[one] = true
		err := forward(w, r, body, one)
		g.release(one)
		if err == nil {
			return
		}
	}
	http.Error(w, "no replica answers", 502)
	// end answer
}

func main() {
	urls := flag.String("replicas", "", "urls, with commas between them")
	limit := flag.Int("limit", 16, "requests at once")
	flag.Parse()
	made := &gateway{limit: *limit}
	for _, url := range strings.Split(*urls, ",") {
		made.replicas = append(made.replicas, &replica{url: url})
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		panic(err)
	}
	fmt.Println(listener.Addr())
	panic(http.Serve(listener, made))
}

// Kept so that a skeleton without them compiles.
var _ = []any{bytes.NewReader, io.ReadAll}
