"""Plans that make a step fit a number of bytes."""

from __future__ import annotations
