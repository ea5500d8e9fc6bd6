"""Devices that compute while the host goes on."""
