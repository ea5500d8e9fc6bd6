"""MQuAKE: multi-hop questions whose answers follow from edits."""
