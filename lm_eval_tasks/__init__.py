"""Knowledge-editing benchmarks as lm-eval tasks, one folder each; see README.md."""
