"""Checks of a plan against editors and tasks, which import the engine, and estimates of its time."""
