"""The contract of editors: checks that every editor passes on tiny models of every family."""
