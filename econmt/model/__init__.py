"""The attention-LSTM translation model; knows tensors and ``recipe.Model``, nothing of files."""

from __future__ import annotations

from econmt.model.implementations import Implementations
from econmt.model.inference.decoder import IncrementalModel
from econmt.model.inference.state import IncrementalState
from econmt.model.translation import EncoderOutput, TranslationModel, build_model

__all__ = [
    "EncoderOutput",
    "Implementations",
    "IncrementalModel",
    "IncrementalState",
    "TranslationModel",
    "build_model",
]
