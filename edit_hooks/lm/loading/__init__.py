"""The base model: its checkpoint, devices, processes and versions."""
