"""BAKE: whether edits also hold in the reverse direction."""
