"""Values and pairs of values of a recipe that are refused, or noted because they have no effect; marks of keys."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from econmt.checkpoint.folder import ModelFolder
from econmt.config.conditions import CONFLICTS, PROCESSES, RULES, idle_values, keys_without_effect
from econmt.config.recipe import Data, Recipe, TextData, load_recipe, shipped_recipes
from econmt.config.section import KeyMark, marked_keys
from econmt.config.yaml_reader import leaves, walk
from econmt.errors import InputError
from econmt.training.run import run_recipe
from tests.unit.training.tiny import Run, snapshot, write_text

# Key: (a value, what makes it act); a recipe named ptb is a language model.
CASES: dict[str, tuple[str, tuple[str, ...]]] = {
    "model.encoder.reverse_input": ("true", ("model.encoder.bidirectional=none",)),
    "model.encoder.residual": ("true", ("model.encoder.layers=2",)),
    "model.decoder.residual": ("true", ("model.decoder.layers=2",)),
    "model.attention.size": ("5", ("model.attention.type=additive",)),
    "model.attention.coverage.num_hidden": ("3", ("model.attention.coverage.type=gru",)),
    "model.dropout.layers": ("0.2", ("model.layers=2",)),
    "model.dropout.variational": ("true", ("model.dropout.inputs=0.2",)),
    "model.initialization.scale": ("0.3", ("model.initialization.weights=uniform",)),
    "ops.stash": ("outputs", ("ops.encoder=recompute",)),
    "training.temporal_activation_regularization": ("1.5", ("training.bptt=1", "training.bptt_jitter=true")),
    "training.guided_alignment_weight": ("0.5", ("data.alignment=align",)),
    "training.max_buckets": ("3", ("training.bucket_width=null",)),
    "training.optimizer.betas": ("[0.8, 0.9]", ("training.optimizer.name=adam",)),
    "training.optimizer.eps": ("0.01", ("training.optimizer.name=adam",)),
    "training.optimizer.momentum": ("0.9", ("training.optimizer.name=sgd",)),
    "training.averaging.non_monotone_interval": ("3", ("training.averaging.start=non-monotone",)),
    "training.averaging.decay": ("0.9", ("training.averaging.start=at-once",)),
    "training.schedule.reduce_factor": ("0.3", ("training.schedule.name=plateau-reduce",)),
    "training.schedule.decay_updates": ("9", ("training.schedule.name=cosine",)),
    "training.schedule.min_learning_rate": (
        "1.0e-6",
        ("training.schedule={name: linear, decay_updates: 4}",),
    ),
    "training.loss_scale": ("1024", ("training.precision=float16",)),
    "training.loss_scale_window": ("9", ("training.precision=float16",)),
    "training.schedule.reduce_num_not_improved": ("5", ("training.schedule.name=plateau-reduce",)),
    "training.gradient_clipping.threshold": ("0.1", ("training.gradient_clipping.type=norm",)),
    "training.bleu_tokenizer": ("char", ("training.decode_and_evaluate=5",)),
    "training.update_vocab": ("true", ("training.initialize_from=run",)),
    "data.mixing.epoch_pairs": ("9", ("data.mixing.weights=[[1]]",)),
    "data.annotate_terms.glossary": ("terms.tsv", ("data.annotate_terms.share=0.1",)),
    "data.subwords.threshold": ("2", ("data.subwords={type: codes, files: [a], vocabularies: [b]}",)),
    "data.subwords.dropout": ("0.1", ("data.subwords.type=bpe",)),
    "data.subwords.source": ("90", ("data.subwords={type: words}",)),
    "data.subwords.target": ("90", ("data.subwords={type: words}",)),
    "data.subwords.size": ("90", ("data.subwords.type=bpe",)),
    "data.subwords.min_count": ("2", ("data.subwords={type: words}",)),
    "data.subwords.character_coverage": ("0.99", ("data.subwords.type=bpe",)),
    "model.source_factors_combine": (
        "sum",
        ("data.source_factors=[pos]", "model.source_factors_num_embed=[128]", "model.embedding=128"),
    ),
    "decoding.brevity_penalty_constant_length_ratio": ("1.5", ("decoding.brevity_penalty_weight=1",)),
    "decoding.length_penalty_beta": ("1", ("decoding.length_penalty_alpha=0.5",)),
}
IDLE: dict[str, tuple[str, ...]] = {
    "model.attention.size": ("model.attention.type=dot",),
    "model.dropout.layers": ("model.layers=1",),
    "model.dropout.variational": ("model.dropout={inputs: 0, layers: 0, output: 0, embedding: 0}",),
    "ops.stash": ("ops.encoder=reference", "ops.decoder=reference"),
    "training.temporal_activation_regularization": ("training.bptt=1",),
    "training.max_buckets": ("training.bucket_width=8",),
    "training.optimizer.betas": ("training.optimizer.name=sgd",),
    "training.optimizer.eps": ("training.optimizer.name=sgd",),
    "training.gradient_clipping.threshold": ("training.gradient_clipping.type=none",),
    "training.loss_scale": ("training.precision=float32",),
    "training.loss_scale_window": ("training.precision=bfloat16",),
    "training.bleu_tokenizer": (
        "data.test=null",
        "training.decode_and_evaluate=0",
        "training.early_stopping.metric=perplexity",
    ),
    "decoding.length_penalty_beta": ("decoding.length_penalty_alpha=0",),
    "data.subwords.threshold": ("data.subwords={type: codes, files: [a]}",),
    "data.subwords.dropout": ("data.subwords.type=unigram",),
    "data.subwords.size": ("data.subwords={type: bpe, models: [a]}",),
    "data.subwords.character_coverage": ("data.subwords={type: bpe, models: [a]}",),
    "data.subwords.min_count": ("data.subwords={type: words, lists: [a, b]}",),
    "data.subwords.source": ("data.subwords={type: words, lists: [a, b]}",),
    "data.subwords.target": ("data.subwords={type: words, lists: [a, b]}",),
}
"""What makes a key idle where the recipe as it stands does not."""
KEYS_OF_PROCESSES = {"parallel.reduction", "parallel.shard_optimizer", "parallel.timeout"}


def test_every_rule_is_tried_and_few_keys_may_change() -> None:
    assert set(CASES) == set(RULES) - KEYS_OF_PROCESSES
    subwords = ("{type: bpe}", "{type: words}", "{type: codes, files: [a]}")
    recipes = [load_recipe("quickstart", [f"data.subwords={each}"]) for each in subwords]
    keys = {key for recipe in (load_recipe("ptb"), *recipes) for key, _ in leaves(recipe)}
    assert set(RULES) <= keys
    assert marked_keys(Recipe, KeyMark.NO_PARAMETERS) == frozenset(FREE_WHEN_RESUMED.split())


@pytest.mark.parametrize("key", sorted(CASES))
def test_a_value_without_effect_is_refused_or_noted(key: str, capsys: pytest.CaptureFixture[str]) -> None:
    value, acting = CASES[key]
    name = "ptb" if key.startswith(("model.dropout.", "training.temporal_")) else "quickstart"
    given = f"{key}={value}"
    load_recipe(name, [*acting, given])
    assert capsys.readouterr().err == ""
    expected = f"override '{given}': {key}: "
    idle = [*IDLE.get(key, ()), given]
    if RULES[key].refused:
        with pytest.raises(InputError) as refused:
            load_recipe(name, idle)
        said = str(refused.value)
        assert said.endswith("; set that, or remove this key")
    else:
        load_recipe(name, idle)
        said = capsys.readouterr().err.removeprefix("econmt: ").removeprefix("note: ")
    assert said.startswith(expected), said
    assert " has no effect without " in said
    assert said.count("\n") <= 1


def test_what_has_no_effect_is_noted_and_defaults_never(tmp_path: Path) -> None:
    for name in shipped_recipes():
        assert list(idle_values(load_recipe(name))) == [], name
    assert list(idle_values(Recipe.model_validate(load_recipe("quickstart").model_dump()))) == []
    recipe = load_recipe("quickstart", ["parallel.shard_optimizer=true"])
    assert not keys_without_effect(recipe) & KEYS_OF_PROCESSES
    assert keys_without_effect(recipe, processes=1) >= KEYS_OF_PROCESSES
    write_text(tmp_path, {"train": 12, "valid": 3})
    run = Run(tmp_path, tmp_path / "run", ("training.max_updates=1", "parallel.shard_optimizer=true"))
    run.train()
    assert "note: no effect in a single process: parallel.shard_optimizer\n" in run.said()
    plain = Run(tmp_path, tmp_path / "plain", ("training.max_updates=1",))
    plain.train()
    assert "without effect" not in plain.said()


def learnt(folder: ModelFolder) -> dict[str, object]:
    """What a run has learnt and written; the recipe, which the files of parameters hold too, left out."""
    files: dict[str, object] = dict(snapshot(folder))
    for name in files:
        if name.endswith(".safetensors"):
            tensors = load_file(folder.path / name)
            files[name] = {key: tensor.numpy().tobytes() for key, tensor in tensors.items()}
    return files


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "key", sorted(key for key in CASES if not RULES[key].refused and not key.startswith("model.dropout"))
)
def test_what_is_said_to_have_no_effect_has_none(key: str, tmp_path: Path) -> None:
    write_text(tmp_path, {"train": 24, "valid": 5, "test": 4})
    base = ("training.max_updates=4", *IDLE.get(key, ()))
    if "training.optimizer.name=sgd" in base:
        base = ("training.max_updates=4", "training.optimizer={name: sgd, learning_rate: 0.1}")
    found = []
    for number, more in enumerate([(), (f"{key}={CASES[key][0]}",)]):
        run = Run(tmp_path, tmp_path / str(number), (*base, *more))
        run_recipe(run.recipe, [tmp_path], console=run.console)
        found.append(learnt(run.folder))
    assert found[0] == found[1]
    assert any(name.startswith("params.") for name in found[0])


def test_a_run_goes_on_where_only_a_value_without_effect_differs(tmp_path: Path) -> None:
    write_text(tmp_path, {"train": 12, "valid": 3})
    Run(tmp_path, tmp_path / "run", ("training.max_updates=2",)).train()
    changed = ("training.max_updates=3", "training.schedule.reduce_factor=0.3")
    assert Run(tmp_path, tmp_path / "run", changed).trainer().state.update == 2
    acting = ("training.max_updates=3", "training.gradient_clipping.threshold=0.3")
    with pytest.raises(InputError, match=r"training\.gradient_clipping\.threshold 1\.0 -> 0\.3"):
        Run(tmp_path, tmp_path / "run", acting).trainer()


FACTORS = "data.source_factors=[pos] model.source_factors_num_embed=[4]"
COVERAGE = "model.attention.coverage.type=tanh"
MIXING = "data.mixing.weights=[[1]]"
LAYERS = "parallel.pipeline=2 model.encoder.layers=2 model.decoder.layers=2 "
BFLOAT16 = "training.param_dtype=bfloat16 "
IN_BACKWARD = "training.optimizer_in_backward=always "
BY_VALUE = IN_BACKWARD + "training.gradient_clipping={type: value, threshold: 1.0} "
AT_ONCE = "model.decoder.input_feeding=false "
TERMS = "data.annotate_terms.share=0.1 "
ALWAYS = "training.averaging.start=at-once"

REFUSED = {
    LAYERS + "model.decoder.context_gating=true": "parallel.pipeline: 2 with model.decoder.context_gating",
    LAYERS + COVERAGE: "parallel.pipeline: 2 with model.attention.coverage.type: tanh",
    LAYERS + "model.layer_normalization=true": "parallel.pipeline: 2 with model.layer_normalization",
    LAYERS + "training.memory_budget=1GiB": "parallel.pipeline: 2 with training.memory_budget",
    LAYERS + "training.fixed_param_names=[output.bias]": "parallel.pipeline: 2 with training.fixed_param_names",
    LAYERS + FACTORS: "parallel.pipeline: 2 with data.source_factors",
    LAYERS + "data.alignment=align": "parallel.pipeline: 2 with data.alignment",
    LAYERS + "data.weights=weights": "parallel.pipeline: 2 with data.weights",
    LAYERS + "model.encoder.cell=gru": "parallel.pipeline: 2 with model.encoder.cell: gru",
    LAYERS + "model.decoder.cell=gru": "parallel.pipeline: 2 with model.decoder.cell: gru",
    LAYERS + "training.optimizer.name=adafactor": "parallel.pipeline: 2 with training.optimizer.name: adafactor",
    LAYERS + "parallel.shard_optimizer=true": "parallel.pipeline: 2 with parallel.shard_optimizer",
    "parallel.pipeline=2 model.encoder.layers=1 model.decoder.layers=1": "pipeline: 2 with model.encoder.layers: 1",
    "parallel.shard_optimizer=true " + ALWAYS: "parallel.shard_optimizer: true with training.averaging.start",
    "training.schedule.name=plateau-reduce " + ALWAYS: "plateau-reduce with training.averaging.start: at-once",
    BFLOAT16 + ALWAYS: "training.param_dtype: bfloat16 with training.averaging.start: at-once",
    BFLOAT16 + "training.precision=float32": "training.param_dtype: bfloat16 with training.precision: float32",
    IN_BACKWARD + "training.gradient_clipping.type=norm": "always with training.gradient_clipping.type: norm",
    BY_VALUE + "training.update_interval=2": "optimizer_in_backward: always with training.update_interval: 2",
    BY_VALUE + "training.precision=float16": "optimizer_in_backward: always with training.precision: float16",
    "training.early_stopping.metric=chrf training.decode_and_evaluate=0": "chrf with training.decode_and_evaluate: 0",
    "training.bucket_width=8 " + MIXING: "training.bucket_width: 8 with data.mixing.weights",
    "training.bucket_width=8 data.noise.typos=0.1": "training.bucket_width: 8 with data.noise.typos: 0.1",
    "data.noise.typos=0.1 data.alignment=align": "data.noise.typos: 0.1 with data.alignment",
    "data.noise.typos=0.1 " + FACTORS: "data.noise.typos: 0.1 with data.source_factors",
    TERMS + "data.alignment=align": "data.annotate_terms.share: 0.1 with data.alignment",
    TERMS + FACTORS: "data.annotate_terms.share: 0.1 with data.source_factors",
    TERMS + "data.subwords.joint=false": "data.annotate_terms.share: 0.1 with data.subwords.joint: false",
    TERMS + "data.subwords={type: words, joint: true}": "data.annotate_terms.share: 0.1 with data.subwords.type: words",
    "model.weight_tying=src_trg data.subwords.joint=false": "model.weight_tying: src_trg with data.subwords.joint",
    FACTORS + " data.tags=[<BT>] data.train=[a]": "data.source_factors with data.tags",
    AT_ONCE + "model.decoder.context_gating=true": "model.decoder.input_feeding: false with model.decoder.context_gating",
    AT_ONCE + COVERAGE: "input_feeding: false with model.attention.coverage.type: tanh",
    AT_ONCE + "model.layer_normalization=true": "input_feeding: false with model.layer_normalization",
    "model.decoder.cell=sru": "model.decoder.input_feeding: true with model.decoder.cell: sru",
    "model.encoder={cell: gru, rank: 2}": "model.encoder.rank: 2 with model.encoder.cell: gru",
    "model.decoder={cell: gru, rank: 2}": "model.decoder.rank: 2 with model.decoder.cell: gru",
    "model.attention={type: dot, layer_norm: true}": "model.attention.type: dot with model.attention.layer_norm",
    COVERAGE + " model.attention.type=dot": "model.attention.type: dot with model.attention.coverage.type: tanh",
    "model.attention.coverage={type: count, num_hidden: 2}": "coverage.type: count with model.attention.coverage.num_hidden: 2",
    "training.schedule.name=noam": "training.schedule.name: noam with training.schedule.warmup: 0",
}  # fmt: skip
"""Overrides of the recipe quickstart, separated by spaces, and the two settings in the message."""
TEXT = {
    "parallel.pipeline=2 model.layers=2 model.cell=gru": "parallel.pipeline: 2 with model.cell: gru",
    "parallel.pipeline=2 model.layers=1": "parallel.pipeline: 2 with model.layers: 1",
    "parallel.pipeline=2 model.layers=2 training.activation_regularization=1.0": "parallel.pipeline: 2 with training.activation_regularization: 1",
    "parallel.pipeline=2 model.layers=2 training.temporal_activation_regularization=1.0": "parallel.pipeline: 2 with training.temporal_activation_regularization: 1",
    "model.cell=qrnn model.dropout.weights=0.5": "model.dropout.weights: 0.5 with model.cell: qrnn",
}
"""Those of the recipe ptb, a language model."""


@pytest.mark.parametrize(
    ("name", "given", "both"),
    [("quickstart", *each) for each in REFUSED.items()] + [("ptb", *each) for each in TEXT.items()],
)
def test_settings_that_cannot_be_combined_are_named(name: str, given: str, both: str) -> None:
    one, other = both.replace("model.", "").split(" with ")
    with pytest.raises(InputError) as refused:
        load_recipe(name, re.split(r" (?=[a-z]+\.[a-z_.]+=)", given))
    said = str(refused.value).replace("model.", "").split("cannot be combined with ")
    assert one in said[0]
    assert other in "; ".join(said[1:])
    assert "; change one of them" in said[-1]


def test_every_conflict_is_tried() -> None:
    """Those of several processes are told by the training step, and those of searches when one begins."""
    keys = [(*conflict.one.keys, *conflict.other.keys) for conflict in CONFLICTS]
    others = [each for each in keys if PROCESSES in each or any(key.startswith("decoding.") for key in each)]
    assert len(REFUSED) + len(TEXT) == len(keys) - len(others)


FREE_WHEN_RESUMED = """
name output data.test data.prepared ops.encoder ops.decoder ops.attention ops.output ops.stash training.memory_budget
training.max_updates training.max_epochs training.max_seconds training.keep_last_params
training.early_stopping.max_num_checkpoint_not_improved training.device training.cuda_graphs training.threads
training.log_interval training.optimizer_in_backward parallel.pipeline parallel.shard_optimizer parallel.timeout
"""


@pytest.mark.parametrize(
    ("mark", "prefixes"),
    [
        (KeyMark.NO_MEMORY, ("model.", "ops.", "decoding.", "training.batch.", "training.optimizer.")),
        (KeyMark.NO_PREPARED_TEXT, ("model.", "training.", "ops.")),
    ],
    ids=lambda value: value.name if isinstance(value, KeyMark) else "",
)
def test_sections_that_matter_have_no_marked_key(mark: KeyMark, prefixes: tuple[str, ...]) -> None:
    assert [key for key in sorted(marked_keys(Recipe, mark)) if key.startswith(prefixes)] == []


@pytest.mark.parametrize("kind", [Data, TextData])
def test_prepared_text_depends_on_all_that_is_written(kind: Any) -> None:
    known = {"prepared", "mixing", "noise", "subwords.dropout"}
    keys = marked_keys(kind, KeyMark.NO_PREPARED_TEXT)
    marked = {key for key in keys if not key.startswith(("mixing.", "noise."))}
    assert marked == known & {key for key, _, _ in walk(kind)}


def test_marks_of_sections_hold_for_keys_and_none_is_of_two_tasks() -> None:
    translation = marked_keys(Recipe, KeyMark.TRANSLATION)
    assert "decoding.beam_size" in translation
    assert "training.max_updates" not in translation
    assert not marked_keys(Recipe, KeyMark.TRANSLATION) & marked_keys(Recipe, KeyMark.LANGUAGE_MODEL)
