"""Rules about options: which have an effect only together with others, and which cannot be combined.

:data:`RULES` and :data:`CONFLICTS` say so for recipes and for searches, whether an option comes from a recipe, a
command line, Python or a request. Options are named by the dotted keys of a recipe; those that only a search has are
named as if they were in its section ``decoding``. :data:`RUNTIME` has what exported
models must satisfy; :mod:`econmt.options.option_rules` has the rules of options that only commands have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from pydantic import BaseModel

from econmt.config.optimizer import METRICS
from econmt.config.section import LANGUAGE_MODEL, TRANSLATION, marked_keys
from econmt.config.stacks import CELLS
from econmt.config.yaml_reader import leaves, plain_text

PROCESSES = "--processes"
"""Name of the number of processes in conditions; an option of the command, not a key of the recipe."""


class Condition(NamedTuple):
    """A condition on the values of options.

    Attributes:
        holds: function from the values by key to True if they satisfy the condition.
        text: the condition in words, for messages and the reference documentation.
        keys: the options that it looks at.
    """

    holds: Callable[[Mapping[str, Any]], bool]
    text: str
    keys: tuple[str, ...]


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


class Conflict(NamedTuple):
    """Two conditions that must not both hold; ``reason`` follows them in the message."""

    one: Condition
    other: Condition
    reason: str = ""


class Finding(NamedTuple):
    """A value without effect, or one that cannot be combined with others.

    Attributes:
        key: the option.
        refused: True if it is an error, False if it is noted.
        problem: the message.
    """

    key: str
    refused: bool
    problem: str


def is_set(key: str) -> Condition:
    """Returns the condition that a key has a value other than null, false, 0 and an empty list."""
    return Condition(lambda values: bool(values.get(key)), key, (key,))


def is_empty(key: str) -> Condition:
    """Returns the condition that :func:`is_set` does not hold."""
    return Condition(lambda values: not values.get(key), f"an empty {key}", (key,))


def one_of(key: str, *accepted: Any) -> Condition:
    """Returns the condition that a key has one of the ``accepted`` values."""
    words = " or ".join(map(plain_text, accepted))
    return Condition(lambda values: values.get(key) in accepted, f"{key}: {words}", (key,))


def other_than(key: str, *refused: Any) -> Condition:
    """Returns the condition that a key has none of the ``refused`` values."""
    words = " or ".join(map(plain_text, refused))
    return Condition(lambda values: values.get(key) not in refused, f"{key} other than {words}", (key,))


def at_most(key: str, most: int) -> Condition:
    """Returns the condition that a key is at most ``most``."""
    return Condition(lambda values: values.get(key, 0) <= most, f"{key} of at most {most}", (key,))


def at_least(key: str, least: int) -> Condition:
    """Returns the condition that a key is at least ``least``."""
    return Condition(lambda values: values.get(key, 0) >= least, f"{key} of at least {least}", (key,))


def below(key: str, limit: str) -> Condition:
    """Returns the condition that a key is less than another one."""
    return Condition(lambda values: values[key] < values[limit], f"{key} below {limit}", (key,))


def above_zero(key: str) -> Condition:
    """Returns the condition that a key is above 0."""
    return Condition(lambda values: (values.get(key) or 0) > 0, f"{key} above 0", (key,))


def any_of(*conditions: Condition) -> Condition:
    """Returns the condition that at least one of ``conditions`` holds."""
    return _joined(any, ", or ", conditions)


def all_of(*conditions: Condition) -> Condition:
    """Returns the condition that all ``conditions`` hold."""
    return _joined(all, " with ", conditions)


def _joined(how: Callable[[Iterable[bool]], bool], word: str, conditions: tuple[Condition, ...]) -> Condition:
    keys = tuple(dict.fromkeys(key for each in conditions for key in each.keys))
    text = word.join(each.text for each in conditions)
    return Condition(lambda values: how(each.holds(values) for each in conditions), text, keys)


_TRANSLATION = one_of("task", "translation")
_SEVERAL = at_least(PROCESSES, 2)
_SAMPLING = other_than("decoding.sample", None)._replace(text="decoding.sample")
_LEARNT = all_of(is_empty("data.subwords.models"), is_empty("data.subwords.lists"))._replace(
    text="a vocabulary to learn, with no files of one in data.subwords"
)
_SEPARATE = one_of("data.subwords.joint", False)
_BEAM_SEARCH = one_of("decoding.sample", None)._replace(text="beam search")

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
    "model.dropout.layers": Rule(any_of(_TRANSLATION, at_least("model.layers", 2)), refused=True),
    "model.dropout.variational": Rule(
        any_of(
            all_of(above_zero("model.dropout.embedding"), _TRANSLATION),
            *(above_zero(f"model.dropout.{name}") for name in ("inputs", "layers", "output")),
        )
    ),
    "model.initialization.scale": Rule(one_of("model.initialization.weights", "uniform")),
    "ops.stash": Rule(
        any_of(
            one_of("ops.encoder", "auto", "recompute"),
            all_of(one_of("ops.decoder", "auto", "recompute"), _TRANSLATION),
        )
    ),
    "training.temporal_activation_regularization": Rule(
        any_of(at_least("training.bptt", 2), is_set("training.bptt_jitter")), refused=True
    ),
    "training.guided_alignment_weight": Rule(other_than("data.alignment", None)),
    "training.max_buckets": Rule(one_of("training.bucket_width", None)),
    "training.optimizer.betas": Rule(other_than("training.optimizer.name", "sgd", "adagrad", "adafactor")),
    "training.optimizer.eps": Rule(other_than("training.optimizer.name", "sgd")),
    "training.optimizer.momentum": Rule(one_of("training.optimizer.name", "sgd", "rmsprop"), refused=True),
    "training.averaging.decay": Rule(other_than("training.averaging.start", "never"), refused=True),
    "training.averaging.non_monotone_interval": Rule(one_of("training.averaging.start", "non-monotone")),
    "training.schedule.reduce_factor": Rule(one_of("training.schedule.name", "plateau-reduce")),
    "training.schedule.decay_updates": Rule(
        one_of("training.schedule.name", "cosine", "linear"), refused=True
    ),
    "training.schedule.min_learning_rate": Rule(one_of("training.schedule.name", "cosine", "linear")),
    "training.loss_scale": Rule(one_of("training.precision", "float16", "auto")),
    "training.loss_scale_window": Rule(one_of("training.precision", "float16", "auto")),
    "training.update_vocab": Rule(is_set("training.initialize_from"), refused=True),
    "data.mixing.epoch_pairs": Rule(is_set("data.mixing.weights"), refused=True),
    "data.annotate_terms.glossary": Rule(above_zero("data.annotate_terms.share"), refused=True),
    "data.subwords.dropout": Rule(one_of("data.subwords.type", "bpe"), refused=True),
    "model.source_factors_combine": Rule(is_set("data.source_factors"), refused=True),
    "data.subwords.threshold": Rule(is_set("data.subwords.vocabularies"), refused=True),
    **{
        f"data.subwords.{key}": Rule(_LEARNT, refused=True)
        for key in ("source", "size", "min_count", "character_coverage")
    },
    "data.subwords.target": Rule(all_of(_LEARNT, _SEPARATE), refused=True),
    "training.schedule.reduce_num_not_improved": Rule(one_of("training.schedule.name", "plateau-reduce")),
    "training.gradient_clipping.threshold": Rule(other_than("training.gradient_clipping.type", "none")),
    "training.bleu_tokenizer": Rule(
        any_of(other_than("training.decode_and_evaluate", 0), other_than("data.test", None))
    ),
    "decoding.brevity_penalty_constant_length_ratio": Rule(above_zero("decoding.brevity_penalty_weight")),
    "decoding.length_penalty_beta": Rule(other_than("decoding.length_penalty_alpha", 0)),
    "parallel.reduction": Rule(_SEVERAL),
    "parallel.shard_optimizer": Rule(_SEVERAL),
    "parallel.timeout": Rule(_SEVERAL),
}
"""Conditions of all keys of a recipe that do not always have an effect, by dotted key."""

SEARCH_RULES: dict[str, Rule] = {
    **RULES,
    **{
        f"decoding.{name}": Rule(_BEAM_SEARCH)
        for name in (
            *("brevity_penalty_weight", "coverage_penalty_weight", "word_penalty"),
            *("beam_prune", "beam_search_stop", "beam_size"),
        )
    },
    "decoding.brevity_penalty_constant_length_ratio": Rule(
        all_of(above_zero("decoding.brevity_penalty_weight"), _BEAM_SEARCH)
    ),
    **{f"decoding.{name}": Rule(_SAMPLING) for name in ("top_p", "temperature")},
    "decoding.lm_weight": Rule(is_set("decoding.language_model")),
    "decoding.restrict_lexicon_topk": Rule(is_set("decoding.restrict_lexicon")),
    "decoding.top_k": Rule(
        Condition(lambda values: values.get("decoding.sample") is True, "sample=True", ("decoding.sample",))
    ),
}
"""Conditions of options that are given for one search, in addition to those of recipes."""


_PIPELINE = at_least("parallel.pipeline", 2)
_AVERAGING = other_than("training.averaging.start", "never")
_STORED_IN_BFLOAT16 = one_of("training.param_dtype", "bfloat16")
_NOISE = any_of(
    *(above_zero(f"data.noise.{name}") for name in ("upper", "title", "typos", "emoji", "markup"))
)
_TERMS = above_zero("data.annotate_terms.share")
_DECODER_OPTIONS = (
    is_set("model.decoder.context_gating"),
    other_than("model.attention.coverage.type", "none"),
    is_set("model.layer_normalization"),
)


def _cell_without(ability: str, key: str) -> Condition:
    """Returns the condition that a cell lacks an ability of :class:`~econmt.config.stacks.CellRules`."""
    return other_than(key, *(name for name, rules in CELLS.items() if getattr(rules, ability)))


def _with_each(one: Condition, *others: Condition, reason: str = "") -> Iterator[Conflict]:
    """Yields the conflicts of a condition with several others."""
    return (Conflict(one, other, reason) for other in others)


_GUIDES = (is_set("data.alignment"), is_set("data.source_factors"))

CONFLICTS = (
    *_with_each(
        _PIPELINE,
        *_DECODER_OPTIONS,
        *_GUIDES,
        is_set("training.memory_budget"),
        is_set("training.fixed_param_names"),
        is_set("data.weights"),
        *(other_than(f"model.{part}cell", "lstm") for part in ("", "encoder.", "decoder.")),
        one_of("training.optimizer.name", "adafactor", "adam8bit"),
    ),
    *_with_each(
        _PIPELINE,
        above_zero("training.activation_regularization"),
        above_zero("training.temporal_activation_regularization"),
        reason=" (the penalties need the top layer's outputs beside the loss)",
    ),
    Conflict(
        _PIPELINE,
        is_set("parallel.shard_optimizer"),
        " (each rank already holds only the optimizer state of its layers)",
    ),
    *_with_each(
        _PIPELINE,
        below("model.layers", "parallel.pipeline"),
        all_of(*(below(f"model.{part}.layers", "parallel.pipeline") for part in ("encoder", "decoder"))),
        reason=" (each stage needs a layer)",
    ),
    *(
        Conflict(each, _AVERAGING)
        for each in (
            is_set("parallel.shard_optimizer"),
            one_of("training.schedule.name", "plateau-reduce"),
            _STORED_IN_BFLOAT16,
        )
    ),
    *_with_each(_STORED_IN_BFLOAT16, other_than("training.precision", "auto", "bfloat16"), _SEVERAL),
    *_with_each(
        one_of("training.optimizer_in_backward", "always"),
        one_of("training.gradient_clipping.type", "norm"),
        at_least("training.update_interval", 2),
        one_of("training.precision", "float16"),
        _SEVERAL,
        reason=", which needs all gradients of an update",
    ),
    Conflict(
        one_of(
            "training.early_stopping.metric",
            *(name for name, each in METRICS.items() if each.of_translations),
        ),
        one_of("training.decode_and_evaluate", 0),
    ),
    *_with_each(
        other_than("training.bucket_width", None),
        is_set("data.mixing.weights"),
        _NOISE,
        reason=", which changes the lengths of pairs in each epoch",
    ),
    *_with_each(_NOISE, *_GUIDES, reason=": it changes words"),
    *_with_each(_TERMS, *_GUIDES, reason=": it adds words"),
    *_with_each(
        _TERMS, _SEPARATE, one_of("data.subwords.type", "words"), reason=": sources get target words"
    ),
    Conflict(one_of("model.weight_tying", "src_trg", "src_trg_softmax"), _SEPARATE),
    Conflict(is_set("data.source_factors"), is_set("data.tags"), ": a tag is a word without factors"),
    *_with_each(one_of("model.decoder.input_feeding", False), *_DECODER_OPTIONS),
    Conflict(one_of("model.decoder.input_feeding", True), _cell_without("feeding", "model.decoder.cell")),
    *(
        Conflict(other_than(f"model.{part}.rank", None), _cell_without("ranks", f"model.{part}.cell"))
        for part in ("encoder", "decoder")
    ),
    Conflict(above_zero("model.dropout.weights"), _cell_without("recurrent", "model.cell")),
    *_with_each(
        other_than("model.attention.type", "additive"),
        is_set("model.attention.layer_norm"),
        other_than("model.attention.coverage.type", "none"),
    ),
    Conflict(
        one_of("model.attention.coverage.type", "count", "fertility"),
        at_least("model.attention.coverage.num_hidden", 2),
    ),
    Conflict(
        one_of("training.schedule.name", "inverse-sqrt", "noam"),
        one_of("training.schedule.warmup", 0),
        " (it needs at least 1 update)",
    ),
    Conflict(is_set("decoding.ban_unk"), above_zero("decoding.unk_penalty")),
    Conflict(is_set("decoding.language_model"), is_set("decoding.restrict_lexicon")),
    Conflict(above_zero("decoding.block_ngram_repeat"), _SAMPLING),
    *_with_each(
        one_of("decoding.attention", False),
        *(is_set(f"decoding.{name}") for name in ("replace_unk", "markup", "split_sentences")),
    ),
)
"""Pairs of settings that cannot be combined."""

_RUNTIME_CELLS = ("lstm", "gru", "ssru", "lnlstm", "lnglstm")
MOST_RUNTIME_WORDS = 64
"""Largest beam size of econmt_runtime, equal to econmt_runtime.library.MOST_WORDS."""

RUNTIME = (
    *(one_of(f"model.{part}.cell", *_RUNTIME_CELLS) for part in ("encoder", "decoder")),
    one_of("data.source_factors", []),
    other_than("data.subwords.type", "codes"),
    at_most("decoding.beam_size", MOST_RUNTIME_WORDS),
    *(
        one_of(f"decoding.{name}", 0)
        for name in (
            *("block_ngram_repeat", "min_output_length", "unk_penalty", "word_penalty"),
            *("brevity_penalty_weight", "coverage_penalty_weight", "beam_prune"),
        )
    ),
    one_of("decoding.ban_unk", False),
    one_of("decoding.repetition_penalty", 1),
    one_of("decoding.beam_search_stop", "all"),
    any_of(one_of("model.encoder.residual", False), other_than("model.encoder.bidirectional", "none")),
)
"""Conditions that the recipes of models satisfy which econmt_runtime translates with."""


def find_conflicts(values: Mapping[str, Any]) -> Iterator[Finding]:
    """Yields a finding for each of :data:`CONFLICTS` that holds and whose options are all among ``values``."""
    for one, other, reason in CONFLICTS:
        if (
            all(key in values for key in (*one.keys, *other.keys))
            and one.holds(values)
            and other.holds(values)
        ):
            both = " cannot be combined with ".join(settings_text(each, values) for each in (one, other))
            yield Finding(other.keys[-1], True, f"{both}{reason}; change one of them")


def conflicts(values: Mapping[str, Any]) -> Iterator[str]:
    """Yields the messages of :func:`find_conflicts`."""
    return (each.problem for each in find_conflicts(values))


def settings_text(condition: Condition, values: Mapping[str, Any]) -> str:
    """Returns the settings of a condition that :func:`is_set` holds for, all if there is none, as "key: value"."""
    keys = [key for key in condition.keys if values[key]] or [*condition.keys]
    return " and ".join(f"{key}: {plain_text(values[key])}" for key in keys)


def idle_keys(
    values: Mapping[str, Any], given: Iterable[str], rules: Mapping[str, Rule]
) -> Iterator[tuple[str, Rule]]:
    """Yields those of the ``given`` keys that have no effect beside ``values``, each with its rule."""
    for key in given:
        if key in rules and not rules[key].needs.holds(values):
            yield key, rules[key]


def keys_without_effect(recipe: Any, processes: int = 2) -> frozenset[str]:
    """Returns the keys of a recipe that have no effect in ``processes`` processes; 2 stands for several."""
    values = {**dict(leaves(recipe)), PROCESSES: processes}
    return frozenset(key for key, _ in idle_keys(values, values, RULES))


def idle_values(recipe: Any) -> Iterator[Finding]:
    """Yields a finding for each value of a recipe that differs from its default and has no effect in any process."""
    values = {**dict(leaves(recipe)), PROCESSES: 2}
    changed = dict(leaves(recipe, changed_only=True))
    kind: type[BaseModel] = type(recipe)
    other_task = TRANSLATION if recipe.task == "language_model" else LANGUAGE_MODEL
    for key in changed.keys() & marked_keys(kind, other_task):
        yield Finding(key, True, f"{key} has no effect with task: {recipe.task}; remove it")
    for key, rule in idle_keys(values, changed, RULES):
        remedy = "; set that, or remove this key" if rule.refused else ""
        problem = f"{plain_text(changed[key])} has no effect without {rule.needs.text}{remedy}"
        yield Finding(key, rule.refused, f"{key}: {problem}")


def check_search(values: Mapping[str, Any], given: Iterable[str]) -> Iterator[str]:
    """Yields a message for each ``given`` option of a search that has no effect, and for conflicts."""
    named = {f"decoding.{name}": value for name, value in values.items()}
    for key, rule in idle_keys(named, [f"decoding.{name}" for name in given], SEARCH_RULES):
        name, needs = key.removeprefix("decoding."), rule.needs.text.replace("decoding.", "")
        yield f"{name} has no effect without {needs}; add that, or remove {name}"
    for problem in conflicts(named):
        yield problem.replace("decoding.", "")
