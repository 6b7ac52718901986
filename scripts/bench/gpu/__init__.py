"""Benchmarks that need a GPU, those of kernels and of whole steps."""
