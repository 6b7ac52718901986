"""Utilities that all ops share: checks, lengths, precision, dropout, blocks, products with prepacked weights."""

from __future__ import annotations
