"""The models of a server, a language pair each, loaded anew when their folders hold better parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Union

import torch

from econmt.api import TrainedModel, load
from econmt.checkpoint.checkpoints import parameter_file
from econmt.checkpoint.folder import ModelFolder
from econmt.checkpoint.hub import local_model
from econmt.config.data import Data
from econmt.config.recipe import read_recipe
from econmt.decoding.constraints.tokens import ConstraintCompiler
from econmt.decoding.next_words import NextWord, NextWords
from econmt.decoding.requests import Request
from econmt.decoding.search.beam import output_limits
from econmt.decoding.translation import Translation
from econmt.decoding.translator import Translator
from econmt.errors import InputError
from econmt.serving.settings import Refused, Settings

_LONGEST_PAUSE = 6
"""Longest pause between attempts to load a broken model, as a power of two of folder checks."""
Answer = Union[Translation, list[NextWord]]


class TranslationJob(NamedTuple):
    """Kind of a sentence's request; requests of the same kind can be translated together.

    Attributes:
        nbest: translations wanted.
        attention: whether they carry it.
        words: how many next words are wanted instead; 0: translations.
        wished: whether anything is wished of it: that takes another search.
    """

    nbest: int = 1
    attention: bool = False
    words: int = 0
    wished: bool = False


class _Loaded:
    """A model, or an ensemble, with what translates by it; used by one thread at a time."""

    def __init__(self, model: TrainedModel, settings: Settings, size: int) -> None:
        self.model, self.size = model, size
        self.beam = settings.beam_size or model.recipe.decoding.beam_size
        self.batch = settings.batch_size or model.recipe.decoding.batch_size
        self._translators: dict[tuple[int, bool], Translator] = {}
        self._wishes = ConstraintCompiler(model.vocabularies.target)
        self._words: NextWords | None = None

    def translate(self, requests: Sequence[Request], task: TranslationJob) -> list[Answer | InputError]:
        if task.words:
            self._words = self._words or NextWords(self._translator(1, attention=False))
            return [
                self._problem(request) or self._next_words(self._words, request, task.words)
                for request in requests
            ]
        problems = [self._problem(request) for request in requests]
        fits = [request for request, problem in zip(requests, problems, strict=True) if problem is None]
        # A translator keeps memory for its searches: there are three, not one for each number that clients may ask for.
        wide = task.nbest > 1 or task.attention
        translator = self._translator(self.beam if wide else 1, attention=task.attention)
        whole = translator.translate_chunk(fits, where="q")
        found = iter([each._replace(hypotheses=each.hypotheses[: task.nbest]) for each in whole])
        return [next(found) if problem is None else problem for problem in problems]

    def _next_words(self, words: NextWords, request: Request, most: int) -> Answer | InputError:
        try:
            return words.of(request, most, "q")
        except InputError as error:
            return error

    def _problem(self, request: Request) -> InputError | None:
        """Returns the error in a request's constraints, which does not stop the rest of its batch."""
        if request.is_plain:
            return None
        try:
            constraints = self._wishes.of(request, "q")
        except InputError as error:
            return error
        # A search takes as many steps as it has to write; no more than for the longest sentence of training.
        longest = self.model.recipe.pairs.max_length
        tokens = max(longest, len(self.model.vocabularies.source.encode(request.text)))
        factor = self.model.recipe.decoding.max_output_factor
        most = int(output_limits(torch.tensor([tokens + 1]), factor, longest))
        if constraints is not None and len(constraints.ids) > most:
            return Refused(
                413,
                f"q: constraints and target_prefix have {len(constraints.ids):,} tokens, a translation {most:,}; "
                "wish less of a sentence",
            )
        return None

    def _translator(self, nbest: int, *, attention: bool) -> Translator:
        key = nbest, attention
        if key not in self._translators:
            search = {"beam_size": self.beam, "nbest_size": nbest, "attention": attention}
            self._translators[key] = self.model.translator(search, batch_size=self.batch)
        return self._translators[key]


