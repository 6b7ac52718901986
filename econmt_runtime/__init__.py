"""Translates with an exported econmt model, without PyTorch: numpy, SentencePiece and a C library are all it needs.

Example::

    import econmt_runtime

    translator = econmt_runtime.load("multi30k-runtime")
    for found in translator.translate(["A dog runs.", "Two men talk."]):
        print(found.score, found.text)

``econmt export --runtime`` writes the folder. It needs nothing of the packages ``econmt`` and ``econmt_ops`` but the C
library of the latter, a copy of which lies in the folder.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from econmt_runtime.errors import RuntimeInputError as RuntimeInputError

if TYPE_CHECKING:
    from econmt_runtime.translator import Translation as Translation
    from econmt_runtime.translator import Translator as Translator
    from econmt_runtime.translator import load as load

__all__ = ["RuntimeInputError", "Translation", "Translator", "load"]


def __getattr__(name: str) -> Any:
    """Names of the translator, which brings numpy, when they are asked for."""
    if name in __all__:
        return getattr(importlib.import_module("econmt_runtime.translator"), name)
    raise AttributeError(f"module 'econmt_runtime' has no attribute {name!r}")
