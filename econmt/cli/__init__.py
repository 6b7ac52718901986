"""Command line: a module for each command, which reads options, calls the other packages and prints."""

from __future__ import annotations
