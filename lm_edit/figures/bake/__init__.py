"""Figures of the BAKE papers."""
