"""Files of other projects in the forms that are used here: statistics of keys, projectors, settings."""
