"""Name of the demo model, apart from the code that converts it."""

DEMO_NAME = "gemma-3-270m (Q4_K_M, demo)"
