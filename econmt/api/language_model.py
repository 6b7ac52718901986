"""Trained language models of programs: scoring and writing text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch

from econmt.api.translation import Checkpoint, TrainedModel, parameter_count, parameters_of, set_threads
from econmt.checkpoint.checkpoints import LoadedModel, load_task
from econmt.config import limits
from econmt.decoding.requests import Request, check_request
from econmt.decoding.text_reader import ScoredLine, TextReader
from econmt.engine.devices import resolve_device
from econmt.engine.precision import precision_of
from econmt.errors import InputError
from econmt.model.language_model import LanguageModel


def load_language_model(
    folder: Path,
    checkpoint: Checkpoint,
    device: torch.device,
    precision: str,
    threads: int | Literal["auto"] | None,
) -> TrainedLanguageModel:
    """Loads a language model; see :func:`econmt.load`."""
    if precision == "int8":
        raise InputError(
            f"{folder}: precision int8 is for translation; use auto, float32, bfloat16 or float16"
        )
    loaded = load_task(folder, parameters_of(checkpoint), device)
    set_threads(threads, device, loaded.recipe.model.widest)
    return TrainedLanguageModel(loaded, device, precision)


def refuse_language_model(model: TrainedModel, folder: Path) -> None:
    """Raises InputError if a model is a language model."""
    if isinstance(model, TrainedLanguageModel):
        raise InputError(
            f"{folder}: holds a language model, which does not translate; use it with econmt score or econmt generate"
        )


class TrainedLanguageModel(TrainedModel):
    """Trained language model on one device, loaded by :func:`econmt.load`; it scores and writes text."""

    def __init__(self, loaded: LoadedModel[torch.nn.Module], device: torch.device, precision: str) -> None:
        assert isinstance(loaded.model, LanguageModel)
        self.model, self.vocabularies, self.recipe = loaded.model, loaded.vocabularies, loaded.recipe
        self._requested_precision = precision
        self.to(device)

    def to(self, device: torch.device | str) -> TrainedLanguageModel:
        """Moves the model to a device: auto, cpu, cuda or cuda:N; returns itself."""
        self.device = resolve_device(device)
        self.model.to(self.device)
        self.precision = precision_of(self._requested_precision, self.device, [self.recipe]).dtype
        return self

    def __repr__(self) -> str:
        """Describes the model: name, layers, parameters, vocabulary, device and precision."""
        layers = self.recipe.model
        assert not hasattr(layers, "encoder")
        return (
            f"<TrainedLanguageModel {self.recipe.name}: {layers.layers} x {layers.cell} {layers.size}, "
            f"{parameter_count([self.model]):,} parameters, vocabulary of {self.vocabularies.target.size:,}, "
            f"{str(self.precision).removeprefix('torch.')} on {self.device}>"
        )

    def reader(self) -> TextReader:
        """Returns a reader at the beginning of a text, which scores and writes and keeps its state in between."""
        return TextReader(self.model, self.vocabularies.target, self.device, self.precision)

    def score(self, lines: Sequence[str]) -> list[ScoredLine]:  # type: ignore[override]
        """Computes the log-probability of each line of a text given all lines before it, as ``econmt score`` does.

        Args:
            lines: lines of the text.

        Returns:
            A :class:`~econmt.decoding.text_reader.ScoredLine` for each line, with ``log_probability`` (natural
            logarithm, end of line included), ``perplexity`` per word, and ``token_log_probabilities``.

        Raises:
            InputError: if ``lines`` is not a list of text.

        Example::

            print(model.score(["The city lies on a river ."])[0].perplexity)
        """
        if not limits.is_list_of(lines, str):
            raise InputError("score expects a list of lines of text, for example score(['The city .'])")
        for number, line in enumerate(lines):
            check_request(Request(line), f"lines[{number}]")
        return list(self.reader().score(lines))

    def generate(
        self,
        prompt: str = "",
        length: int = 100,
        *,
        top_k: int = 0,
        top_p: float = 1.0,
        temperature: float = 1.0,
        seed: int = 1,
    ) -> str:
        """Writes text: each token is drawn from the distribution given all tokens before it, as ``econmt generate``.

        Args:
            prompt: beginning of the text.
            length: number of tokens to write, including ends of lines.
            top_k: draw from this many most probable tokens; 0: from all.
            top_p: draw from the fewest most probable tokens whose probabilities add up to this.
            temperature: divisor of the log-probabilities before drawing.
            seed: seed of the random draws.

        Returns:
            The prompt with its continuation.

        Raises:
            InputError: if an argument is out of range, or the prompt is no text.

        Example::

            print(model.generate("The city", length=50, top_k=50))
        """
        if not isinstance(prompt, str):
            raise InputError("generate expects a text to begin with, for example generate('The city')")
        check_request(Request(prompt), "prompt")
        limits.check_whole("length", length, limits.INPUT_LENGTH)
        limits.check_number("top_k", top_k, limits.WORDS, whole=True)
        limits.check_number("top_p", top_p, 1.0, above=True)
        limits.check_number("seed", seed, limits.SEED, whole=True)
        limits.check_number("temperature", temperature, limits.TEMPERATURE, above=True)
        drawing = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
        return "\n".join(self.reader().continued(prompt, length, **drawing))

    def _options(self, search: Any, files: Any) -> NoReturn:  # noqa: ARG002
        """Raises InputError where a translation model takes the options of a search."""
        raise InputError(
            f"{self.recipe.name}: is a language model, which does not translate; use score or generate"
        )
