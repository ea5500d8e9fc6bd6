"""Identity of a model: hashes of its weights and everything else that can change a number."""
