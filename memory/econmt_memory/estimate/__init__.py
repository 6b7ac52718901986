"""Prediction of a training step's bytes on fake tensors, without data or a GPU."""
