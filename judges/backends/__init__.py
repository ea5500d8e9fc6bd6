"""Connections to judge models: OpenAI-compatible servers and local models."""
