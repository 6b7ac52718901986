"""Where every byte and millisecond of a step went, measured."""

from __future__ import annotations
