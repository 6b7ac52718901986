"""Training of recipes, loading of trained models, and evaluation of translations."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import torch
from rich.console import Console

from econmt.api.language_model import load_language_model
from econmt.api.saved_model import SavedModel as SavedModel
from econmt.api.translation import Checkpoint, load_translation_models
from econmt.api.translation import Request as Request
from econmt.api.translation import TrainedModel as TrainedModel
from econmt.api.translation import Translator as Translator
from econmt.checkpoint.hub import local_model
from econmt.config import limits as limits
from econmt.config.recipe import Recipe, find_recipe, load_recipe
from econmt.data.text.corpus import search_path
from econmt.engine.devices import is_out_of_memory as is_out_of_memory
from econmt.engine.devices import resolve_device as resolve_device
from econmt.engine.outside_memory import limit_workspaces, outside_meter
from econmt.errors import InputError
from econmt.evaluation.metrics import METRICS, corpus_score, make_metric
from econmt.evaluation.metrics import Score as Score
from econmt.training.initialization import parameters_to_start_from
from econmt.training.run import Outcome as Outcome
from econmt.training.run import check_run, run_recipe


def train(
    recipe: Recipe | Path | str,
    overrides: Sequence[str] | Mapping[str, object] = (),
    *,
    data_dir: Path | str | None = None,
    search: Sequence[Path] | None = None,
    overwrite_output: bool = False,
    resume_with_changes: bool = False,
    verify: bool = False,
    quiet: bool = False,
) -> Outcome:
    """Trains a recipe, or resumes the run in its model folder, like ``econmt train``.

    Args:
        recipe: YAML file, name of a shipped recipe, or a recipe that is loaded already.
        overrides: changes to the recipe, as ``["training.seed=2"]`` or ``{"training.seed": 2}``; none for a recipe that
            is loaded already.
        data_dir: folder in which the text is searched, after the folder of the recipe.
        search: all folders in which the text is searched; None: see :func:`econmt.api.recipes.search_path`.
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
    if not isinstance(recipe, (str, Path, Recipe)):
        raise InputError(f"recipe {recipe!r}: expected a file or the name of a shipped recipe")
    if isinstance(recipe, Recipe) and overrides:
        raise InputError("overrides are for recipes that train reads; give them to load_recipe")
    if data_dir is not None and not isinstance(data_dir, (str, Path)):
        raise InputError(f"data_dir {data_dir!r}: expected a folder")
    if not isinstance(overrides, Mapping) and not limits.is_list_of(overrides, str):
        raise InputError(f"overrides {overrides!r}: expected a list of key=value, or a dictionary")
    if isinstance(overrides, Mapping):
        # Overrides are parsed as YAML, of which JSON is a subset.
        values = {key: json.dumps(value, ensure_ascii=False, default=str) for key, value in overrides.items()}
        overrides = [f"{key}={value}" for key, value in values.items()]
    if search is None:
        beside = None if isinstance(recipe, Recipe) else find_recipe(recipe).parent
        search = search_path(beside, None if data_dir is None else Path(data_dir))
    return run_recipe(
        recipe if isinstance(recipe, Recipe) else load_recipe(recipe, overrides),
        search,
        console=Console(stderr=True, highlight=False, quiet=quiet),
        overwrite_output=overwrite_output,
        resume_with_changes=resume_with_changes,
        verify=verify,
    )


