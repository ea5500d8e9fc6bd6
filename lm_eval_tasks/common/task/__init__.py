"""`EditingTask`: documents in, columns out, by way of the harness."""
