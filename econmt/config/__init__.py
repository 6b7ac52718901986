"""The recipe: its schema by section, the readers of YAML and JSON, limits of values."""
