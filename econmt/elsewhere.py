"""Modules of other packages that econmt uses, found by name, since econmt imports none of these packages."""

from __future__ import annotations

import importlib
from typing import Any

COMMANDS = {"serve": "econmt_serve.command", "distill": "econmt_distill.command"}
"""Modules of commands by the command's name."""
TEXT_DIVISION = "econmt_serve.text.division"


def text_division() -> Any:
    """Returns the module that divides lines.

    Its ``divider(language, split=..., markup=...)`` returns a :data:`~econmt.decoding.translation.Divide`, which
    splits sentences and takes out markup; ``splitter_for(language)`` returns a function that finds the spans of the
    sentences in a text.
    """
    return importlib.import_module(TEXT_DIVISION)
