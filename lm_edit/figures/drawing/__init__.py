"""Charts and tables as data, and their renderers."""
