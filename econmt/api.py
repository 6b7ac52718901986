"""econmt from Python: train a recipe, load what it left, translate with it.

Example::

    import econmt

    econmt.train("multi30k", {"training.max_updates": 3000})
    model = econmt.load("runs/multi30k", device="cpu")
    best = model.translate(["A dog."], beam_size=5, nbest_size=3)[0]
    print(best.text, best.score, [other.text for other in best.hypotheses], best.attention)

What a caller gave wrong raises :class:`econmt.errors.InputError`.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Union

import torch
from pydantic import ValidationError
from rich.console import Console

from econmt.checkpoint.checkpoints import LoadedModel, load_model
from econmt.checkpoint.hub import local_model
from econmt.checkpoint.lexicons import read_lexicon
from econmt.config import limits
from econmt.config.recipe import Recipe, find_recipe, load_recipe
from econmt.config.yaml_reader import complaints
from econmt.data.text.corpus import search_path
from econmt.data.text.subwords import fingerprint, normalized
from econmt.decoding.constraints.glossary import Glossary, read_glossary
from econmt.decoding.requests import Request as Request
from econmt.decoding.search.beam import SearchOptions
from econmt.decoding.search.shortlist import Shortlists
from econmt.decoding.translator import CHUNK_SIZE, Translation, Translator
from econmt.engine.devices import resolve_device
from econmt.engine.precision import precision_of
from econmt.engine.threads import threads_for
from econmt.errors import InputError
from econmt.model import IncrementalModel
from econmt.training.run import Outcome, run_recipe

Checkpoint = Union[str, int, Path]
"""The words "best" or "last", the update of a checkpoint, or the path of a parameter file."""


def train(
    recipe: Path | str,
    overrides: Sequence[str] | Mapping[str, object] = (),
    *,
    data_dir: Path | str | None = None,
    overwrite_output: bool = False,
    resume_with_changes: bool = False,
    verify: bool = False,
    quiet: bool = False,
) -> Outcome:
    """Train a recipe, or go on where its model folder stands, as ``econmt train`` does.

    Args:
        recipe: a YAML file or the name of a shipped recipe.
        overrides: what to change in it, as ``["training.seed=2"]`` or ``{"training.seed": 2}``.
        data_dir: the folder in which its text is looked for first.
        overwrite_output: start anew, whatever is in the model folder.
        resume_with_changes: go on although the recipe differs from the one that the run began with.
        verify: read all of the text and of the prepared data to see whether they have changed, not only a sample.
        quiet: report nothing on standard error; the log is in the model folder either way.

    Returns:
        How training ended, and the results of the best checkpoint; no results if the run was complete before.

    Raises:
        InputError: if the recipe, an override or the text cannot be used.
        TrainingError: if training had to stop.
        Interrupted: after SIGTERM or Ctrl-C, with everything saved.
    """
    if not isinstance(recipe, (str, Path)):
        raise InputError(f"recipe {recipe!r}: give a file or the name of a shipped recipe")
    if data_dir is not None and not isinstance(data_dir, (str, Path)):
        raise InputError(f"data_dir {data_dir!r}: give a folder")
    if not isinstance(overrides, Mapping) and not _is_list_of(overrides, str):
        raise InputError(f"overrides {overrides!r}: give a list of key=value, or a dictionary")
    if isinstance(overrides, Mapping):
        # The value of an override is read as YAML, and JSON is YAML.
        values = {key: json.dumps(value, ensure_ascii=False, default=str) for key, value in overrides.items()}
        overrides = [f"{key}={value}" for key, value in values.items()]
    return run_recipe(
        load_recipe(recipe, overrides),
        search_path(find_recipe(recipe).parent, None if data_dir is None else Path(data_dir)),
        console=Console(stderr=True, highlight=False, quiet=quiet),
        overwrite_output=overwrite_output,
        resume_with_changes=resume_with_changes,
        verify=verify,
    )


def load(
    model: Path | str | Sequence[Path | str],
    checkpoint: Checkpoint | Sequence[Checkpoint] = "best",
    *,
    device: torch.device | str = "auto",
    precision: str = "auto",
    threads: int | Literal["auto"] | None = None,
) -> TrainedModel:
    """Load a trained model, or several that translate as one.

    Args:
        model: a model folder, or those of an ensemble, which must share their vocabularies; ``hf://OWNER/NAME`` is one
            of the Hugging Face Hub.
        checkpoint: one for all models, or one for each.
        device: auto, cpu, cuda or cuda:N.
        precision: of products: float32, bfloat16, on a CPU int8, or auto for what is faster on the device, which for
            models that ``econmt quantize`` made is int8.
        threads: of the CPU, for all of torch; auto: as many as are fastest here; None: as many as torch has already.

    Raises:
        InputError: naming the folder, if a model cannot be loaded, or if its vocabularies are not the first one's.
    """
    if not _is_list_of([model] if isinstance(model, (str, Path)) else model, (str, Path)):
        raise InputError(f"model {model!r}: give a model folder, or a list of them")
    given = [checkpoint] if isinstance(checkpoint, (str, int, Path)) else checkpoint
    if isinstance(checkpoint, bool) or not _is_list_of(given, (str, int, Path)):
        raise InputError(f"checkpoint {checkpoint!r}: give best, last, the number of an update, or a file")
    folders = [local_model(name) for name in ([model] if isinstance(model, (str, Path)) else model)]
    chosen = [checkpoint] if isinstance(checkpoint, (str, int, Path)) else list(checkpoint)
    if not folders:
        raise InputError("no model folder is given; give at least one")
    if len(chosen) not in (1, len(folders)):
        raise InputError(
            f"checkpoint is given {len(chosen)} times for {len(folders)} models; give it once, or once for each"
        )
    chosen *= len(folders) // len(chosen)
    limits.check_whole("threads", None if threads == "auto" else threads, limits.THREADS)
    place = resolve_device(str(device))
    loaded = [
        load_model(
            folder, Path(which) if isinstance(which, str) and which.endswith(".safetensors") else which, place
        )
        for folder, which in zip(folders, chosen, strict=True)
    ]
    for folder in folders[1:]:
        if fingerprint(folder) != fingerprint(folders[0]):
            raise InputError(
                f"{folder}: its vocabularies differ from those of {folders[0]}; models of an ensemble must share them"
            )
    if threads is not None:
        widest = max(each.recipe.model.widest for each in loaded)
        wanted = None if threads == "auto" else threads
        torch.set_num_threads(threads_for(wanted, place, widest).number)
    return TrainedModel(loaded, place, precision, fingerprint(folders[0]))


def _is_list_of(given: Any, kinds: type | tuple[type, ...]) -> bool:
    """Whether a value is a sequence, not a text, of such values."""
    whole = isinstance(given, Sequence) and not isinstance(given, (str, bytes))
    return whole and all(isinstance(each, kinds) for each in given)


class TrainedModel:
    """A trained model, or an ensemble, on one device; it serves any number of calls. :func:`load` makes it."""

    def __init__(
        self,
        loaded: Sequence[LoadedModel],
        device: torch.device | str,
        precision: str,
        vocabulary: str | None = None,
    ) -> None:
        """``vocabulary``: the fingerprint of the vocabulary files, which lexicons must have."""
        if precision not in ("auto", "float32", "bfloat16", "int8"):
            raise InputError(f"precision '{precision}': give auto, float32, bfloat16 or int8")
        self.loaded = list(loaded)
        self.vocabularies, self.recipe = loaded[0].vocabularies, loaded[0].recipe
        self._wanted, self.vocabulary = precision, vocabulary
        self.to(device)

    def to(self, device: torch.device | str) -> TrainedModel:
        """Move to a device, auto, cpu, cuda or cuda:N; returns itself."""
        self.device = resolve_device(str(device))
        self.models = [each.model.to(self.device) for each in self.loaded]
        recipes = [each.recipe for each in self.loaded]
        self.precision = self._precision(recipes)
        self._incremental: list[IncrementalModel] = []
        self._translator: tuple[tuple[object, ...], Translator] | None = None
        return self

    def _precision(self, recipes: Sequence[Recipe]) -> torch.dtype:
        """That of products."""
        on_cpu = self.device.type == "cpu"
        if self._wanted == "int8" and not on_cpu:
            raise InputError(f"precision int8 is for a CPU; on {self.device} give auto, float32 or bfloat16")
        stored = on_cpu and all(each.stored == "int8" for each in self.loaded)
        if self._wanted == "int8" or (self._wanted == "auto" and stored):
            return torch.int8
        return precision_of(self._wanted, self.device, recipes).dtype

    def translate(
        self,
        lines: Sequence[str | Request],
        *,
        avoid: Sequence[str] = (),
        glossary: Glossary | Path | str | None = None,
        restrict_lexicon: Path | str | None = None,
        restrict_lexicon_topk: int | None = None,
        beam_size: int | None = None,
        nbest_size: int = 1,
        batch_size: int | None = None,
        device: torch.device | str | None = None,
        **search: Any,
    ) -> list[Translation]:
        """Translate raw text, one sentence a line.

        Args:
            lines: the sentences; a blank one is translated by an empty line without hypotheses. An
                :class:`econmt.Request` instead says what is wished of its translation.
            avoid: phrases that no translation may hold.
            glossary: terms and their translations, which are constraints where the terms occur; or its file.
            restrict_lexicon: a file of ``econmt lexicon``: no words are computed but those that it has for the words of
                a sentence.
            restrict_lexicon_topk: so many of the most probable for each word; None: all that the file has.
            beam_size: hypotheses kept at each position; None: the recipe's.
            nbest_size: how many hypotheses of a sentence are returned.
            batch_size: sentences translated together; None: the recipe's.
            device: where to move before; None: where the models are.
            search: other fields of :class:`~econmt.decoding.search.beam.SearchOptions`, such as ``sample`` and ``seed``.

        Returns:
            A :class:`~econmt.decoding.translator.Translation` for each line: its text, score, tokens and ``attention``
            (target tokens + 1, source tokens + 1), whose rows add up to one, and the n best as ``hypotheses``.

        Raises:
            InputError: if the lines are not a list of text, an option is out of range, there is no such device, or what
                is wished of a line cannot be had.
        """
        texts: list[Any] = (
            list(lines) if isinstance(lines, Iterable) and not isinstance(lines, str) else [None]
        )
        if not _is_list_of(texts, (str, Request)):
            raise InputError("translate takes a list of lines of text, for example translate(['A dog.'])")
        if device is not None and resolve_device(str(device)) != self.device:
            self.to(device)
        given = {"beam_size": beam_size, "nbest_size": nbest_size, **search}
        translator = self.translator(
            given,
            batch_size=batch_size,
            avoid=avoid,
            glossary=glossary,
            restrict_lexicon=restrict_lexicon,
            restrict_lexicon_topk=restrict_lexicon_topk,
            warn=warnings.warn,
        )
        return list(translator.translate(texts))

    def translator(
        self,
        search: Mapping[str, Any],
        *,
        batch_size: int | None = None,
        chunk_size: int = CHUNK_SIZE,
        max_input_length: int | None = None,
        long_lines: Literal["cut", "skip"] = "cut",
        avoid: Sequence[str] = (),
        glossary: Glossary | Path | str | None = None,
        restrict_lexicon: Path | str | None = None,
        restrict_lexicon_topk: int | None = None,
        warn: Callable[[str], None] | None = None,
    ) -> Translator:
        """What translates a stream of lines.

        Args:
            search: as for :meth:`search_options`.
            batch_size, max_input_length: None: the recipe's.
            avoid, glossary, restrict_lexicon, restrict_lexicon_topk: as for :meth:`translate`.
            chunk_size, long_lines, warn: see :class:`~econmt.decoding.translator.Translator`.
        """
        if isinstance(avoid, str) or not all(
            isinstance(phrase, str) and normalized(phrase) for phrase in avoid
        ):
            raise InputError("avoid takes a list of phrases, for example ['Hund', 'der Mann']")
        limits.check_whole("batch_size", batch_size, limits.TRANSLATED)
        limits.check_whole("chunk_size", chunk_size, limits.LINES)
        limits.check_whole("max_input_length", max_input_length, limits.INPUT_LENGTH)
        if long_lines not in ("cut", "skip"):
            raise InputError(f"long_lines {long_lines!r}: give cut or skip")
        options = self.search_options(search)
        self._incremental = self._incremental or [
            IncrementalModel(each, self.precision) for each in self.models
        ]
        asked = (
            options,
            batch_size := batch_size or self.recipe.decoding.batch_size,
            chunk_size,
            max_input_length := max_input_length or self.recipe.decoding.max_input_length,
            long_lines,
            avoid := tuple(avoid),
            glossary,
            restrict_lexicon,
            restrict_lexicon_topk,
        )
        # Whoever asks the same again gets the one whose graphs are captured.
        if self._translator is None or self._translator[0] != asked:
            self._translator = None  # and with it the memory of its graphs, before another takes some
            made = Translator(
                self._incremental,
                self.vocabularies,
                options,
                self.device,
                batch_size=batch_size,
                chunk_size=chunk_size,
                max_length=self.recipe.pairs.max_length,
                max_input_length=max_input_length,
                long_lines=long_lines,
                avoid=avoid,
                glossary=read_glossary(Path(glossary)) if isinstance(glossary, (str, Path)) else glossary,
                shortlists=self._shortlists(restrict_lexicon, restrict_lexicon_topk),
                warn=warn,
            )
            self._translator = asked, made
        translator = self._translator[1]
        translator.warn = warn
        return translator

    def _shortlists(self, path: Path | str | None, top: int | None) -> Shortlists | None:
        """Those of a lexicon's file, if one is given."""
        limits.check_whole("restrict_lexicon_topk", top, limits.SHORTLIST)
        if path is None:
            return None
        if self.vocabulary is None:
            raise InputError(
                f"{path}: this model was not loaded from a folder, so nobody knows whether it fits"
            )
        source, target = self.vocabularies.sides
        table = read_lexicon(Path(path), self.vocabulary, self.vocabularies)
        return Shortlists(table, target.size, top or table.shape[1], source is target)

    def search_options(self, given: Mapping[str, Any]) -> SearchOptions:
        """The recipe's search with what a caller gave by name; None stands for what was not given.

        Raises:
            InputError: if a name is unknown or a value is out of range.
        """
        if not isinstance(given, Mapping):
            raise InputError(f"search {given!r}: give options by name, as {{'beam_size': 5}}")
        changes = {name: value for name, value in given.items() if value is not None}
        try:
            made = replace(SearchOptions.from_recipe(self.recipe.decoding), **changes)
        except ValidationError as failure:
            raise InputError(*complaints(failure)) from None
        except TypeError as error:
            raise InputError(str(error).removeprefix("SearchOptions.__init__() ")) from None
        _refuse_idle_penalties(changes, made)
        for each in self.loaded if made.brevity_penalty_type == "learned" else ():
            if each.recipe.translation_model.length_task == "none":
                raise InputError(
                    f"brevity_penalty_type learned: the model '{each.recipe.name}' has learnt no lengths (its "
                    "model.length_task is none); give constant or none"
                )
        return made


def _refuse_idle_penalties(given: Mapping[str, Any], made: SearchOptions) -> None:
    """Refuses penalties that a caller gave and the search has no use for.

    Raises:
        InputError: naming the option and what it would need.
    """
    kind, weight = made.brevity_penalty_type, "brevity_penalty_weight"
    if given.get(weight) and kind == "none":
        raise InputError(f"{weight}: brevity_penalty_type is none; give constant or learned, too")
    ratio = "brevity_penalty_constant_length_ratio"
    if ratio in given and kind != "constant":
        raise InputError(f"{ratio}: brevity_penalty_type is {kind}; give constant, too, or leave it out")
    for name in (weight, ratio, "brevity_penalty_type", "coverage_penalty_weight"):
        if given.get(name) and made.sample is not None:
            raise InputError(f"{name}: a penalty of searching; leave it or sample out")
