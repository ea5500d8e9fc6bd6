"""Curvature of the loss in the weights of linear maps, and updates that avoid it."""
