"""Measurement of a training step's bytes and times."""
