"""Recipes: schema by section, readers of YAML and JSON, limits of values."""
