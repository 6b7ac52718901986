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
    **{
        f"model.{key}": (None, "remove it; model.embedding and model.dropout have one value for both sides")
        for key in (
            "source_embedding",
            "target_embedding",
            "dropout.source_embedding",
            "dropout.target_embedding",
            "dropout.encoder_layers",
            "dropout.decoder_layers",
        )
    },
    "model.dropout.source_words": (0.0, "remove it; model.dropout.embedding drops values of embeddings"),
    "model.dropout.target_words": (0.0, "remove it; model.dropout.embedding drops values of embeddings"),
    "model.initialization.rnn_h2h": ("default", _TRAIN_ANEW),
    **{
        f"model.initialization.{side}_embedding": (
            None,
            "remove it; training.initialize_from begins with embeddings of another model",
        )
        for side in ("source", "target")
    },
    "model.attention.coverage.max_fertility": (2, _TRAIN_ANEW),
    "training.schedule.decay_interval": (None, "remove it; schedules cosine and linear decay smoothly"),
    "training.schedule.decay_start": (0, "remove it; schedules cosine and linear decay smoothly"),
    "training.decode_and_evaluate_device": (None, "remove it; training.device is that of translations, too"),
    "training.min_updates": (None, "remove it, and raise early_stopping.max_num_checkpoint_not_improved"),
    "training.min_epochs": (None, "remove it, and raise early_stopping.max_num_checkpoint_not_improved"),
    "training.max_tokens": (None, "remove it; training.max_updates and max_epochs end a run"),
    "training.fixed_param_strategy": (
        None,
        "remove it; training.fixed_param_names takes regular expressions",
    ),
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

_ANY_OTHER = "in the recipe of a trained model any other name will do"

REMOVED_VALUES = {
    ("training.optimizer.name", "nag"): f"train with sgd or nadam; {_ANY_OTHER}",
    ("training.optimizer.name", "adamw8bit"): f"train with adam8bit; {_ANY_OTHER}",
    ("training.schedule.name", "step"): "use cosine, linear or plateau-reduce",
    ("training.schedule.name", "exponential"): "use cosine, linear or plateau-reduce",
    ("training.early_stopping.metric", "length_loss"): "use perplexity",
    **{
        (
            "model.attention.type",
            name,
        ): "use additive, bilinear, dot or scaled_dot, and train models that have it anew"
        for name in ("mhdot", "fixed", "location")
    },
}
"""Former values of keys, and what to do about them."""


def remove_keys(tree: Mapping[str, Any]) -> dict[str, str]:
    """Removes the keys of former options from a recipe's data where they have their defaults, in place.

    Returns:
        Each key whose value is not supported, dotted, and what to do about it.
    """
    refused = {}
    for key, (default, advice) in REMOVED_KEYS.items():
        section, name = _owner(tree, key)
        if name in section and section[name] == default:
            del section[name]
        elif name in section:
            refused[key] = f"is no longer supported; {advice}"
    for (key, value), advice in REMOVED_VALUES.items():
        section, name = _owner(tree, key)
        if section.get(name) == value:
            refused[key] = f"{value} is no longer supported; {advice}"
    return refused


def _owner(tree: Mapping[str, Any], key: str) -> tuple[dict[str, Any], str]:
    """Returns the section that has a dotted key, empty if there is none, and the key's name in it."""
    section: Any = tree
    *sections, name = key.split(".")
    for part in sections:
        section = section.get(part) if isinstance(section, dict) else None
    return section if isinstance(section, dict) else {}, name
