"""Checks across the sections of a recipe; each raises a ValueError that names the conflicting keys."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from econmt.config.data import Data
from econmt.config.marks import LANGUAGE_MODEL, TRANSLATION, marked_keys
from econmt.config.text import data_kind, model_kind
from econmt.config.yaml_reader import leaves


def check_recipe(recipe: Any) -> None:
    """Checks that sections and keys of a recipe agree."""
    _check_task(recipe)
    check_pipeline(recipe)
    if recipe.parallel.shard_optimizer and recipe.training.averaging.start != "never":
        raise ValueError(
            "parallel.shard_optimizer cannot be combined with training.averaging; set training.averaging.start to "
            "never, or shard_optimizer to false"
        )
    if isinstance(recipe.data, Data):
        _check_data(recipe.data, recipe)


def _check_task(recipe: Any) -> None:
    """Checks that the sections and keys of a recipe belong to its task."""
    text = recipe.task == "language_model"
    needed_keys = ["data.source and data.target", "model.encoder and model.decoder"]
    if text:
        data_keys = "data.text, data.train and data.valid"
        needed_keys = [data_keys, "model.size and model.layers, and no encoder and decoder"]
    for kind, needed in zip((data_kind(recipe.data), model_kind(recipe.model)), needed_keys, strict=True):
        if (kind == "text") != text:
            raise ValueError(f"task: {recipe.task} needs {needed}")
    initialization = recipe.model.initialization
    if text and (initialization.source_embedding or initialization.target_embedding):
        raise ValueError(
            "model.initialization.source_embedding and target_embedding need task: translation; remove them"
        )
    schema: type[BaseModel] = type(recipe)
    without_effect = marked_keys(schema, TRANSLATION if text else LANGUAGE_MODEL)
    for key, _ in leaves(recipe, changed_only=True):
        if key in without_effect:
            raise ValueError(f"{key} has no effect with task: {recipe.task}; remove it")


def check_pipeline(recipe: Any) -> None:
    """Checks that the settings of a recipe work with pipeline parallelism."""
    stages, training = recipe.parallel.pipeline, recipe.training
    if stages == 1:
        return
    optimizer = training.optimizer.name
    conflicts = {
        "training.memory_budget": training.memory_budget is not None,
        f"training.optimizer.name {optimizer}": optimizer in ("adafactor", "adam8bit"),
        "training.fixed_param_names": bool(training.fixed_param_names),
        **{
            f"training.{key} (the penalties need the top layer's outputs beside the loss)": getattr(
                training, key
            )
            > 0.0
            for key in ("activation_regularization", "temporal_activation_regularization")
        },
        "training.fixed_param_strategy": training.fixed_param_strategy is not None,
        "parallel.shard_optimizer (each rank already holds only the optimizer state of its layers)": (
            recipe.parallel.shard_optimizer
        ),
    }
    parts = {"model": recipe.model}
    if recipe.task == "translation":
        model = recipe.model
        parts = {"model.encoder": model.encoder, "model.decoder": model.decoder}
        conflicts |= {
            "data.source_factors": bool(recipe.data.source_factors),
            "data.alignment": recipe.data.alignment is not None,
            "data.weights": recipe.data.weights is not None,
            **{f"model.{key}": is_set for key, is_set in model.decoder_options.items()},
        }
    for key, is_set in conflicts.items():
        if is_set:
            raise ValueError(f"parallel.pipeline {stages} cannot be combined with {key}; remove one of them")
    for name, part in parts.items():
        if part.cell != "lstm":
            raise ValueError(f"parallel.pipeline {stages} does not support {name}.cell {part.cell}; use lstm")
    layers = max(part.layers for part in parts.values())
    if layers < stages:
        depth = "one layer" if layers == 1 else f"{layers} layers"
        raise ValueError(
            f"parallel.pipeline {stages}: {' and '.join(parts)} have at most {depth}; a pipeline cannot have more "
            "stages than layers"
        )


def _check_data(data: Data, recipe: Any) -> None:
    """Checks that the data section of a translation recipe fits the model and the buckets."""
    model = recipe.model
    if recipe.training.bucket_width is not None:
        for name, is_set in (("mixing", bool(data.mixing.weights)), ("noise", not data.noise.is_default)):
            if is_set:
                raise ValueError(
                    f"data.{name} changes the lengths of pairs in each epoch and needs buckets derived from the text; "
                    "remove training.bucket_width"
                )
    if not data.subwords.joint and model.weight_tying.startswith("src_trg"):
        raise ValueError(
            f"model.weight_tying {model.weight_tying} shares the source embedding and needs data.subwords.joint: true"
        )
    if data.alignment is not None and not data.noise.is_default:
        raise ValueError(
            "data.noise changes words and cannot be combined with data.alignment; remove one of them"
        )
    names, widths = data.source_factors, model.source_factors_num_embed
    if len(names) != len(widths):
        raise ValueError(
            f"data.source_factors has {len(names)} entries but model.source_factors_num_embed has {len(widths)}: give "
            "one width for each factor"
        )
    if not names:
        if model.source_factors_combine != "concat":
            raise ValueError("model.source_factors_combine needs data.source_factors; set them, or remove it")
        return
    if model.source_factors_combine == "sum" and set(widths) != {model.embedding_widths[0]}:
        raise ValueError(
            f"model.source_factors_num_embed {widths}: source_factors_combine: sum adds embeddings, so each width must "
            f"equal the width of source embeddings, {model.embedding_widths[0]}"
        )
    if not data.noise.is_default:
        raise ValueError(
            "data.noise changes words and cannot be combined with data.source_factors; remove one of them"
        )
    if any(data.tags):
        raise ValueError(
            "data.tags adds a word that has no data.source_factors; remove one of them, or write the tags and their "
            "factors into the files"
        )
