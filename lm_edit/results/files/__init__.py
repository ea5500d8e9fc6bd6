"""Result files and sample files as lm-eval writes them, read once and checked."""
