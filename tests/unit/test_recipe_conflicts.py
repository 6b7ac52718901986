"""Every pair of settings that cannot be combined is refused, with both in the line."""

from __future__ import annotations

import re

import pytest

from econmt.config.conditions import CONFLICTS, PROCESSES
from econmt.config.recipe import load_recipe
from econmt.errors import InputError

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
    LAYERS
    + "training.fixed_param_names=[output.bias]": "parallel.pipeline: 2 with training.fixed_param_names",
    LAYERS + FACTORS: "parallel.pipeline: 2 with data.source_factors",
    LAYERS + "data.alignment=align": "parallel.pipeline: 2 with data.alignment",
    LAYERS + "data.weights=weights": "parallel.pipeline: 2 with data.weights",
    LAYERS + "model.encoder.cell=gru": "parallel.pipeline: 2 with model.encoder.cell: gru",
    LAYERS + "model.decoder.cell=gru": "parallel.pipeline: 2 with model.decoder.cell: gru",
    LAYERS
    + "training.optimizer.name=adafactor": "parallel.pipeline: 2 with training.optimizer.name: adafactor",
    LAYERS + "parallel.shard_optimizer=true": "parallel.pipeline: 2 with parallel.shard_optimizer",
    "parallel.pipeline=2 model.encoder.layers=1 model.decoder.layers=1": "pipeline: 2 with model.encoder.layers: 1",
    "parallel.shard_optimizer=true " + ALWAYS: "parallel.shard_optimizer: true with training.averaging.start",
    "training.schedule.name=plateau-reduce "
    + ALWAYS: "plateau-reduce with training.averaging.start: at-once",
    BFLOAT16 + ALWAYS: "training.param_dtype: bfloat16 with training.averaging.start: at-once",
    BFLOAT16
    + "training.precision=float32": "training.param_dtype: bfloat16 with training.precision: float32",
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
    TERMS
    + "data.subwords={type: words, joint: true}": "data.annotate_terms.share: 0.1 with data.subwords.type: words",
    "model.weight_tying=src_trg data.subwords.joint=false": "model.weight_tying: src_trg with data.subwords.joint",
    FACTORS + " data.tags=[<BT>] data.train=[a]": "data.source_factors with data.tags",
    AT_ONCE
    + "model.decoder.context_gating=true": "model.decoder.input_feeding: false with model.decoder.context_gating",
    AT_ONCE + COVERAGE: "input_feeding: false with model.attention.coverage.type: tanh",
    AT_ONCE + "model.layer_normalization=true": "input_feeding: false with model.layer_normalization",
    "model.decoder.cell=sru": "model.decoder.input_feeding: true with model.decoder.cell: sru",
    "model.encoder={cell: gru, rank: 2}": "model.encoder.rank: 2 with model.encoder.cell: gru",
    "model.decoder={cell: gru, rank: 2}": "model.decoder.rank: 2 with model.decoder.cell: gru",
    "model.attention={type: dot, layer_norm: true}": "model.attention.type: dot with model.attention.layer_norm",
    COVERAGE
    + " model.attention.type=dot": "model.attention.type: dot with model.attention.coverage.type: tanh",
    "model.attention.coverage={type: count, num_hidden: 2}": "coverage.type: count with model.attention.coverage.num_hidden: 2",
    "training.schedule.name=noam": "training.schedule.name: noam with training.schedule.warmup: 0",
}
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
