"""Editors that post-process the updates of another editor."""
