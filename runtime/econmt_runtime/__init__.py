"""Translation with an exported econmt model and without PyTorch, using numpy, SentencePiece and a C library.

Example::

    import econmt_runtime

    translator = econmt_runtime.load("multi30k-runtime")
    for translation in translator.translate(["A dog runs.", "Two men talk."]):
        print(translation.score, translation.text)

``econmt export --runtime`` writes the folder, or one file that holds the same, including a copy of econmt_ops' C
library. The packages ``econmt`` and ``econmt_ops`` are not needed.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from econmt_runtime.errors import RuntimeInputError as RuntimeInputError

if TYPE_CHECKING:
    from econmt_runtime.translator import RuntimeTranslation as Translation
    from econmt_runtime.translator import RuntimeTranslator as Translator
    from econmt_runtime.translator import load as load

__version__ = "0.1.0"
__all__ = ["RuntimeInputError", "Translation", "Translator", "load"]


def __getattr__(name: str) -> Any:
    """Imports the translator, and with it numpy, when one of its names is first used."""
    if name in __all__:
        module = importlib.import_module("econmt_runtime.translator")
        return getattr(module, name if name == "load" else f"Runtime{name}")
    raise AttributeError(f"module 'econmt_runtime' has no attribute {name!r}")
