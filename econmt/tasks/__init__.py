"""What there is to learn: all that training, measuring and planning know of a task."""
