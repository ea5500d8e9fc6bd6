"""Tensors from outside an edit: artifacts of a training, and tensors of a user."""
