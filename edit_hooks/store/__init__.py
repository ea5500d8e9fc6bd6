"""Finished edits and unedited answers on disk, by everything they depend on."""
