"""How a step is made to fit a number of bytes."""

from __future__ import annotations
