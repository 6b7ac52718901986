"""Which implementation of an op runs: traits, measurements, the choice, and registration with torch.library."""

from __future__ import annotations
