"""Edits of a plan: independent ones, joint ones and streams; what each costs and does to the model."""
