"""Memory account of any PyTorch program's training step, by module and category."""
