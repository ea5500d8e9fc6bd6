"""Shared parts of gradient-based editors: labeled rows, losses, hyper-networks, feature statistics."""
