"""Smaller and faster forms of a trained translation model.

Example::

    make_lexicon(Path("runs/multi30k"), Path("multi30k.lexicon"), corpora, top_k=30)
    quantize_model(Path("runs/multi30k"), Path("multi30k-int8"))
    export_runtime(Path("multi30k-int8"), Path("multi30k.pyz"), lexicon=Path("multi30k.lexicon"))
"""

from __future__ import annotations

from econmt.export.lexicon import LearntLexicon as LearntLexicon
from econmt.export.lexicon import make_lexicon as make_lexicon
from econmt.export.model_folder import quantize_model as quantize_model
from econmt.export.runtime import check_supported as check_supported
from econmt.export.runtime import export_runtime as export_runtime
