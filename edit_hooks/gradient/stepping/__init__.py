"""Training steps: those of a fixed number, and the random numbers that a step reads."""
