"""The same, predicted without running anything."""

from __future__ import annotations
