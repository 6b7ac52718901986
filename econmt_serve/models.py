"""Models of a server by language pair, which are reloaded when their folders hold other parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Union

import torch

from econmt.api import TrainedModel, load
from econmt.api.language_model import refuse_language_model
from econmt.checkpoint.checkpoints import parameter_file
from econmt.checkpoint.folder import ModelFolder
from econmt.checkpoint.hub import local_model
from econmt.checkpoint.tensor_files import read_metadata
from econmt.config.data import Data
from econmt.config.recipe import read_recipe
from econmt.decoding.constraints.tokens import ConstraintCompiler
from econmt.decoding.requests import Request
from econmt.decoding.search.beam import output_limits
from econmt.decoding.translation import Translation
from econmt.decoding.translator import Translator
from econmt.decoding.words import has_words
from econmt.errors import InputError
from econmt.export.model_folder import read_metrics
from econmt_serve.next_words import NextWord, NextWords
from econmt_serve.settings import Refused, Settings
from econmt_serve.text.passages import TextDivision, division
from econmt_serve.text.sentences import splitter_for

_LONGEST_PAUSE = 6
"""Longest pause between attempts to load a broken model, as a power of two of folder checks."""
Answer = Union[Translation, list[NextWord]]


class TranslationJob(NamedTuple):
    """Kind of request; sentences of the same kind can be translated together.

    Attributes:
        nbest: number of translations.
        attention: True if they include the attention.
        words: number of next words to find instead of translations; 0: translations.
        constrained: True if the sentence has constraints, which need another search.
    """

    nbest: int = 1
    attention: bool = False
    words: int = 0
    constrained: bool = False


class LoadedModels:
    """Loaded model or ensemble with its translators.

    Attributes:
        model: the model or ensemble.
        size: bytes of the parameter files.
        beam: beam size, which is the maximum number of translations of a sentence.
        batch: maximum number of sentences that are translated together.
    """

    def __init__(self, model: TrainedModel, settings: Settings, size: int) -> None:
        self.model, self.size = model, size
        self.beam = settings.beam_size or model.recipe.decoding.beam_size
        self.batch = settings.batch_size or model.recipe.decoding.batch_size
        self._translators: dict[tuple[int, bool], Translator] = {}
        lists = settings.avoid, settings.glossary
        self._constraint_compiler = ConstraintCompiler(
            model.vocabularies.target, *lists, language=model.recipe.pairs.source
        )
        self._has_lists = any(lists)
        self._settings = settings
        self._words: NextWords | None = None

    @property
    def parameters(self) -> int:
        """Number of parameters of the models."""
        models = self.model.models
        return sum(parameter.numel() for model in models for parameter in model.parameters())

    def tokens(self, text: str, where: str) -> int:
        """Counts the source tokens of a sentence; raises Refused if there are too many to translate."""
        model = self.model
        count, most = len(model.vocabularies.source.encode(text)), model.recipe.decoding.max_input_length
        if count > most and has_words(text):
            remedy = f"at most {most:,} are translated whole, so break it"
            raise Refused(413, f"{where}: a sentence of {count:,} tokens; {remedy}")
        return count

    def translate(self, requests: Sequence[Request], task: TranslationJob) -> list[Answer | InputError]:
        """Returns the answer to each request, or an error if its constraints cannot be satisfied.

        Only one thread at a time may call this.
        """
        answers: dict[int, Answer | InputError] = {}
        for number, request in enumerate(requests):
            try:
                self._check_constraints(request)
                if task.words:
                    answers[number] = self._next_words().of(request, task.words, "q")
            except InputError as error:
                answers[number] = error
        rest = [number for number in range(len(requests)) if number not in answers]
        # A translator keeps memory for its searches, so there are three, not one for each number of translations.
        several = task.nbest > 1 or task.attention
        translator = self._translator(self.beam if several else 1, attention=task.attention)
        translations = translator.translate_chunk([requests[number] for number in rest], where="q")
        for number, each in zip(rest, translations, strict=True):
            answers[number] = each._replace(hypotheses=each.hypotheses[: task.nbest])
        return [answers[number] for number in range(len(requests))]

    def _next_words(self) -> NextWords:
        self._words = self._words or NextWords(self._translator(1, attention=False))
        return self._words

    def _check_constraints(self, request: Request) -> None:
        """Raises InputError if the constraints of a request cannot be satisfied or are too long."""
        if request.is_plain and not self._has_lists:
            return
        constraints = self._constraint_compiler.of(request, "q")
        # A search takes as many steps as tokens are written: at most those of the longest sentence in training.
        longest = self.model.recipe.pairs.max_length
        tokens = max(longest, len(self.model.vocabularies.source.encode(request.text)))
        factor = self.model.recipe.decoding.max_output_factor
        most = int(output_limits(torch.tensor([tokens + 1]), factor, longest))
        if len(constraints.ids) > most:
            raise Refused(
                413,
                f"q: constraints and target_prefix have {len(constraints.ids):,} tokens, a translation at most "
                f"{most:,}; shorten them",
            )

    def _translator(self, nbest: int, *, attention: bool) -> Translator:
        key = nbest, attention
        if key not in self._translators:
            settings = self._settings
            search = {
                "beam_size": self.beam,
                "nbest_size": nbest,
                "attention": attention,
                "restore_case": settings.restore_case,
                "glossary_mode": settings.glossary_mode,
            }
            self._translators[key] = self.model.translator(
                search, batch_size=self.batch, avoid=settings.avoid, glossary=settings.glossary
            )
        return self._translators[key]


class Served:
    """Models of one language pair, from a local folder or those of an ensemble.

    Attributes:
        source, target: codes of the languages.
        division: division of texts into sentences.
        split_languages: languages by whose rules texts are divided; None: they are not.
        loaded: the models that answer requests now.
    """

    def __init__(
        self,
        folders: Sequence[Path],
        settings: Settings,
        load_model: Callable[[Sequence[Path]], TrainedModel] = load,
    ) -> None:
        self.folders = list(folders)
        self._settings, self._load = settings, load_model
        self._stamp = self._tried = self._file_stamps()
        self._failures = self._pause = 0
        self.loaded = self._load_folders()
        self._checkpoints = list(map(_checkpoint, self.folders))
        data = self.loaded.model.recipe.pairs
        self.source, self.target = data.source, data.target
        self.split_languages = (data.source, data.target) if settings.split_sentences else None
        self.division = TextDivision()
        if settings.split_sentences:
            self.division = division(splitter_for(data.source), data.target)

    def reload(self) -> str:
        """Loads the models again if their folders hold other parameters; returns which ones, or "" if they do not.

        After a failure it is tried again, each time after twice as many calls, since another file or memory may have
        been missing.

        Raises:
            EconmtError, OSError, RuntimeError, MemoryError: the models cannot be loaded; the old ones stay in use.
        """
        stamp = self._file_stamps()
        if stamp == self._stamp:
            return ""
        if stamp != self._tried:
            self._tried, self._failures, self._pause = stamp, 0, 0
        if self._pause:
            self._pause -= 1
            return ""
        self._failures += 1
        self._pause = 2 ** min(self._failures, _LONGEST_PAUSE)
        self.loaded = self._load_folders()
        self._stamp = stamp
        before, self._checkpoints = self._checkpoints, list(map(_checkpoint, self.folders))
        changes = zip(self.folders, before, self._checkpoints, strict=True)
        return "; ".join(f"{folder}: {new} replaces {old}" for folder, old, new in changes if new != old) or (
            f"{', '.join(map(str, self.folders))}: the same parameters are loaded again"
        )

    def _load_folders(self) -> LoadedModels:
        model = self._load(self.folders)
        refuse_language_model(model, self.folders[0])
        if model.vocabularies.factors:
            raise InputError(
                f"{self.folders[0]}: reads source factors, which no request to a server has; translate with econmt "
                "translate --input-factors"
            )
        size = sum(parameter_file(ModelFolder(folder), "best").stat().st_size for folder in self.folders)
        return LoadedModels(model, self._settings, size)

    def _file_stamps(self) -> list[tuple[int, int, int] | None]:
        """Returns the identity of each parameter file, which tells when it is replaced."""
        stamps: list[tuple[int, int, int] | None] = []
        for folder in self.folders:
            try:
                status = ModelFolder(folder).best.stat()
            except OSError:  # loading reports the error
                stamps.append(None)
            else:
                stamps.append((status.st_ino, status.st_size, status.st_mtime_ns))
        return stamps


def _checkpoint(folder: Path) -> str:
    """Describes the best parameters of a folder: their update, and their BLEU if the folder tells it."""
    try:
        update = read_metadata(ModelFolder(folder).best).get("update", "?")
        rows = read_metrics(ModelFolder(folder).metrics)
    except InputError:
        return "a checkpoint"
    scores = [row["bleu"] for row in rows if str(row["update"]) == update and "bleu" in row]
    return f"update {update}" + "".join(f" (BLEU {score:.1f})" for score in scores[-1:])


def by_pair(
    folders: Sequence[Path], settings: Settings, load_model: Callable[[Sequence[Path]], TrainedModel] = load
) -> list[Served]:
    """Loads models; those of the same language pair form an ensemble.

    Raises:
        InputError: a model cannot be loaded, or lists of words are given for several language pairs.
    """
    pairs: dict[tuple[str, str], list[Path]] = {}
    for folder in map(local_model, folders):
        pairs.setdefault(_pair_of(folder), []).append(folder)
    if len(pairs) > 1 and (settings.avoid or settings.glossary is not None):
        raise InputError(
            f"--glossary and --avoid-list are for one language pair, and the models have {len(pairs)}; start a server "
            "for each"
        )
    return [Served(ensemble, settings, load_model) for ensemble in pairs.values()]


def _pair_of(folder: Path) -> tuple[str, str]:
    """Returns the languages of a model folder; a pair of its own if it has none, and loading will report the error."""
    file = ModelFolder(folder).recipe
    data = read_recipe(file).data if file.is_file() else None
    return (data.source, data.target) if isinstance(data, Data) else ("", str(folder))
