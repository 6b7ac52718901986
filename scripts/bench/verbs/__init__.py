"""Commands of ``python -m scripts.bench``, a module for each or for a few that belong together."""
