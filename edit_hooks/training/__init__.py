"""Training of hyper-networks."""
