"""Benchmarks of a user's machine: layouts of products, choices of auto, training steps; ``rows`` shows the results."""