def check_training(recipe: Recipe) -> None:
    """Checks everything that training a recipe needs, apart from its text, and prepares the GPU for it.

    A program that works for hours before it trains learns in this way what would stop it then. Call it before other
    work uses the GPU, whose memory outside of PyTorch is measured from here on.

    Args:
        recipe: recipe of :func:`econmt.api.recipes.load_recipe`.

    Raises:
        InputError: if the recipe cannot be trained: a device is missing, or, unless its run has begun, the parameters
            that it starts from.

    Example::

        recipe = load_recipe("multi30k", ["output=runs/short"])
        check_training(recipe)
        train(recipe)
    """
    if not isinstance(recipe, Recipe):
        raise InputError(f"recipe {recipe!r}: expected one that load_recipe has read")
    check_run(recipe)
    if not SavedModel(recipe.output).is_begun:  # later the file may be gone
        parameters_to_start_from(recipe)
    device = resolve_device(recipe.training.device)
    if device.type == "cuda":
        limit_workspaces(recipe.training.precision)
        outside_meter(device)


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
        precision: precision of matrix products: float32, bfloat16, float16, int8 (CPU only), or auto for the faster one
            on this device; for models from ``econmt quantize`` that is int8 on a CPU.
        threads: number of CPU threads, set for all of torch; "auto" for the fastest number; None leaves it unchanged.

    Returns:
        The model, ready to translate.

    Raises:
        InputError: if a model cannot be loaded, or the vocabularies of an ensemble differ.

    Example::

        model = econmt.load("runs/multi30k", device="cpu")
        ensemble = econmt.load(["runs/a", "runs/b"], ["best", 3000])
    """
    names = [model] if isinstance(model, (str, Path)) else model
    if not limits.is_list_of(names, (str, Path)):
        raise InputError(f"model {model!r}: expected a model folder, or a list of them")
    checkpoints = [checkpoint] if isinstance(checkpoint, (str, int, Path)) else checkpoint
    if isinstance(checkpoint, bool) or not limits.is_list_of(checkpoints, (str, int, Path)):
        raise InputError(
            f"checkpoint {checkpoint!r}: expected best, last, the number of an update, or a file"
        )
    folders, chosen = [local_model(name) for name in names], list(checkpoints)
    if not folders:
        raise InputError("no model folder is given; give at least one")
    if len(chosen) not in (1, len(folders)):
        raise InputError(
            f"{len(chosen)} checkpoints are given for {len(folders)} models; give one, or one for each model"
        )
    chosen *= len(folders) // len(chosen)
    limits.check_whole("threads", None if threads == "auto" else threads, limits.THREADS)
    resolved = resolve_device(device)
    recipe = SavedModel(folders[0]).recipe
    if len(folders) == 1 and recipe is not None and recipe.task == "language_model":
        return load_language_model(folders[0], chosen[0], resolved, precision, threads)
    return load_translation_models(folders, chosen, resolved, precision, threads)


def evaluate(
    hypotheses: Sequence[str],
    references: Sequence[str],
    metrics: Sequence[str] = METRICS,
    *,
    tokenize: str | None = None,
    lowercase: bool = False,
) -> dict[str, Score]:
    """Computes BLEU, chrF and TER of translations with sacreBLEU, as ``econmt evaluate`` does.

    Args:
        hypotheses: the translations. references: a reference of each.
        metrics: names of metrics: bleu, chrf, ter.
        tokenize: sacreBLEU's name of the tokenizer for BLEU; None: 13a.
        lowercase: True ignores case in BLEU and chrF.

    Returns:
        The :class:`~econmt.evaluation.metrics.Score` of each metric by its name, with value and signature.

    Raises:
        InputError: if the numbers of lines differ, there are none, or a metric or tokenizer is unknown.

    Example::

        texts = [each.text for each in model.translate(sources)]
        print(econmt.evaluate(texts, references)["bleu"].value)
    """
    if not all(limits.is_list_of(each, str) for each in (hypotheses, references, metrics)):
        raise InputError("evaluate expects two lists of text, and a list of metrics")
    if len(hypotheses) != len(references) or not hypotheses:
        raise InputError(
            f"evaluate got {len(hypotheses)} hypotheses and {len(references)} references; give a reference for each"
        )
    made = {name: make_metric(name, [references], tokenize=tokenize, lowercase=lowercase) for name in metrics}
    return {name: corpus_score(metric, hypotheses) for name, metric in made.items()}
