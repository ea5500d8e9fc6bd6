"""Finished edits and answers on disk, by everything they depend on."""
