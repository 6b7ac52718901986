"""Prediction and measurement of a recipe's training step, and the reports of ``econmt profile``."""
