"""Parsing of settings: numbers with ranges, options of commands, files of other projects."""
