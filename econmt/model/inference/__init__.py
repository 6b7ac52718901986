"""Stepwise inference: a translation model prepared for searches, one target token at a time."""

from __future__ import annotations
