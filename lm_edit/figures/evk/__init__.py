"""Figures of EVK-Bench and EVK-Align."""