class Served:
    """The models of one language pair.

    Args:
        folders: a model folder, or those of an ensemble, on this machine.
        settings: of the server.
        load_model: loads them.

    Attributes:
        source, target: the languages.
    """

    def __init__(
        self,
        folders: Sequence[Path],
        settings: Settings,
        load_model: Callable[[Sequence[Path]], TrainedModel] = load,
    ) -> None:
        self.folders = list(folders)
        self._settings, self._load = settings, load_model
        self._stamp = self._tried = self._found()
        self._failures = self._pause = 0
        self._loaded = self._fresh()
        data = self._loaded.model.recipe.pairs
        self.source, self.target = data.source, data.target

    @property
    def beam(self) -> int:
        """Hypotheses of a search, which are the most that a sentence can have."""
        return self._loaded.beam

    @property
    def batch(self) -> int:
        """Sentences that are translated together at most."""
        return self._loaded.batch

    @property
    def parameters(self) -> int:
        """Number of parameters of the models."""
        models = self._loaded.model.models
        return sum(parameter.numel() for model in models for parameter in model.parameters())

    @property
    def size(self) -> int:
        """Bytes of the files that the parameters were read from."""
        return self._loaded.size

    def tokens(self, text: str, where: str) -> int:
        """Source tokens of a sentence.

        Raises:
            Refused: they are more than the recipe lets a source have.
        """
        model = self._loaded.model
        found, most = len(model.vocabularies.source.encode(text)), model.recipe.decoding.max_input_length
        if found > most:
            raise Refused(
                413,
                f"{where}: a sentence of {found:,} tokens; at most {most:,} are translated whole, so break it",
            )
        return found

    def translate(self, requests: Sequence[Request], task: TranslationJob) -> list[Answer | InputError]:
        """Answers each request; a request with impossible constraints gets an error."""
        return self._loaded.translate(requests, task)

    def reload(self) -> bool:
        """Loads the models again if their folders hold other parameters.

        What could not be loaded is tried again, each time after twice as many calls: another file may have
        been missing, or memory.

        Raises:
            EconmtError, OSError, RuntimeError, MemoryError: they cannot be loaded; those before go on.
        """
        found = self._found()
        if found == self._stamp:
            return False
        if found != self._tried:
            self._tried, self._failures, self._pause = found, 0, 0
        if self._pause:
            self._pause -= 1
            return False
        self._failures += 1
        self._pause = 2 ** min(self._failures, _LONGEST_PAUSE)
        self._loaded = self._fresh()
        self._stamp = found
        return True

    def _fresh(self) -> _Loaded:
        model = self._load(self.folders)
        if model.vocabularies.factors:
            raise InputError(
                f"{self.folders[0]}: reads source factors, which no request to a server has; translate with econmt "
                "translate --input-factors"
            )
        size = sum(parameter_file(ModelFolder(folder), "best").stat().st_size for folder in self.folders)
        return _Loaded(model, self._settings, size)

    def _found(self) -> tuple[Any, ...]:
        """Returns the identity of the parameter files, by which replaced files are noticed."""
        stamps: list[tuple[int, ...]] = []
        for folder in self.folders:
            try:
                seen = ModelFolder(folder).best.stat()
            except OSError:  # loading says what is wrong
                stamps.append(())
            else:
                stamps.append((seen.st_ino, seen.st_size, seen.st_mtime_ns))
        return tuple(stamps)


def by_pair(
    folders: Sequence[Path],
    settings: Settings,
    load_model: Callable[[Sequence[Path]], TrainedModel] = load,
) -> list[Served]:
    """The models in some folders: those of one language pair translate as one, as an ensemble.

    Raises:
        InputError: a model cannot be loaded, or an ensemble's vocabularies differ.
    """
    pairs: dict[tuple[str, str], list[Path]] = {}
    for folder in map(local_model, folders):
        pairs.setdefault(_pair_of(folder), []).append(folder)
    return [Served(own, settings, load_model) for own in pairs.values()]


def _pair_of(folder: Path) -> tuple[str, str]:
    """The languages of a model folder, or something else of its own where loading it will say what is wrong."""
    file = ModelFolder(folder).recipe
    data = read_recipe(file).data if file.is_file() else None
    return (data.source, data.target) if isinstance(data, Data) else ("", str(folder))
