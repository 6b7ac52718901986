"""Models of a server by language pair, which are reloaded when their folders hold other parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from econmt.api import InputError, Request, SavedModel, TrainedModel, Translator, load
from econmt.api.language_model import refuse_language_model
from econmt.api.requests import constraint_tokens
from econmt.api.text import Translation, has_words
from econmt_serve.settings import Refused, Settings

AUTO = "auto"
"""Code for any source language."""
_LONGEST_PAUSE = 6
"""Longest pause between attempts to load a broken model, as a power of two of folder checks."""


class TranslationJob(NamedTuple):
    """Kind of request; sentences of the same kind can be translated together.

    Attributes:
        nbest: number of translations.
        attention: True if they include the attention.
        constrained: True if the sentence has constraints, which need another search.
    """

    nbest: int = 1
    attention: bool = False
    constrained: bool = False


class LoadedModels:
    """Loaded model or ensemble with its translators.

    Attributes:
        model: the model or ensemble.
        beam: beam size, which is the maximum number of translations of a sentence.
        batch: maximum number of sentences that are translated together.
    """

    def __init__(self, model: TrainedModel, settings: Settings) -> None:
        self.model = model
        self.beam = settings.beam_size or model.recipe.decoding.beam_size
        self.batch = settings.batch_size or model.recipe.decoding.batch_size
        self._translators: dict[tuple[int, bool], Translator] = {}
        self._settings = settings
        self._has_lists = bool(settings.avoid) or settings.glossary is not None
        if self._has_lists and model.vocabularies.target_tags:
            raise InputError("--glossary and --avoid-list are for one language pair; send them in requests")
        if self._has_lists:
            self._translator(1, attention=False)  # refuses lists that cannot be satisfied

    def tokens(self, request: Request, where: str) -> int:
        """Counts the source tokens of a sentence; raises Refused if there are too many to translate."""
        encode, most = self.model.vocabularies.source.encode, self.model.recipe.decoding.max_input_length
        count = len(encode(request.source_prefix)) + len(encode(request.text))
        if count > most and has_words(request.text):
            remedy = f"at most {most:,} are translated whole, so break it"
            raise Refused(413, f"{where}: a sentence of {count:,} tokens; {remedy}")
        return count

    def translate(self, requests: Sequence[Request], task: TranslationJob) -> list[Translation | InputError]:
        """Returns the answer to each request, or an error if its constraints cannot be satisfied.

        Only one thread at a time may call this.
        """
        # A translator keeps memory for its searches, so there are three, not one for each number of translations.
        several = task.nbest > 1 or task.attention
        translator = self._translator(self.beam if several else 1, attention=task.attention)
        problems = [self._problem(request, translator) for request in requests]
        rest = [request for request, problem in zip(requests, problems, strict=True) if problem is None]
        found = translator.translate_chunk(rest, where="q")
        cut = (each._replace(hypotheses=each.hypotheses[: task.nbest]) for each in found)
        return [next(cut) if problem is None else problem for problem in problems]

    def _problem(self, request: Request, translator: Translator) -> InputError | None:
        """Returns the error of a request whose constraints cannot be satisfied or are too long."""
        if request.is_plain and not self._has_lists:
            return None
        try:
            count, most = constraint_tokens(translator, request, "q")
        except InputError as error:
            return error
        told = f"constraints and target_prefix have {count:,} tokens, a translation at most {most:,}; shorten them"
        return Refused(413, f"q: {told}") if count > most else None

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
    """Models of one language pair or of several targets, from a local folder or those of an ensemble.

    Attributes:
        pairs: the language pairs: one, or any two of the languages among which tags choose.
        tags: tags by the target language that they choose; none for a single one.
        splits: True if texts are divided into sentences.
        loaded: the models that answer requests now.
    """

    def __init__(
        self,
        folders: Sequence[Path],
        settings: Settings,
        load_model: Callable[[Sequence[Path]], TrainedModel] = load,
    ) -> None:
        self.folders = list(folders)
        self._saved = list(map(SavedModel, folders))
        self._settings, self._load = settings, load_model
        self._stamp = self._tried = self._versions()
        self._failures = self._pause = 0
        self.loaded = self._load_folders()
        self._checkpoints = list(map(_checkpoint, self._saved))
        data = self.loaded.model.recipe.pairs
        self.tags = tags = self.loaded.model.vocabularies.target_tags
        named = (data.source,) if data.source[2:3] in ("", "-", "_") else ()  # else a mere suffix of files
        sources = dict.fromkeys((AUTO, *tags, *named))
        pairs = [(source, target) for target in tags for source in sources if source != target]
        self.pairs = [LanguagePair(self, *pair) for pair in pairs or [(data.source, data.target)]]
        self.splits = settings.split_sentences

    def reload(self) -> str:
        """Loads the models again if their folders hold other parameters; returns which ones, or "" if they do not.

        After a failure it is tried again, each time after twice as many calls, since another file or memory may have
        been missing.

        Raises:
            Exception: the models cannot be loaded, for whatever reason; the old ones stay in use.
        """
        stamp = self._versions()
        if stamp == self._stamp:
            return ""
        if stamp != self._tried:
            self._tried, self._failures, self._pause = stamp, 0, 0
        if self._pause:
            self._pause -= 1
            return ""
        self._failures += 1
        self._pause = 2 ** min(self._failures, _LONGEST_PAUSE)
        loaded = self._load_folders()
        if loaded.model.vocabularies.target_tags != self.tags:
            raise InputError(f"{self.folders[0]}: has other target languages now; start the server anew")
        self.loaded, self._stamp = loaded, stamp
        before, self._checkpoints = self._checkpoints, list(map(_checkpoint, self._saved))
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
        return LoadedModels(model, self._settings)

    def _versions(self) -> list[tuple[int, int, int] | None]:
        return [saved.version for saved in self._saved]


class LanguagePair(NamedTuple):
    """Models with the source language, `AUTO` if it is any, and the target language of their translations."""

    served: Served
    source: str
    target: str

    @property
    def split_languages(self) -> tuple[str, str] | None:
        """Languages by whose rules texts are divided into sentences; None: they are not."""
        return (self.source, self.target) if self.served.splits else None

    def tagged(self, line: Request) -> Request:
        """Returns a sentence with the tag of the target language, unless it begins with a tag of its own."""
        tags = self.served.tags
        if tags and not (line.start + line.text).startswith(tuple(tags.values())):
            return line._replace(source_prefix=f"{tags[self.target]} {line.source_prefix}".strip())
        return line


def _checkpoint(saved: SavedModel) -> str:
    """Describes the best parameters of a folder: their update, and their BLEU if the folder tells it."""
    try:
        metrics = saved.metrics
    except InputError:
        return "a checkpoint"
    score = f" (BLEU {metrics['bleu']:.1f})" if "bleu" in metrics else ""
    return f"update {metrics.get('update', '?')}{score}"


def by_pair(
    folders: Sequence[Path], settings: Settings, load_model: Callable[[Sequence[Path]], TrainedModel] = load
) -> list[Served]:
    """Loads models; those of the same language pair form an ensemble.

    Raises:
        InputError: a model cannot be loaded, or lists of words are given for several language pairs.
    """
    pairs: dict[tuple[str, str], list[Path]] = {}
    for saved in map(SavedModel, folders):
        # One without languages is a pair of its own, and loading will report the error.
        pairs.setdefault(saved.languages or ("", str(saved.folder)), []).append(saved.folder)
    if len(pairs) > 1 and (settings.avoid or settings.glossary is not None):
        raise InputError(
            f"--glossary and --avoid-list are for one language pair, and the models have {len(pairs)}; start a server "
            "for each"
        )
    return [Served(ensemble, settings, load_model) for ensemble in pairs.values()]
