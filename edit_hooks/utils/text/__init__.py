"""Texts: templates with slots, scripts, regular expressions, short texts of values."""
