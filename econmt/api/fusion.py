"""Language models that take part in the searches of a translation model."""

from __future__ import annotations

from pathlib import Path

import torch

from econmt.checkpoint.checkpoints import load_task
from econmt.checkpoint.hub import local_model
from econmt.data.text.subwords import target_vocabulary_file
from econmt.data.text.vocabulary import Vocabulary
from econmt.decoding.search.fusion import ShallowFusion
from econmt.errors import InputError
from econmt.model.language_model import LanguageModel


def load_fusion(
    name: Path | str,
    weight: float,
    device: torch.device,
    precision: torch.dtype,
    target: Vocabulary,
    translation_folder: Path | None,
) -> ShallowFusion:
    """Loads a language model for :class:`~econmt.decoding.translator.Translator`.

    Args:
        name: its folder, or its name on the Hub. weight: factor of its log-probabilities.
        device: device of the search. precision: type of its matrix products; the language model has no int8.
        target: target vocabulary of the translation model, which the language model must have, too.
        translation_folder: folder of the translation model, for messages; None: it was not loaded from one.

    Raises:
        InputError: the folder holds no language model, or its vocabulary is another one.
    """
    folder = local_model(name)
    loaded = load_task(folder, "best", device)
    if not isinstance(loaded.model, LanguageModel):
        raise InputError(f"{folder}: holds a translation model; language_model takes a language model")
    own = loaded.vocabularies.target
    if own.size != target.size or own.tokens(range(own.size)) != target.tokens(range(target.size)):
        file = target_vocabulary_file(folder)
        other = "the target vocabulary of the translation model"
        advice = "train the language model with that vocabulary"
        if translation_folder is not None:
            path = target_vocabulary_file(translation_folder)
            other = str(path)
            key = {".txt": "lists", ".model": "models"}.get(path.suffix)
            if key is not None:
                advice = f"train the language model with data.subwords.{key}: [{path}]"
        raise InputError(f"{file}: differs from {other}, whose tokens a language model must have; {advice}")
    return ShallowFusion(loaded.model, weight, torch.float32 if precision == torch.int8 else precision)
