"""Decoding constraints: phrases that a translation must contain or must not contain, prefixes, glossaries."""
