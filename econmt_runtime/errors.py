"""What a user can mend."""

from __future__ import annotations


class RuntimeInputError(Exception):
    """One line that names the file, the option or the line, and says what to do."""
