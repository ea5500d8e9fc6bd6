"""lm-eval's own tasks on the edited and on the unedited model."""
