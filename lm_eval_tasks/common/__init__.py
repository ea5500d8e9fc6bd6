"""Records, cases, probes, scoring, aggregation and task class of all benchmarks."""
