// Reads PromQL questions from standard input, one JSON object a line, and answers each with one line: which metrics an
// expression reads, and what it gives over samples that come with it, by Prometheus' own parser and engine.
package main

import (
	"bufio"
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"time"

	"github.com/prometheus/prometheus/model/histogram"
	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/promql"
	"github.com/prometheus/prometheus/promql/parser"
	"github.com/prometheus/prometheus/storage"
	"github.com/prometheus/prometheus/tsdb/chunkenc"
	"github.com/prometheus/prometheus/tsdb/chunks"
	"github.com/prometheus/prometheus/util/annotations"
)

// Question is an expression, samples by series (`name{label="value"}`), and the time of the answer in seconds.
type Question struct {
	Expression string                  `json:"expression"`
	Series     map[string][][2]float64 `json:"series"`
	At         float64                 `json:"at"`
}

// Answer has an error, or the metrics read and the samples given.
type Answer struct {
	Error   string   `json:"error"`
	Metrics []string `json:"metrics"`
	Result  []Given  `json:"result"`
}

// Given is one sample of a result.
type Given struct {
	Labels map[string]string `json:"labels"`
	Value  float64           `json:"value"`
}

type sample struct {
	at    int64
	value float64
}

func (s sample) T() int64                      { return s.at }
func (s sample) ST() int64                     { return 0 }
func (s sample) F() float64                    { return s.value }
func (s sample) H() *histogram.Histogram       { return nil }
func (s sample) FH() *histogram.FloatHistogram { return nil }
func (s sample) Type() chunkenc.ValueType      { return chunkenc.ValFloat }
func (s sample) Copy() chunks.Sample           { return s }

// memory is a store of whole series.
type memory []storage.Series

func (m memory) Querier(int64, int64) (storage.Querier, error) { return m, nil }

func (m memory) Select(_ context.Context, _ bool, _ *storage.SelectHints, matchers ...*labels.Matcher) storage.SeriesSet {
	var found []storage.Series
	for _, series := range m {
		if !slices.ContainsFunc(matchers, func(each *labels.Matcher) bool {
			return !each.Matches(series.Labels().Get(each.Name))
		}) {
			found = append(found, series)
		}
	}
	slices.SortFunc(found, func(a, b storage.Series) int { return labels.Compare(a.Labels(), b.Labels()) })
	return &set{series: found, at: -1}
}

func (memory) LabelValues(context.Context, string, *storage.LabelHints, ...*labels.Matcher) ([]string, annotations.Annotations, error) {
	return nil, nil, nil
}

func (memory) LabelNames(context.Context, *storage.LabelHints, ...*labels.Matcher) ([]string, annotations.Annotations, error) {
	return nil, nil, nil
}

func (memory) Close() error { return nil }

type set struct {
	series []storage.Series
	at     int
}

func (s *set) Next() bool                        { s.at++; return s.at < len(s.series) }
func (s *set) At() storage.Series                { return s.series[s.at] }
func (s *set) Err() error                        { return nil }
func (s *set) Warnings() annotations.Annotations { return nil }

func answer(parse parser.Parser, engine *promql.Engine, question Question) (Answer, error) {
	expression, err := parse.ParseExpr(question.Expression)
	if err != nil {
		return Answer{}, err
	}
	read := []string{}
	parser.Inspect(expression, func(node parser.Node, _ []parser.Node) error {
		if selector, ok := node.(*parser.VectorSelector); ok {
			read = append(read, selector.Name)
		}
		return nil
	})
	slices.Sort(read)
	var store memory
	for text, points := range question.Series {
		name, err := parse.ParseMetric(text)
		if err != nil {
			return Answer{}, err
		}
		samples := make([]chunks.Sample, 0, len(points))
		for _, point := range points {
			samples = append(samples, sample{at: int64(point[0] * 1000), value: point[1]})
		}
		slices.SortFunc(samples, func(a, b chunks.Sample) int { return cmp.Compare(a.T(), b.T()) })
		store = append(store, storage.NewListSeries(name, samples))
	}
	ctx := context.Background()
	query, err := engine.NewInstantQuery(ctx, store, nil, question.Expression, time.UnixMilli(int64(question.At*1000)))
	if err != nil {
		return Answer{}, err
	}
	defer query.Close()
	done := query.Exec(ctx)
	if done.Err != nil {
		return Answer{}, done.Err
	}
	given := []Given{}
	switch value := done.Value.(type) {
	case promql.Vector:
		for _, each := range value {
			given = append(given, Given{Labels: each.Metric.Map(), Value: each.F})
		}
	case promql.Scalar:
		given = append(given, Given{Labels: map[string]string{}, Value: value.V})
	default:
		return Answer{}, fmt.Errorf("it gives a %s", done.Value.Type())
	}
	return Answer{Metrics: slices.Compact(read), Result: given}, nil
}

func main() {
	parse := parser.NewParser(parser.Options{})
	engine := promql.NewEngine(promql.EngineOpts{MaxSamples: 1_000_000, Timeout: 10 * time.Second, Parser: parse})
	lines := bufio.NewScanner(os.Stdin)
	lines.Buffer(nil, 1<<24)
	out := json.NewEncoder(os.Stdout)
	for lines.Scan() {
		var question Question
		err := json.Unmarshal(lines.Bytes(), &question)
		var said Answer
		if err == nil {
			said, err = answer(parse, engine, question)
		}
		if err != nil {
			said = Answer{Error: err.Error()}
		}
		if err := out.Encode(said); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	}
	if err := lines.Err(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
