"""Parallel text: files, formats, filters, vocabularies, noise."""
