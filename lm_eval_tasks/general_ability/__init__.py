"""Tasks that ask nothing about edits: what else an edited model can still do."""
