"""Agreement of two judges, and accuracy of a judge on labeled answers."""
