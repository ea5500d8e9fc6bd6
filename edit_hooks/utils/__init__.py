"""Errors, files, hashes, options and plug-ins; imports no model library."""
