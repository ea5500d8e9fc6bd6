"""Edits as values: `Delta`, hook edits and context edits; applying, saving and exporting them."""
