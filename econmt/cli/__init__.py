"""The command line: one file a verb, thin: parse, call, print."""

from __future__ import annotations
