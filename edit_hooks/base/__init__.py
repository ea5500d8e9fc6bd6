"""Foundation of all editors: the `Editor` class, configurations, the registry, shipped settings."""
