"""Probes of a case as harness requests, and answers to them."""
