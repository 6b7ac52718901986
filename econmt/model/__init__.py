"""Translation and language models: parameters, forward pass, loss, and stepwise inference; reads no files."""

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
