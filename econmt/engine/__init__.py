"""The training step and what it runs on: devices, precisions, optimizers, ranks."""
