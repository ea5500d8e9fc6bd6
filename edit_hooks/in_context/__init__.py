"""Shared parts of in-context editing: demonstrations, embedders, selection of facts."""
