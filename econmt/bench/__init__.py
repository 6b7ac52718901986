"""Benchmarks of a user's machine: choices of auto, training steps; ``rows`` shows the results."""
