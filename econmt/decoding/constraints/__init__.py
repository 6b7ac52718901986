"""Phrases that a translation has to contain or must not contain."""
