"""Benchmarks: each module has a function that measures and gives rows; ``sheet`` prints, keeps and draws them."""
