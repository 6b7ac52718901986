"""Where every byte of a training step is."""
