"""Runs of a sweep: scheduled and executed here, by Ray or by Slurm, and their states; without torch."""
