"""Plans of sweeps: read from YAML, checked for their shape, and turned into runs; without torch."""
