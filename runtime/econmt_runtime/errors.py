"""Error type for mistakes that a user can correct."""

from __future__ import annotations


class RuntimeInputError(Exception):
    """Error with a message of one line that names the file, option or line, and says what to do."""
