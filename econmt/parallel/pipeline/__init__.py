"""Pipelines: the layers of a model divided over ranks, time cut into chunks."""
