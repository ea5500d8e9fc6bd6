"""MyBenchmark: one line on the question that the benchmark answers. See README.md."""
