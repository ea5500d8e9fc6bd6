"""Continuations of prompts: their bookkeeping, draws and rules, and the decoding of many on a GPU."""
