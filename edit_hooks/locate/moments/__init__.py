"""Second moments of keys: their texts, collection, storage, solves and null spaces."""
