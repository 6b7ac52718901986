"""The attention-LSTM translation model; knows tensors and ``recipe.Model``, nothing of files."""

from __future__ import annotations

from econmt.model.translation import DecoderState, EncoderOutput, TranslationModel

__all__ = ["DecoderState", "EncoderOutput", "TranslationModel"]
