"""Agreement of two judges, and accuracy of a judge on hand-labeled answers."""
