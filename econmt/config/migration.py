"""Keys of former options, which older recipes and model folders have: removed at their defaults, else refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_TRAIN_ANEW = "remove it, and train models that have it anew"

REMOVED_KEYS: dict[str, tuple[object, str]] = {
    "model.lhuc": ("none", _TRAIN_ANEW),
    "model.encoder.first_residual_layer": (2, _TRAIN_ANEW),
    "model.decoder.first_residual_layer": (2, _TRAIN_ANEW),
    "model.decoder.attention_in_upper_layers": (False, _TRAIN_ANEW),
    "model.attention.mhdot_heads": (8, _TRAIN_ANEW),
    "model.attention.function": ("softmax", _TRAIN_ANEW),
    "model.attention.use_prev_word": (False, _TRAIN_ANEW),
    "model.dropout.states": (0.0, _TRAIN_ANEW),
    "model.dropout.recurrent": (0.0, _TRAIN_ANEW),
    "model.dropout.zoneout_hidden": (0.0, _TRAIN_ANEW),
    "model.dropout.zoneout_cell": (0.0, _TRAIN_ANEW),
    "model.decoder.copy_attention": (False, _TRAIN_ANEW),
    "data.subwords.copies": (0, _TRAIN_ANEW),
    "model.length_task": ("none", _TRAIN_ANEW),
    "model.length_task_layers": (1, _TRAIN_ANEW),
    "training.monitor_pattern": (None, "remove it; metrics.tsv has the norm of all gradients"),
    "training.length_task_weight": (1.0, _TRAIN_ANEW),
    "training.memory_savings": (
        "exact",
        "remove it; training.optimizer.name=adam8bit and training.param_dtype=bfloat16 need less memory",
    ),
    "decoding.brevity_penalty_type": (
        "constant",
        "remove it; decoding.brevity_penalty_constant_length_ratio sets the ratio of the lengths, and "
        "decoding.brevity_penalty_weight 0 is no penalty",
    ),
}
"""Keys of former options: the default, which changes nothing, and what to do about another value."""


def remove_keys(tree: Mapping[str, Any]) -> dict[str, str]:
    """Removes the keys of former options from a recipe's data where they have their defaults, in place.

    Returns:
        Each of the other ones, dotted, and what to do about it.
    """
    refused = {}
    for key, (default, advice) in REMOVED_KEYS.items():
        section: Any = tree
        *sections, name = key.split(".")
        for part in sections:
            section = section.get(part) if isinstance(section, dict) else None
        if not isinstance(section, dict) or name not in section:
            continue
        if section[name] == default:
            del section[name]
        else:
            refused[key] = f"is no longer supported; {advice}"
    return refused
