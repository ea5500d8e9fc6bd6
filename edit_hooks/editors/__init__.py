"""One editor per file; the table of names is :mod:`edit_hooks.base.registry`."""
