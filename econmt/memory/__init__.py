"""Memory of a training step: measured, predicted, planned and reported."""
