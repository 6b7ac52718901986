"""Evaluation of translations: metrics with signatures, significance, log-probabilities."""
