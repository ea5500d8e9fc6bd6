"""Training of MEND's hyper-network."""
