"""Model options that no fused operation supports; they are computed one time step at a time in PyTorch (unfused)."""

from __future__ import annotations

from econmt.config.model import Model

UNFUSED_IMPLEMENTATIONS = ("auto", "reference", "recompute")
"""Implementations of unfused layers; recompute keeps only the state before each step."""


def unfused_decoder_key(model: Model) -> str:
    """Returns the key of the first decoder option that no fused operation supports; empty if there is none."""
    decoder, attention = model.decoder, model.attention
    options = {
        "decoder.context_gating": decoder.context_gating,
        "decoder.attention_in_upper_layers": decoder.attention_in_upper_layers,
        f"attention.type {attention.type}": attention.type in ("mhdot", "fixed", "location"),
        "attention.use_prev_word": attention.use_prev_word,
        f"attention.function {attention.function}": attention.function != "softmax",
        f"attention.coverage.type {attention.coverage.type}": attention.coverage.type != "none",
        "layer_normalization": model.layer_normalization,
        **_layer_options(model, "decoder"),
    }
    return next((key for key, used in options.items() if used), "")


def unfused_encoder_key(model: Model) -> str:
    """Returns the key of the first encoder option that no fused operation supports; empty if there is none."""
    return next((key for key, used in _layer_options(model, "encoder").items() if used), "")


def _layer_options(model: Model, part: str) -> dict[str, bool]:
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
