"""BAKE: do edits also hold in the reverse direction? See README.md."""
