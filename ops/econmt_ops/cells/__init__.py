"""The mathematics of one step of each cell, written once."""

from __future__ import annotations
