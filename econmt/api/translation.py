"""Trained translation models of programs: loading, translating and scoring."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Union

import torch
from pydantic import ValidationError

from econmt.checkpoint.checkpoints import LoadedModel, load_model, load_task
from econmt.checkpoint.hub import local_model
from econmt.config import limits
from econmt.config.conditions import check_search
from econmt.config.recipe import Recipe
from econmt.config.yaml_reader import complaints
from econmt.data.text.glossary import Glossary, read_glossary
from econmt.data.text.subwords import fingerprint, target_vocabulary_file
from econmt.data.text.vocabulary import Vocabulary, normalized
from econmt.decoding.batches import batches_by_length as batches_by_length
from econmt.decoding.requests import Request as Request
from econmt.decoding.requests import check_request
from econmt.decoding.search.beam import SearchOptions
from econmt.decoding.search.ensemble import EnsembleMode
from econmt.decoding.search.fusion import ShallowFusion
from econmt.decoding.search.options import LM_WEIGHT
from econmt.decoding.search.shortlist import Shortlists
from econmt.decoding.translation import Translation
from econmt.decoding.translator import Translator as Translator
from econmt.elsewhere import text_division
from econmt.engine.devices import resolve_device
from econmt.engine.precision import precision_of
from econmt.engine.threads import threads_for
from econmt.errors import InputError
from econmt.evaluation.scoring import ScoredPair, Scorer
from econmt.export.lexicon import read_lexicon
from econmt.model import IncrementalModel, TranslationModel
from econmt.model.language_model import LanguageModel

Checkpoint = Union[str, int, Path]
"""Checkpoint to load: "best", "last", the number of its update, or the path of a parameter file."""


def load_translation_models(
    folders: Sequence[Path],
    checkpoints: Sequence[Checkpoint],
    device: torch.device,
    precision: str,
    threads: int | Literal["auto"] | None,
) -> TrainedModel:
    """Loads one translation model or an ensemble; see :func:`econmt.load`."""
    loaded = [
        load_model(folder, parameters_of(which), device)
        for folder, which in zip(folders, checkpoints, strict=True)
    ]
    for folder in folders[1:]:
        if fingerprint(folder) != fingerprint(folders[0]):
            raise InputError(
                f"{folder}: its vocabularies differ from those of {folders[0]}; models of an ensemble must share them"
            )
    set_threads(threads, device, max(each.recipe.model.widest for each in loaded))
    return TrainedModel(loaded, device, precision, folders[0])


def parameters_of(which: Checkpoint) -> Checkpoint:
    """Returns a checkpoint, as a path if it is the name of a parameter file."""
    return Path(which) if isinstance(which, str) and which.endswith(".safetensors") else which


def set_threads(threads: int | Literal["auto"] | None, device: torch.device, widest: int) -> None:
    """Sets the number of CPU threads for a model whose widest layer is given; None leaves it unchanged."""
    if threads is not None:
        torch.set_num_threads(threads_for(None if threads == "auto" else threads, device, widest).number)


class TrainedModel:
    """Trained model or ensemble on one device, loaded by :func:`load`; can be used any number of times.

    Attributes:
        recipe: recipe of the model, of an ensemble that of the first.
        vocabularies: vocabularies of both sides, as ``vocabularies.source`` and ``vocabularies.target``.
        models: the models as modules of PyTorch.
        device: device of the models. precision: type of their matrix products.
    """

    def __init__(
        self,
        loaded: Sequence[LoadedModel[TranslationModel]],
        device: torch.device | str,
        precision: str,
        folder: Path | None = None,
    ) -> None:
        """Initialises the model; ``folder`` has the vocabulary files that lexicons must match; None: there is none."""
        if precision not in ("auto", "float32", "bfloat16", "float16", "int8"):
            raise InputError(f"precision '{precision}': expected auto, float32, bfloat16, float16 or int8")
        self.loaded = list(loaded)
        self.vocabularies, self.recipe = loaded[0].vocabularies, loaded[0].recipe
        self._requested_precision, self._folder = precision, folder
        self._vocabulary = "" if folder is None else fingerprint(folder)
        self.to(device)

    def __repr__(self) -> str:
        """Describes the model: names, languages, layers, parameters, vocabularies, device and precision."""
        data, model = self.recipe.pairs, self.recipe.translation_model
        source, target = self.vocabularies.sides
        layers = " and ".join(
            f"{side.layers} x {side.cell} {side.size}" for side in (model.encoder, model.decoder)
        )
        return (
            f"<TrainedModel {', '.join(each.recipe.name for each in self.loaded)}: {data.source} to {data.target}, "
            f"{layers}, {self.parameters:,} parameters, vocabularies of {source.size:,} and "
            f"{target.size:,}, {str(self.precision).removeprefix('torch.')} on {self.device}>"
        )

    @property
    def languages(self) -> tuple[str, str]:
        """Codes of the source and the target language."""
        return self.recipe.pairs.source, self.recipe.pairs.target

    @property
    def parameters(self) -> int:
        """Number of parameters, of an ensemble that of all models."""
        return parameter_count(self.models)

    def to(self, device: torch.device | str) -> TrainedModel:
        """Moves the model to a device: auto, cpu, cuda or cuda:N; returns itself."""
        self.device = resolve_device(device)
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
                f"precision int8 is supported on a CPU only; on {self.device} use auto, float32, bfloat16 or float16"
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
        language_model: Path | str | None = None,
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
            glossary: terms with their translations, or a glossary file; ``glossary_mode`` among the other options says
                how they get into translations.
            restrict_lexicon: lexicon file from ``econmt lexicon``; limits the output vocabulary to the words that it
                lists for the words of a sentence (faster).
            restrict_lexicon_topk: number of most probable words used per source word; None: all in the file.
            language_model: folder of a language model with the target vocabulary, whose log-probabilities are added to
                those of tokens, times ``lm_weight`` (0.2) among the other options; translations are chosen by the sum.
            beam_size: number of hypotheses kept at each position; None: the recipe's value.
            nbest_size: number of hypotheses returned per sentence.
            batch_size: number of sentences translated together; None: the recipe's value.
            device: device to move to first; None: the current one.
            search: other fields of :class:`~econmt.decoding.search.options.SearchOptions`, such as ``seed``;
                ``sample=True`` with ``top_k`` and ``temperature`` draws translations.

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
        if not limits.is_list_of(texts, (str, Request)):
            raise InputError("translate expects a list of lines of text, for example translate(['A dog.'])")
        if device is not None and resolve_device(device) != self.device:
            self.to(device)
        options = {"beam_size": beam_size, "nbest_size": nbest_size, **search}
        translator = self.translator(
            options,
            batch_size=batch_size,
            avoid=avoid,
            glossary=glossary,
            restrict_lexicon=restrict_lexicon,
            restrict_lexicon_topk=restrict_lexicon_topk,
            language_model=language_model,
            warn=warnings.warn,
        )
        return list(translator.translate(texts))

    def score(
        self,
        sources: Sequence[str | Request],
        targets: Sequence[str],
        *,
        batch_size: int | None = None,
        ensemble_mode: EnsembleMode = "linear",
    ) -> list[ScoredPair]:
        """Computes the log-probabilities of given translations, as ``econmt score`` does.

        Args:
            sources: source sentences; those of a model with source factors as :class:`econmt.Request`.
            targets: a translation of each.
            batch_size: number of pairs scored together; None: the recipe's value.
            ensemble_mode: average the probabilities of an ensemble, or their logarithms.

        Returns:
            A :class:`~econmt.evaluation.scoring.ScoredPair` for each pair, with ``log_probability`` (natural logarithm,
            end of sentence included), ``perplexity``, ``tokens`` and ``token_log_probabilities``.

        Raises:
            InputError: if the numbers of sentences differ, or they are not lists of text, or of characters that text
                cannot have.

        Example::

            print(model.score(["A dog."], ["Ein Hund."])[0].log_probability)
        """
        if not (limits.is_list_of(sources, (str, Request)) and limits.is_list_of(targets, str)):
            raise InputError("score expects two lists of text, for example score(['A dog.'], ['Ein Hund.'])")
        if len(sources) != len(targets):
            raise InputError(
                f"score got {len(sources)} sources and {len(targets)} targets; give a target for each"
            )
        requests = [each if isinstance(each, Request) else Request(each) for each in sources]
        for name, side in (("sources", requests), ("targets", map(Request, targets))):
            for number, request in enumerate(side):
                check_request(request, f"{name}[{number}]")
        scorer = self.scorer(batch_size, ensemble_mode, warnings.warn)
        texts = [each.start + each.text for each in requests]
        encoded = self.vocabularies.target.encode_many(list(targets))
        return scorer.score_ids(texts, encoded, factors=[each.factors for each in requests])

    def scorer(
        self,
        batch_size: int | None = None,
        mode: EnsembleMode = "linear",
        warn: Callable[[str], None] | None = None,
    ) -> Scorer:
        """Returns a scorer of sentence pairs with the model's batch size unless another one is given."""
        limits.check_whole("batch_size", batch_size, limits.TRANSLATED)
        size = batch_size or self.recipe.decoding.batch_size
        settings = self.models, self.vocabularies, self.device, self.precision
        return Scorer(*settings, batch_size=size, mode=mode, warn=warn)

    def generate(
        self,
        prompt: str = "",  # noqa: ARG002
        length: int = 100,  # noqa: ARG002
        *,
        top_k: int = 0,  # noqa: ARG002
        top_p: float = 1.0,  # noqa: ARG002
        temperature: float = 1.0,  # noqa: ARG002
        seed: int = 1,  # noqa: ARG002
    ) -> str:
        """Writes text with a language model; a translation model raises InputError."""
        raise InputError(
            f"{self.recipe.name}: translates; generate is for language models, and translate(lines, sample=True) draws "
            "translations"
        )

    def translator(
        self,
        search: Mapping[str, Any],
        *,
        avoid: Sequence[str] = (),
        glossary: Glossary | Path | str | None = None,
        restrict_lexicon: Path | str | None = None,
        restrict_lexicon_topk: int | None = None,
        language_model: Path | str | None = None,
        warn: Callable[[str], None] | None = None,
        **further: Any,
    ) -> Translator:
        """Returns a translator for a stream of lines.

        Args:
            search: search options by name, see :meth:`search_options`.
            avoid, glossary, restrict_lexicon, restrict_lexicon_topk, language_model: see :meth:`translate`.
            warn: see :class:`~econmt.decoding.translator.Translator`.
            further: further search options, such as ``batch_size`` and ``long_lines``.

        Example::

            translator = model.translator({"beam_size": 5}, batch_size=32)
            for translation in translator.translate(["A dog.", "Two cats."]):
                print(translation.text)
        """
        if not limits.is_list_of(avoid, str) or not all(map(normalized, avoid)):
            raise InputError("avoid expects a list of phrases, for example ['Hund', 'der Mann']")
        if not isinstance(glossary, (Glossary, Path, str, type(None))):
            raise InputError(
                "glossary expects a file, or an econmt.data.text.glossary.Glossary({'dog': 'Hund'})"
            )
        if not isinstance(language_model, (Path, str, type(None))):
            raise InputError("language_model expects the folder of a language model")
        search = {**search, **further} if isinstance(search, Mapping) else search
        facts = {"language_model": language_model, "restrict_lexicon": restrict_lexicon}
        options = self._options(search, {**facts, "restrict_lexicon_topk": restrict_lexicon_topk})
        if language_model is not None and search.get("lm_weight") is None:
            options = options.changed(lm_weight=LM_WEIGHT)
        options = options.changed(avoid=tuple(avoid) or options.avoid)
        self._incremental = self._incremental or [
            IncrementalModel(each, self.precision) for each in self.models
        ]
        settings = options, glossary, restrict_lexicon, restrict_lexicon_topk, language_model
        # A call with the same options reuses the translator, whose CUDA graphs are already captured.
        cached = self._translator
        if cached is None or cached[0] != settings:
            self._translator = cached = None  # frees the memory of its graphs before the next one allocates
            split, markup = options.split_sentences, options.markup
            made = Translator(
                self._incremental,
                self.vocabularies,
                options,
                self.device,
                data=self.recipe.pairs,
                glossary=read_glossary(Path(glossary)) if isinstance(glossary, (str, Path)) else glossary,
                shortlists=self._shortlists(restrict_lexicon, restrict_lexicon_topk),
                fusion=self._fusion(language_model, options.lm_weight),
                warn=warn,
                divide=text_division().divider(self.languages[0], split=split, markup=markup)
                if split or markup
                else None,
            )
            self._translator = cached = settings, made
        translator = cached[1]
        translator.warn = warn
        return translator

    def _fusion(self, language_model: Path | str | None, weight: float) -> ShallowFusion | None:
        """Loads the language model of a search; None without one, or if its weight is 0."""
        if language_model is None or not weight:
            return None
        return load_fusion(
            language_model, weight, self.device, self.precision, self.vocabularies.target, self._folder
        )

    def _shortlists(self, path: Path | str | None, top: int | None) -> Shortlists | None:
        """Loads the shortlists of a lexicon file; None if ``path`` is None."""
        limits.check_whole("restrict_lexicon_topk", top, limits.SHORTLIST)
        if path is None:
            return None
        if not self._vocabulary:
            raise InputError(
                f"{path}: cannot be used, because this model was not loaded from a folder and the lexicon cannot be "
                "checked against its vocabulary"
            )
        source, target = self.vocabularies.sides
        table = read_lexicon(Path(path), self._vocabulary, self.vocabularies)
        return Shortlists(table, target.size, top or table.shape[1], source is target)

    def search_options(self, search: Mapping[str, Any]) -> SearchOptions:
        """Returns the recipe's search options with the changes in ``search``, by name; None leaves a value unchanged.

        Raises:
            InputError: if a name is unknown or a value is out of range.

        Example::

            options = model.search_options({"beam_size": 10, "length_penalty_alpha": 0.8})
        """
        return self._options(search, {})

    def _options(self, search: Mapping[str, Any], files: Mapping[str, Any]) -> SearchOptions:
        """Returns the options of a search with ``files``, by name, and their options; see :meth:`search_options`."""
        if not isinstance(search, Mapping):
            raise InputError(f"search {search!r}: expected options by name, as {{'beam_size': 5}}")
        changes = {name: value for name, value in search.items() if value is not None}
        given = {**changes, **{name: value for name, value in files.items() if value is not None}}
        top_k = changes.pop("top_k", None)
        if changes.get("sample") is True:  # as on the command line; a number is the top k itself
            changes["sample"] = top_k or 0
        elif changes.get("sample") is False:
            del changes["sample"]
        try:
            options = SearchOptions.from_recipe(self.recipe.decoding).changed(**changes)
        except ValidationError as failure:
            raise InputError(*complaints(failure)) from None
        fields = SearchOptions.model_fields
        chosen = [name for name in given if name not in fields or given[name] != fields[name].default]
        values = {**dict(options), **files, "sample": given.get("sample") or options.sample}
        for problem in check_search(values, chosen):
            raise InputError(problem)
        return options


def parameter_count(models: Iterable[torch.nn.Module]) -> int:
    """Counts the parameters of models."""
    return sum(parameter.numel() for model in models for parameter in model.parameters())


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
