"""Unstructured edits: a paragraph as the answer to a question (UnKEBench, AKEW)."""
