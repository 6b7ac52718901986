"""The attention-LSTM translation model; knows tensors and ``recipe.Model``, nothing of files."""

from __future__ import annotations

from econmt.model.implementations import Implementations
from econmt.model.translation import DecoderState, EncoderOutput, TranslationModel, build_model

__all__ = ["DecoderState", "EncoderOutput", "Implementations", "TranslationModel", "build_model"]
