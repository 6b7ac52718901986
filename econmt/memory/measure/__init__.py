"""Measurement of a step's bytes and times."""

from __future__ import annotations
