"""The errors a user can mend: one clear line each, printed by the command line without a traceback."""

from __future__ import annotations


class EconmtError(Exception):
    """A failure whose message is a single line written for the user; the command line exits with ``exit_code``."""

    exit_code = 1


class InputError(EconmtError):
    """Something the user gave cannot be used; the message names file, line, key or shape, and what to do."""

    exit_code = 2


class TrainingError(EconmtError):
    """Training had to stop (a loss that is not finite, no memory, a full disk); what was saved stays whole."""
