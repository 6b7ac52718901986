"""Benchmarks of the project itself, which are not installed: ``python -m scripts.bench --help`` in a checkout."""
