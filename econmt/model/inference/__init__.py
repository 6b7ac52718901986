"""The model as a search runs it: one step at a time."""

from __future__ import annotations
