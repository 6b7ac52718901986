"""Training of a run: the loop, checkpoints, resuming, validation and results."""
