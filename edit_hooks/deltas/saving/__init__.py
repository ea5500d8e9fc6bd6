"""Saved edits: folders for later runs, exports, PEFT's rules, fewer ranks."""
