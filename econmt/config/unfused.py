"""What makes a decoder or an encoder walk step by step in PyTorch: options that no fused operation has."""

from __future__ import annotations

from typing import Any

from econmt.config.model import Model

STEPPED = ("auto", "reference", "recompute")
"""Implementations of what is computed step by step: recompute keeps the state before each step and no more."""


def decoder_steps(model: Model) -> str:
    """The first option of a model's decoder that no fused operation has, by its key; empty if there is none."""
    decoder, attention = model.decoder, model.attention
    found = {
        "decoder.context_gating": decoder.context_gating,
        "decoder.attention_in_upper_layers": decoder.attention_in_upper_layers,
        f"attention.type {attention.type}": attention.type in ("mhdot", "fixed", "location"),
        "attention.use_prev_word": attention.use_prev_word,
        f"attention.function {attention.function}": attention.function != "softmax",
        f"attention.coverage.type {attention.coverage.type}": attention.coverage.type != "none",
        "layer_normalization": model.layer_normalization,
        **_of_layers(model, "decoder"),
    }
    return next((key for key, wanted in found.items() if wanted), "")


def encoder_steps(model: Model) -> str:
    """The first option of a model's encoder that no fused operation has, by its key; empty if there is none."""
    return next((key for key, wanted in _of_layers(model, "encoder").items() if wanted), "")


def _of_layers(model: Model, part: str) -> dict[str, bool]:
    stack = model.encoder if part == "encoder" else model.decoder
    dropout = model.dropouts
    return {
        f"{part}.first_residual_layer {stack.first_residual_layer}": stack.residual
        and stack.first_residual_layer != 2,
        "dropout.states": dropout.states > 0.0,
        "dropout.recurrent": dropout.recurrent > 0.0,
        "dropout.zoneout_hidden": dropout.zoneout_hidden > 0.0,
        "dropout.zoneout_cell": dropout.zoneout_cell > 0.0,
        f"lhuc {model.lhuc}": model.lhuc in (part, "all")
        or (part == "decoder" and model.lhuc == "state_init"),
    }


def check_stepped(recipe: Any) -> None:
    """Makes sure that what walks step by step can, and names its implementation where a recipe leaves it at auto.

    Raises:
        ValueError: naming the option and what it needs.
    """
    model = recipe.model
    if not isinstance(model, Model):
        return
    names = {}
    for part, key in (("encoder", encoder_steps(model)), ("decoder", decoder_steps(model))):
        stack, given = getattr(model, part), getattr(recipe.ops, part)
        if not key:
            continue
        if stack.cell != "lstm" or stack.rank is not None:
            raise ValueError(f"model.{key} needs model.{part}.cell: lstm and model.{part}.rank: null")
        if part == "decoder" and not model.decoder.input_feeding:
            raise ValueError(f"model.{key} needs model.decoder.input_feeding: true")
        if recipe.parallel.pipeline > 1:
            raise ValueError(f"model.{key} cannot be divided over ranks: give parallel.pipeline: 1")
        if given not in STEPPED:
            raise ValueError(
                f"ops.{part} {given} cannot compute model.{key}: give one of {', '.join(STEPPED)}"
            )
        if given == "auto":
            names[part] = "recompute"
    if names:
        recipe.__dict__["ops"] = recipe.ops.model_copy(update=names)
