"""Python interface: train a recipe, load a trained model, translate with it.

Example::

    import econmt

    econmt.train("multi30k", {"training.max_updates": 3000})
    model = econmt.load("runs/multi30k", device="cpu")
    best = model.translate(["A dog."], beam_size=5, nbest_size=3)[0]
    print(best.text, best.score, [other.text for other in best.hypotheses], best.attention)

Invalid arguments raise :class:`econmt.errors.InputError`.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
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
from econmt.decoding.translation import Translation
from econmt.decoding.translator import Translator
from econmt.engine.devices import resolve_device
from econmt.engine.precision import precision_of
from econmt.engine.threads import threads_for
from econmt.errors import InputError
from econmt.model import IncrementalModel
from econmt.training.run import Outcome, run_recipe

Checkpoint = Union[str, int, Path]
"""Checkpoint to load: "best", "last", the number of its update, or the path of a parameter file."""


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
    """Trains a recipe, or resumes the run in its model folder, like ``econmt train``.

    Args:
        recipe: YAML file, or name of a shipped recipe.
        overrides: changes to the recipe, as ``["training.seed=2"]`` or ``{"training.seed": 2}``.
        data_dir: folder in which the text is searched first.
        overwrite_output: if True, starts a new run even if the model folder holds one.
        resume_with_changes: if True, resumes even if the recipe differs from that of the run.
        verify: if True, reads the text and the prepared data completely to detect changes, instead of a sample.
        quiet: if True, prints nothing on standard error; the model folder always has the log.

    Returns:
        How training ended and the results of the best checkpoint, without results if the run was already complete.

    Raises:
        InputError: if the recipe, an override or the text cannot be used.
        TrainingError: if training had to stop.
        Interrupted: after SIGTERM or Ctrl-C, once everything is saved.

    Example::

        outcome = econmt.train("multi30k", {"training.max_updates": 3000, "output": "runs/short"})
    """
    if not isinstance(recipe, (str, Path)):
        raise InputError(f"recipe {recipe!r}: expected a file or the name of a shipped recipe")
    if data_dir is not None and not isinstance(data_dir, (str, Path)):
        raise InputError(f"data_dir {data_dir!r}: expected a folder")
    if not isinstance(overrides, Mapping) and not _is_list_of(overrides, str):
        raise InputError(f"overrides {overrides!r}: expected a list of key=value, or a dictionary")
    if isinstance(overrides, Mapping):
        # Overrides are parsed as YAML, of which JSON is a subset.
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
    """Loads a trained model, or several as an ensemble.

    Args:
        model: model folder, or a list of them for an ensemble, which must share their vocabularies;
            ``hf://OWNER/NAME`` loads a model from the Hugging Face Hub.
        checkpoint: checkpoint of all models, or a list with one for each.
        device: auto, cpu, cuda or cuda:N.
        precision: precision of matrix products: float32, bfloat16, int8 (CPU only), or auto for the faster one on this
            device; for models from ``econmt quantize`` that is int8 on a CPU.
        threads: number of CPU threads, set for all of torch; "auto" for the fastest number; None leaves it unchanged.

    Returns:
        The model, ready to translate.

    Raises:
        InputError: if a model cannot be loaded, or the vocabularies of an ensemble differ.

    Example::

        model = econmt.load("runs/multi30k", device="cpu")
        ensemble = econmt.load(["runs/a", "runs/b"], ["best", 3000])
    """
    if not _is_list_of([model] if isinstance(model, (str, Path)) else model, (str, Path)):
        raise InputError(f"model {model!r}: expected a model folder, or a list of them")
    checkpoints = [checkpoint] if isinstance(checkpoint, (str, int, Path)) else checkpoint
    if isinstance(checkpoint, bool) or not _is_list_of(checkpoints, (str, int, Path)):
        raise InputError(
            f"checkpoint {checkpoint!r}: expected best, last, the number of an update, or a file"
        )
    folders = [local_model(name) for name in ([model] if isinstance(model, (str, Path)) else model)]
    chosen = [checkpoint] if isinstance(checkpoint, (str, int, Path)) else list(checkpoint)
    if not folders:
        raise InputError("no model folder is given; give at least one")
    if len(chosen) not in (1, len(folders)):
        raise InputError(
            f"{len(chosen)} checkpoints are given for {len(folders)} models; give one, or one for each model"
        )
    chosen *= len(folders) // len(chosen)
    limits.check_whole("threads", None if threads == "auto" else threads, limits.THREADS)
    resolved = resolve_device(str(device))
    loaded = [
        load_model(
            folder,
            Path(which) if isinstance(which, str) and which.endswith(".safetensors") else which,
            resolved,
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
        thread_count = None if threads == "auto" else threads
        torch.set_num_threads(threads_for(thread_count, resolved, widest).number)
    return TrainedModel(loaded, resolved, precision, fingerprint(folders[0]))


def _is_list_of(value: Any, kinds: type | tuple[type, ...]) -> bool:
    """Returns True if a value is a sequence, but not a text, of instances of ``kinds``."""
    is_sequence = isinstance(value, Sequence) and not isinstance(value, (str, bytes))
    return is_sequence and all(isinstance(each, kinds) for each in value)


class TrainedModel:
    """Trained model or ensemble on one device, loaded by :func:`load`; can be used any number of times."""

    def __init__(
        self,
        loaded: Sequence[LoadedModel],
        device: torch.device | str,
        precision: str,
        vocabulary: str | None = None,
    ) -> None:
        """Initialises the model; ``vocabulary`` is the fingerprint of the vocabulary files that lexicons must match."""
        if precision not in ("auto", "float32", "bfloat16", "int8"):
            raise InputError(f"precision '{precision}': expected auto, float32, bfloat16 or int8")
        self.loaded = list(loaded)
        self.vocabularies, self.recipe = loaded[0].vocabularies, loaded[0].recipe
        self._requested_precision, self.vocabulary = precision, vocabulary
        self.to(device)

    def to(self, device: torch.device | str) -> TrainedModel:
        """Moves the model to a device: auto, cpu, cuda or cuda:N; returns itself."""
        self.device = resolve_device(str(device))
        self.models = [each.model.to(self.device) for each in self.loaded]
        recipes = [each.recipe for each in self.loaded]
        self.precision = self._precision(recipes)
        self._incremental: list[IncrementalModel] = []
        self._translator: tuple[tuple[object, ...], Translator] | None = None
        return self

    def _precision(self, recipes: Sequence[Recipe]) -> torch.dtype:
        """Returns the precision of matrix products on the current device."""
        on_cpu = self.device.type == "cpu"
        if self._requested_precision == "int8" and not on_cpu:
            raise InputError(
                f"precision int8 is supported on a CPU only; on {self.device} use auto, float32 or bfloat16"
            )
        stored = on_cpu and all(each.stored == "int8" for each in self.loaded)
        if self._requested_precision == "int8" or (self._requested_precision == "auto" and stored):
            return torch.int8
        return precision_of(self._requested_precision, self.device, recipes).dtype

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
        """Translates raw text, one sentence per line.

        Args:
            lines: sentences as text, or as :class:`econmt.Request` with decoding constraints. A blank sentence gets an
                empty translation without hypotheses.
            avoid: phrases that no translation may contain.
            glossary: terms with their translations, or a glossary file; a term that occurs in a sentence becomes a
                constraint.
            restrict_lexicon: lexicon file from ``econmt lexicon``; limits the output vocabulary to the words that it
                lists for the words of a sentence (faster).
            restrict_lexicon_topk: number of most probable words used per source word; None: all in the file.
            beam_size: number of hypotheses kept at each position; None: the recipe's value.
            nbest_size: number of hypotheses returned per sentence.
            batch_size: number of sentences translated together; None: the recipe's value.
            device: device to move to first; None: the current one.
            search: other fields of :class:`~econmt.decoding.search.options.SearchOptions`, such as ``seed``.

        Returns:
            A :class:`~econmt.decoding.translation.Translation` for each line, with text, score, tokens, ``attention``
            of shape (target tokens + 1, source tokens + 1), whose rows sum to 1, and the n best ``hypotheses``.

        Raises:
            InputError: if the lines are not a list of text, an option is out of range, the device does not exist, or a
                constraint cannot be satisfied.

        Example::

            best = model.translate(["A dog."], beam_size=10, nbest_size=3)[0]
            print(best.text, best.score, [other.text for other in best.hypotheses])
        """
        texts: list[Any] = (
            list(lines) if isinstance(lines, Iterable) and not isinstance(lines, str) else [None]
        )
        if not _is_list_of(texts, (str, Request)):
            raise InputError("translate expects a list of lines of text, for example translate(['A dog.'])")
        if device is not None and resolve_device(str(device)) != self.device:
            self.to(device)
        options = {"beam_size": beam_size, "nbest_size": nbest_size, **search}
        translator = self.translator(
            options,
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
        chunk_size: int | None = None,
        max_input_length: int | None = None,
        long_lines: Literal["cut", "skip"] | None = None,
        avoid: Sequence[str] = (),
        glossary: Glossary | Path | str | None = None,
        restrict_lexicon: Path | str | None = None,
        restrict_lexicon_topk: int | None = None,
        warn: Callable[[str], None] | None = None,
    ) -> Translator:
        """Returns a translator for a stream of lines.

        Args:
            search: search options by name, see :meth:`search_options`.
            batch_size, chunk_size, max_input_length, long_lines: search options too; None: not changed.
            avoid, glossary, restrict_lexicon, restrict_lexicon_topk: see :meth:`translate`.
            warn: see :class:`~econmt.decoding.translator.Translator`.

        Example::

            translator = model.translator({"beam_size": 5}, batch_size=32)
            for translation in translator.translate(["A dog.", "Two cats."]):
                print(translation.text)
        """
        if isinstance(avoid, str) or not all(
            isinstance(phrase, str) and normalized(phrase) for phrase in avoid
        ):
            raise InputError("avoid expects a list of phrases, for example ['Hund', 'der Mann']")
        limits.check_whole("batch_size", batch_size, limits.TRANSLATED)
        limits.check_whole("chunk_size", chunk_size, limits.LINES)
        limits.check_whole("max_input_length", max_input_length, limits.INPUT_LENGTH)
        if long_lines not in ("cut", "skip", None):
            raise InputError(f"long_lines {long_lines!r}: expected cut or skip")
        options = self.search_options(search)
        options = options.changed(
            batch_size=batch_size or options.batch_size,
            chunk_size=chunk_size or options.chunk_size,
            max_input_length=max_input_length or options.max_input_length,
            long_lines=long_lines or options.long_lines,
            avoid=tuple(avoid) or options.avoid,
        )
        self._incremental = self._incremental or [
            IncrementalModel(each, self.precision) for each in self.models
        ]
        settings = options, glossary, restrict_lexicon, restrict_lexicon_topk
        # A call with the same options reuses the translator, whose CUDA graphs are already captured.
        if self._translator is None or self._translator[0] != settings:
            self._translator = None  # frees the memory of its graphs before the next one allocates
            made = Translator(
                self._incremental,
                self.vocabularies,
                options,
                self.device,
                max_length=self.recipe.pairs.max_length,
                glossary=read_glossary(Path(glossary)) if isinstance(glossary, (str, Path)) else glossary,
                shortlists=self._shortlists(restrict_lexicon, restrict_lexicon_topk),
                warn=warn,
                languages=(self.recipe.pairs.source, self.recipe.pairs.target),
            )
            self._translator = settings, made
        translator = self._translator[1]
        translator.warn = warn
        return translator

    def _shortlists(self, path: Path | str | None, top: int | None) -> Shortlists | None:
        """Loads the shortlists of a lexicon file; None if ``path`` is None."""
        limits.check_whole("restrict_lexicon_topk", top, limits.SHORTLIST)
        if path is None:
            return None
        if self.vocabulary is None:
            raise InputError(
                f"{path}: cannot be used, because this model was not loaded from a folder and the lexicon cannot be "
                "checked against its vocabulary"
            )
        source, target = self.vocabularies.sides
        table = read_lexicon(Path(path), self.vocabulary, self.vocabularies)
        return Shortlists(table, target.size, top or table.shape[1], source is target)

    def search_options(self, search: Mapping[str, Any]) -> SearchOptions:
        """Returns the recipe's search options with the changes in ``search``, by name; None leaves a value unchanged.

        Raises:
            InputError: if a name is unknown or a value is out of range.

        Example::

            options = model.search_options({"beam_size": 10, "length_penalty_alpha": 0.8})
        """
        if not isinstance(search, Mapping):
            raise InputError(f"search {search!r}: expected options by name, as {{'beam_size': 5}}")
        changes = {name: value for name, value in search.items() if value is not None}
        try:
            options = SearchOptions.from_recipe(self.recipe.decoding).changed(**changes)
        except ValidationError as failure:
            raise InputError(*complaints(failure)) from None
        _refuse_idle_penalties(changes, options)
        for each in self.loaded if options.brevity_penalty_type == "learned" else ():
            if each.recipe.translation_model.length_task == "none":
                raise InputError(
                    f"brevity_penalty_type learned: the model '{each.recipe.name}' predicts no lengths (its "
                    "model.length_task is none); use constant or none"
                )
        return options


def _refuse_idle_penalties(changes: Mapping[str, Any], options: SearchOptions) -> None:
    """Rejects given penalty options that would have no effect.

    Raises:
        InputError: if there is one; the message names it and the option that it needs.
    """
    kind, weight = options.brevity_penalty_type, "brevity_penalty_weight"
    if changes.get(weight) and kind == "none":
        raise InputError(
            f"{weight} has no effect with brevity_penalty_type none; set the type to constant or learned"
        )
    ratio = "brevity_penalty_constant_length_ratio"
    if ratio in changes and kind != "constant":
        raise InputError(
            f"{ratio} has no effect with brevity_penalty_type {kind}; set the type to constant, or remove it"
        )
    for name in (weight, ratio, "brevity_penalty_type", "coverage_penalty_weight"):
        if changes.get(name) and options.sample is not None:
            raise InputError(f"{name} cannot be combined with sample; remove one of them")
