"""Recipe keys that have an effect only together with other keys, and the check for values without effect.

:data:`RULES` has one entry for each such key. Other keys always have an effect, or a validator of their section checks
them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from econmt.config.yaml_reader import Finding, leaves, plain_text

PROCESSES = "--processes"
"""Name of the number of processes in conditions; an option of the command, not a key of the recipe."""


class Condition(NamedTuple):
    """A condition on the values of a recipe.

    Attributes:
        holds: function from the values by dotted key to True if they satisfy the condition.
        text: the condition in words, for messages and the reference documentation.
    """

    holds: Callable[[Mapping[str, Any]], bool]
    text: str


class Rule(NamedTuple):
    """Condition under which a key has an effect.

    Attributes:
        needs: the condition.
        refused: True if setting the key without effect is an error, because it would enable something that the run
            then lacks. False if it prints a note only, because it tunes something that is disabled, for example by an
            override on the command line.
    """

    needs: Condition
    refused: bool = False


def one_of(key: str, *accepted: Any) -> Condition:
    """Returns the condition that a key has one of the ``accepted`` values."""
    words = " or ".join(map(plain_text, accepted))
    return Condition(lambda values: values.get(key) in accepted, f"{key}: {words}")


def other_than(key: str, *refused: Any) -> Condition:
    """Returns the condition that a key has none of the ``refused`` values."""
    words = " or ".join(map(plain_text, refused))
    return Condition(lambda values: values.get(key) not in refused, f"{key} other than {words}")


def at_least(key: str, least: int | str) -> Condition:
    """Returns the condition that a key is at least ``least``, a number or the name of another key."""
    return Condition(
        lambda values: values.get(key, 0) >= (values[least] if isinstance(least, str) else least),
        f"{key} of at least {least}",
    )


def above_zero(key: str) -> Condition:
    """Returns the condition that a key is above 0."""
    return Condition(lambda values: (values.get(key) or 0) > 0, f"{key} above 0")


def any_of(*conditions: Condition) -> Condition:
    """Returns the condition that at least one of ``conditions`` holds."""
    return Condition(
        lambda values: any(each.holds(values) for each in conditions),
        ", or ".join(each.text for each in conditions),
    )


def all_of(*conditions: Condition) -> Condition:
    """Returns the condition that all ``conditions`` hold."""
    return Condition(
        lambda values: all(each.holds(values) for each in conditions),
        " with ".join(each.text for each in conditions),
    )


_TRANSLATION = one_of("task", "translation")
_SEVERAL = at_least(PROCESSES, 2)

RULES: dict[str, Rule] = {
    "model.encoder.reverse_input": Rule(
        any_of(
            one_of("model.encoder.bidirectional", "none"),
            all_of(one_of("model.encoder.bidirectional", "bottom"), at_least("model.encoder.layers", 2)),
        ),
        refused=True,
    ),
    **{
        f"model.{part}.residual": Rule(at_least(f"model.{part}.layers", 2), refused=True)
        for part in ("encoder", "decoder")
    },
    "model.attention.size": Rule(one_of("model.attention.type", "additive")),
    "model.attention.coverage.num_hidden": Rule(
        other_than("model.attention.coverage.type", "none", "count", "fertility")
    ),
    "model.attention.coverage.max_fertility": Rule(one_of("model.attention.coverage.type", "fertility")),
    "model.dropout.layers": Rule(any_of(_TRANSLATION, at_least("model.layers", 2)), refused=True),
    **{
        key: Rule(any_of(*(one_of(side, None) for side in sides)))
        for key, sides in (
            ("model.embedding", ("model.source_embedding", "model.target_embedding")),
            (
                "model.dropout.embedding",
                ("model.dropout.source_embedding", "model.dropout.target_embedding"),
            ),
        )
    },
    "model.dropout.variational": Rule(
        any_of(
            all_of(above_zero("model.dropout.embedding"), _TRANSLATION),
            *(
                above_zero(f"model.dropout.{name}")
                for name in (
                    "inputs",
                    "layers",
                    "output",
                    "source_embedding",
                    "target_embedding",
                    "encoder_layers",
                    "decoder_layers",
                )
            ),
        )
    ),
    "model.initialization.scale": Rule(one_of("model.initialization.weights", "uniform")),
    "ops.stash": Rule(
        any_of(
            one_of("ops.encoder", "auto", "recompute"),
            all_of(one_of("ops.decoder", "auto", "recompute"), _TRANSLATION),
        )
    ),
    "training.guided_alignment_weight": Rule(other_than("data.alignment", None)),
    "training.max_buckets": Rule(one_of("training.bucket_width", None)),
    "training.optimizer.betas": Rule(other_than("training.optimizer.name", "sgd", "adagrad", "adafactor")),
    "training.optimizer.eps": Rule(other_than("training.optimizer.name", "sgd")),
    "training.optimizer.momentum": Rule(one_of("training.optimizer.name", "sgd", "rmsprop"), refused=True),
    "training.averaging.non_monotone_interval": Rule(one_of("training.averaging.start", "non-monotone")),
    "training.schedule.reduce_factor": Rule(
        one_of("training.schedule.name", "plateau-reduce", "step", "exponential")
    ),
    "training.schedule.decay_updates": Rule(
        one_of("training.schedule.name", "cosine", "linear"), refused=True
    ),
    "training.schedule.decay_interval": Rule(
        one_of("training.schedule.name", "step", "exponential"), refused=True
    ),
    "training.schedule.decay_start": Rule(one_of("training.schedule.name", "step", "exponential")),
    "training.schedule.min_learning_rate": Rule(
        one_of("training.schedule.name", "cosine", "linear", "step", "exponential")
    ),
    "training.loss_scale": Rule(one_of("training.precision", "float16", "auto")),
    "training.loss_scale_window": Rule(one_of("training.precision", "float16", "auto")),
    "training.min_updates": Rule(
        other_than("training.early_stopping.max_num_checkpoint_not_improved", None), refused=True
    ),
    "training.min_epochs": Rule(
        other_than("training.early_stopping.max_num_checkpoint_not_improved", None), refused=True
    ),
    "training.schedule.reduce_num_not_improved": Rule(one_of("training.schedule.name", "plateau-reduce")),
    "training.gradient_clipping.threshold": Rule(other_than("training.gradient_clipping.type", "none")),
    "training.decode_and_evaluate_device": Rule(other_than("training.decode_and_evaluate", 0)),
    "training.bleu_tokenizer": Rule(
        any_of(other_than("training.decode_and_evaluate", 0), other_than("data.test", None))
    ),
    "decoding.brevity_penalty_constant_length_ratio": Rule(above_zero("decoding.brevity_penalty_weight")),
    "decoding.length_penalty_beta": Rule(other_than("decoding.length_penalty_alpha", 0)),
    "parallel.reduction": Rule(_SEVERAL),
    "parallel.shard_optimizer": Rule(_SEVERAL),
    "parallel.timeout": Rule(_SEVERAL),
}
"""Conditions of all keys that do not always have an effect, by dotted key."""


def keys_without_effect(recipe: Any, processes: int = 2) -> frozenset[str]:
    """Returns the keys of :data:`RULES` whose condition does not hold.

    The run has ``processes`` processes; 2 stands for several, when only the recipe is known.
    """
    values = {**dict(leaves(recipe)), PROCESSES: processes}
    return frozenset(key for key, rule in RULES.items() if key in values and not rule.needs.holds(values))


def idle_values(recipe: Any, processes: int = 2) -> Iterator[Finding]:
    """Yields a finding for each value that differs from its default and has no effect."""
    without_effect = keys_without_effect(recipe, processes)
    for key, value in leaves(recipe, changed_only=True):
        if key in without_effect:
            rule = RULES[key]
            remedy = "; set that, or remove this key" if rule.refused else ""
            problem = f"{plain_text(value)} has no effect without {rule.needs.text}{remedy}"
            yield Finding(key, rule.refused, problem)
