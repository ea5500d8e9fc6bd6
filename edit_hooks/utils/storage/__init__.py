"""Files, caches, locks and hashes; JSON and YAML readers."""
