"""Knowledge-editing benchmarks as lm-eval tasks; one folder per benchmark, see README.md."""
