"""Memory account: measured, predicted, planned and reported bytes of a training step."""
