"""Recipes made of configurations of Joey NMT, OpenNMT-py and Sockeye."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import yaml

from econmt.config.imports import import_configuration
from econmt.config.recipe import Recipe, load_recipe, parse_recipe
from econmt.errors import InputError
from tests.conftest import RunEconmt

JOEY = """
name: "toy"
joeynmt_version: "2.3.0"
data:
    train: toy/train
    dev: toy/dev
    test: toy/test
    dataset_type: "plain"
    src: {lang: de, max_length: 30, lowercase: True, level: bpe, voc_limit: 400, voc_file: toy/bpe.txt,
          tokenizer_type: subword-nmt, tokenizer_cfg: {num_merges: 200, codes: toy/bpe.codes, dropout: 0.1}}
    trg: {lang: en, max_length: 40, level: bpe, voc_limit: 400, voc_file: toy/bpe.txt,
          tokenizer_type: subword-nmt, tokenizer_cfg: {num_merges: 200, codes: toy/bpe.codes, dropout: 0.1}}
testing: {beam_size: 5, beam_alpha: 1.0, generate_unk: False, no_repeat_ngram_size: -1, repetition_penalty: -1,
          eval_metrics: [chrf], sacrebleu_cfg: {tokenize: intl}}
training:
    random_seed: 42
    optimizer: adam
    adam_betas: [0.9, 0.98]
    learning_rate: 0.005
    learning_rate_min: 0.0001
    clip_grad_val: 1.0
    batch_size: 10
    batch_type: token
    batch_multiplier: 2
    normalization: tokens
    scheduling: plateau
    patience: 5
    decrease_factor: 0.5
    updates: 100
    validation_freq: 10
    logging_freq: 20
    early_stopping_metric: ppl
    model_dir: toy_model
    use_cuda: False
    keep_best_ckpts: 3
    reset_best_ckpt: False
    strange_option: 7
model:
    initializer: "xavier_uniform"
    tied_embeddings: False
    tied_softmax: True
    lstm_forget_gate: 0.5
    encoder: {type: recurrent, rnn_type: gru, embeddings: {embedding_dim: 16, scale: False}, hidden_size: 32,
              bidirectional: True, dropout: 0.2, num_layers: 3}
    decoder: {type: recurrent, rnn_type: lstm, embeddings: {embedding_dim: 24, scale: True}, hidden_size: 40,
              dropout: 0.3, hidden_dropout: 0.1, num_layers: 1, input_feeding: True, init_hidden: zero,
              attention: luong}
"""
OPENNMT = """
save_model: run/model
data:
    europarl: {path_src: text/europarl.de-en.en, path_tgt: text/europarl.de-en.de,
               transforms: [sentencepiece, filtertoolong], weight: 3}
    news: {path_src: text/news.en, path_tgt: text/news.de, transforms: [sentencepiece, filtertoolong], weight: 1}
    valid: {path_src: text/valid.en, path_tgt: text/valid.de, transforms: [sentencepiece]}
src_subword_model: text/joint.model
tgt_subword_model: text/joint.model
src_seq_length: 150
tgt_seq_length: 120
share_vocab: True
encoder_type: brnn
rnn_type: LSTM
enc_layers: 2
dec_layers: 3
hidden_size: 64
word_vec_size: 32
tgt_word_vec_size: 64
global_attention: mlp
input_feed: 1
dropout: [0.2]
copy_attn: true
share_decoder_embeddings: true
param_init: 0.08
optim: adam
learning_rate: 0.002
adam_beta2: 0.998
decay_method: noam
warmup_steps: 6000
max_grad_norm: 0
label_smoothing: 0.1
batch_type: tokens
batch_size: 4096
normalization: tokens
accum_count: [3]
train_steps: 20000
valid_steps: 500
keep_checkpoint: 4
average_decay: 0.0005
seed: 1234
world_size: 2
gpu_ranks: [0, 1]
lambda_coverage: 0.5
"""


SOCKEYE = """
source: corpus/train.de
target: corpus/train.en
validation_source: corpus/dev.de
validation_target: corpus/dev.en
output: wmt_model
overwrite_output: false
prepared_data: null
source_vocab: null
target_vocab: null
shared_vocab: false
num_words: [30000, 20000]
word_min_count: [2, 1]
bucket_width: 8
max_seq_len: [60, 70]
encoder: rnn
decoder: rnn
num_layers: [2, 3]
num_embed: [256, 512]
rnn_cell_type: lstm
rnn_num_hidden: 512
rnn_residual_connections: true
rnn_first_residual_layer: 2
rnn_attention_type: coverage
rnn_attention_num_hidden: 128
rnn_attention_coverage_type: gru
rnn_attention_coverage_num_hidden: 5
rnn_attention_mhdot_heads: null
rnn_context_gating: true
rnn_decoder_state_init: avg
transformer_model_size: [512, 512]
weight_tying: true
weight_tying_type: src_trg_softmax
embed_dropout: [0.1, 0.2]
rnn_dropout_inputs: [0.3, 0.0]
rnn_dropout_states: [0.0, 0.1]
rnn_decoder_hidden_dropout: 0.2
rnn_h2h_init: orthogonal
optimizer: adam
optimizer_params: null
initial_learning_rate: 0.0002
learning_rate_scheduler_type: plateau-reduce
learning_rate_reduce_factor: 0.7
learning_rate_reduce_num_not_improved: 8
gradient_clipping_type: abs
gradient_clipping_threshold: 1.0
batch_type: word
batch_size: 4096
checkpoint_frequency: 4000
max_num_checkpoint_not_improved: 32
max_updates: 90000
min_num_epochs: 1
decode_and_evaluate: 500
keep_last_params: -1
seed: 13
use_cpu: true
min_samples: 10
"""


def imported(folder: Path, text: str) -> tuple[Recipe, dict[str, str]]:
    file = folder / "theirs.yaml"
    file.write_text(text)
    made = import_configuration(file)
    return parse_recipe(made.text, "made"), {remark.key: remark.text for remark in made.remarks}


def changed(text: str, **values: Any) -> str:
    """A configuration with other values at keys whose parts are joined by two underscores; None removes them."""
    tree = yaml.safe_load(text)
    for key, value in values.items():
        *path, name = key.split("__")
        section = tree
        for part in path:
            section = section[part]
        section.pop(name, None)
        if value is not None:
            section[name] = value
    return yaml.safe_dump(json.loads(json.dumps(tree)))  # without aliases


def test_joey(tmp_path: Path) -> None:
    recipe, remarks = imported(tmp_path, JOEY)
    data, model, training = recipe.pairs, recipe.translation_model, recipe.training
    assert (recipe.name, recipe.output) == ("toy", "toy_model")
    assert (data.source, data.target, data.train, data.valid, data.test) == (
        "de", "en", ["toy/train"], "toy/dev", "toy/test",
    )  # fmt: skip
    assert data.max_length == 40
    subwords: Any = data.subwords
    assert (subwords.type, subwords.size, subwords.joint) == ("codes", 400, True)
    assert subwords.files == ["toy/bpe.codes"]
    assert (model.encoder.cell, model.encoder.size, model.encoder.layers) == ("gru", 64, 3)
    assert model.encoder.bidirectional == "all"
    assert (model.decoder.cell, model.decoder.size, model.decoder.state_init) == ("lstm", 40, "zero")
    assert model.embedding_widths == (16, 24)
    assert model.dropouts.embeddings == (0.2, 0.3)
    assert model.dropouts.stacks == (0.2, 0.0)
    assert model.dropouts.output == 0.1
    assert (model.attention.type, model.weight_tying) == ("bilinear", "trg_softmax")
    assert model.initialization.forget_bias == 0.5
    assert (training.optimizer.name, training.optimizer.betas) == ("adam", (0.9, 0.98))
    assert training.optimizer.learning_rate == 0.005
    schedule = training.schedule
    assert (schedule.name, schedule.reduce_factor, schedule.reduce_num_not_improved) == (
        "plateau-reduce",
        0.5,
        6,
    )
    assert (training.gradient_clipping.type, training.gradient_clipping.threshold) == ("value", 1.0)
    assert (training.batch.type, training.batch.size, training.update_interval) == ("word", 10, 2)
    assert (training.max_updates, training.max_epochs, training.checkpoint_interval) == (100, None, 10)
    assert (training.log_interval, training.seed, training.device) == (20, 42, "cpu")
    assert training.early_stopping.metric == "perplexity"
    assert training.early_stopping.max_num_checkpoint_not_improved is None
    assert (training.bleu_tokenizer, training.keep_last_params) == ("intl", 3)
    assert (recipe.decoding.beam_size, recipe.decoding.ban_unk) == (5, True)
    assert (recipe.decoding.length_penalty_alpha, recipe.decoding.length_penalty_beta) == (1.0, 5.0)
    assert remarks == {
        "data.src.lowercase": "true: lowercase the files; text is used as it is",
        "data.src.tokenizer_cfg.dropout": "0.1: needs data.subwords.type bpe",
        "model.decoder.embeddings.scale": "True has no counterpart",
        "training.strange_option": "7 has no counterpart",
    }


def test_joey_version_1(tmp_path: Path) -> None:
    text = """
name: old
data: {src: de, trg: en, train: a/train.bpe, dev: a/dev.bpe, level: bpe, max_sent_length: 62,
       src_voc_limit: 32000, trg_voc_limit: 16000, src_voc_min_freq: 2}
testing: {beam_size: 3, alpha: -1}
training: {optimizer: adam, learning_rate: 0.0002, epochs: 10, batch_size: 80, early_stopping_metric: eval_metric,
           eval_metric: chrf, model_dir: models/old}
model:
  encoder: {rnn_type: lstm, embeddings: {embedding_dim: 62}, hidden_size: 50, bidirectional: False}
  decoder: {rnn_type: gru, embeddings: {embedding_dim: 62}, hidden_size: 100, attention: bahdanau}
"""
    recipe, remarks = imported(tmp_path, text)
    subwords: Any = recipe.pairs.subwords
    assert (subwords.type, subwords.source, subwords.target, subwords.min_count) == ("words", 32000, 16000, 2)
    assert recipe.translation_model.encoder.size == 50
    assert (recipe.translation_model.attention.type, recipe.translation_model.attention.size) == (
        "additive",
        100,
    )
    assert (recipe.training.max_epochs, recipe.training.gradient_clipping.type) == (10, "none")
    assert recipe.training.early_stopping.metric == "chrf"
    assert recipe.decoding.length_penalty_alpha == 0.0
    assert set(remarks) == {"data.level", "training.normalization"}


@pytest.mark.parametrize(
    ("values", "key", "expected"),
    [
        (
            {"training__scheduling": "noam", "training__learning_rate_factor": 2},
            "training.schedule.warmup",
            4000,
        ),
        (
            {"training__scheduling": "noam", "training__learning_rate_factor": 2},
            "training.optimizer.learning_rate",
            2.0,
        ),
        ({"model__tied_embeddings": True}, "model.weight_tying", "src_trg_softmax"),
        ({"model__initializer": "uniform", "model__init_weight": 0.02}, "model.initialization.scale", 0.02),
        (
            {"data__src__level": "word", "data__trg__level": "word"},
            "data.subwords.lists",
            ["toy/bpe.txt"] * 2,
        ),
    ],
)
def test_joey_values(tmp_path: Path, values: dict[str, Any], key: str, expected: object) -> None:
    if values.get("model__tied_embeddings"):
        values = {**values, "model__decoder__embeddings__embedding_dim": 16}
    found: Any = imported(tmp_path, changed(JOEY, **values))[0]
    for part in key.split("."):
        found = getattr(found, part)
    assert found == expected


def test_joey_with_a_sentencepiece_model(tmp_path: Path) -> None:
    side = {"level": "bpe", "tokenizer_type": "sentencepiece", "tokenizer_cfg": {"model_file": "sp.model"}}
    text = changed(JOEY, data__src={"lang": "de", **side}, data__trg={"lang": "en", **side})
    subwords: Any = imported(tmp_path, text)[0].pairs.subwords
    assert (subwords.type, subwords.models, subwords.joint) == ("unigram", ["sp.model"], True)


def test_opennmt_with_codes_of_subword_nmt(tmp_path: Path) -> None:
    divided = {f"data__{side}__transforms": ["bpe"] for side in ("europarl", "news", "valid")}
    text = changed(OPENNMT, **divided, src_subword_model="bpe.codes", tgt_subword_model="bpe.codes")
    subwords: Any = imported(tmp_path, text)[0].pairs.subwords
    assert (subwords.type, subwords.files, subwords.joint) == ("codes", ["bpe.codes"], True)


def test_opennmt(tmp_path: Path) -> None:
    recipe, remarks = imported(tmp_path, OPENNMT)
    data, model, training = recipe.pairs, recipe.translation_model, recipe.training
    assert (recipe.name, recipe.output, data.source, data.target) == ("model", "run/model", "en", "de")
    assert (data.train, data.valid) == (["text/europarl.de-en", "text/news"], "text/valid")
    assert (data.mixing.weights, data.max_length) == ([[3.0, 1.0]], 150)
    subwords: Any = data.subwords
    assert (subwords.type, subwords.models, subwords.joint) == ("unigram", ["text/joint.model"], True)
    assert (model.encoder.size, model.encoder.layers, model.encoder.bidirectional) == (64, 2, "all")
    assert (model.decoder.layers, model.embedding_widths) == (3, (32, 64))
    assert (model.attention.type, model.attention.size) == ("additive", 64)
    assert (model.decoder.copy_attention, model.weight_tying) == (True, "trg_softmax")
    assert (model.dropouts.layers, model.dropouts.output, model.dropouts.embedding) == (0.2, 0.2, 0.0)
    assert (model.initialization.weights, model.initialization.scale) == ("uniform", 0.08)
    assert (training.schedule.name, training.schedule.warmup) == ("noam", 6000)
    assert training.optimizer.betas == (0.9, 0.998)
    assert training.gradient_clipping.type == "none"
    assert (training.batch.type, training.batch.size, training.update_interval) == ("word", 4096, 3)
    assert (training.max_updates, training.checkpoint_interval) == (20000, 500)
    assert (training.averaging.start, training.averaging.decay) == ("at-once", 0.9995)
    assert remarks == {
        "src_subword_model": "set data.subwords.type to bpe if the model is of that type",
        "world_size": "2: run econmt train with --processes 2",
        "lambda_coverage": "0.5 has no counterpart",
    }


def test_vocabularies_of_words_that_are_shared(tmp_path: Path) -> None:
    words = {f"data__{side}__transforms": ["filtertoolong"] for side in ("europarl", "news", "valid")}
    recipe, remarks = imported(tmp_path, changed(OPENNMT, **words, src_vocab_size=900, tgt_vocab_size=700))
    subwords: Any = recipe.pairs.subwords
    assert (subwords.type, subwords.source, subwords.joint, subwords.copies) == ("words", 900, True, 50)
    assert recipe.translation_model.decoder.copy_attention
    assert "share_vocab" not in remarks
    side = {"lang": "de", "level": "word", "voc_file": "both.txt"}
    tied = {"model__tied_embeddings": True, "model__decoder__embeddings__embedding_dim": 16}
    joey, _ = imported(tmp_path, changed(JOEY, data__src=side, data__trg={**side, "lang": "en"}, **tied))
    subwords = joey.pairs.subwords
    assert (subwords.joint, subwords.lists) == (True, ["both.txt"])
    assert joey.translation_model.weight_tying.startswith("src_trg")
    other, remarks = imported(
        tmp_path, changed(JOEY, data__src=side, data__trg={**side, "lang": "en", "voc_file": "b.txt"}, **tied)
    )
    assert not other.translation_model.weight_tying.startswith("src_trg")
    assert "model.tied_embeddings" in remarks


def test_opennmt_defaults_and_other_file_names(tmp_path: Path) -> None:
    text = """
data:
    corpus_1: {path_src: data/src-train.txt, path_tgt: data/tgt-train.txt}
    valid: {path_src: data/src-val.txt, path_tgt: data/tgt-val.txt}
train_steps: 90000
"""
    recipe, remarks = imported(tmp_path, text)
    assert (recipe.pairs.source, recipe.pairs.target, recipe.pairs.train) == ("src", "tgt", ["corpus_1"])
    assert (
        remarks["data.corpus_1"]
        == "link data/src-train.txt and data/tgt-train.txt to corpus_1.src and corpus_1.tgt"
    )
    assert remarks["data.valid"] == "link data/src-val.txt and data/tgt-val.txt to valid.src and valid.tgt"
    subwords: Any = recipe.pairs.subwords
    assert (subwords.type, subwords.source, subwords.target) == ("words", 32768, 32768)
    model, training = recipe.translation_model, recipe.training
    assert (model.encoder.size, model.encoder.layers, model.encoder.bidirectional) == (500, 2, "none")
    assert (model.attention.type, model.dropouts.output) == ("bilinear", 0.3)
    assert (training.optimizer.name, training.optimizer.learning_rate) == ("sgd", 1.0)
    # Halved at updates 50,000, 60,000, ...
    schedule = training.schedule
    assert (schedule.name, schedule.decay_start, schedule.decay_interval) == ("step", 40_000, 10_000)
    assert training.gradient_clipping.threshold == 5.0


def test_sockeye(tmp_path: Path) -> None:
    recipe, remarks = imported(tmp_path, SOCKEYE)
    data, model, training = recipe.pairs, recipe.translation_model, recipe.training
    assert (recipe.name, data.source, data.target, data.train, data.valid) == (
        "wmt_model", "de", "en", ["corpus/train"], "corpus/dev",
    )  # fmt: skip
    subwords: Any = data.subwords
    assert (subwords.type, subwords.source, subwords.target, subwords.min_count) == ("words", 30000, 20000, 2)
    assert (data.max_length, training.bucket_width) == (70, 8)
    assert (model.encoder.layers, model.decoder.layers, model.encoder.bidirectional) == (2, 3, "bottom")
    assert (model.encoder.size, model.decoder.size, model.embedding_widths) == (512, 512, (256, 512))
    assert (model.encoder.residual, model.decoder.residual) == (True, True)
    assert (model.attention.type, model.attention.size) == ("additive", 128)
    assert (model.attention.coverage.type, model.attention.coverage.num_hidden) == ("gru", 5)
    assert (model.decoder.context_gating, model.decoder.state_init) == (True, "avg")
    assert (model.dropouts.embeddings, model.dropouts.stacks) == ((0.1, 0.2), (0.3, 0.0))
    assert model.dropouts.output == 0.2
    assert (model.weight_tying, model.initialization.rnn_h2h) == ("trg_softmax", "orthogonal")
    assert (training.optimizer.learning_rate, training.schedule.reduce_num_not_improved) == (0.0002, 8)
    assert (training.gradient_clipping.type, training.batch.type, training.batch.size) == (
        "value",
        "word",
        4096,
    )
    assert (training.max_updates, training.min_epochs, training.checkpoint_interval) == (90000, 1, 4000)
    assert (training.early_stopping.max_num_checkpoint_not_improved, training.seed) == (32, 13)
    assert (training.decode_and_evaluate, training.device) == (500, "cpu")
    assert remarks == {
        "rnn_dropout_states": "[0.0, 0.1] has no counterpart",
        "weight_tying_type": "src_trg_softmax: vocabularies that differ are not shared; the target's is tied",
        "min_samples": "10 has no counterpart",
    }


def test_sockeye_with_prepared_data(tmp_path: Path) -> None:
    text = changed(
        SOCKEYE, source=None, target=None, prepared_data="prep", rnn_attention_type="dot", num_layers=1
    )
    recipe, remarks = imported(tmp_path, text)
    assert recipe.pairs.train == ["train"]
    assert remarks["source"] == "prep is not read: link the text to train.src and train.trg"
    assert recipe.translation_model.attention.type == "dot"
    assert (recipe.translation_model.encoder.layers, recipe.translation_model.encoder.residual) == (1, False)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            changed(JOEY, model__encoder__type="transformer"),
            "model.encoder.type: transformer; econmt trains recurrent",
        ),
        (changed(JOEY, data__src__level="char"), "data.src.level: char has no counterpart"),
        (
            changed(JOEY, model__encoder__hidden_size="many"),
            "model.encoder.hidden_size: expected a number, found 'many'",
        ),
        (
            changed(JOEY, training__learning_rate=-1),
            "as a recipe: training.optimizer.learning_rate: must be more than 0",
        ),
        (
            changed(OPENNMT, encoder_type="transformer"),
            "encoder_type transformer, decoder_type rnn; econmt trains",
        ),
        (
            changed(SOCKEYE, encoder="transformer"),
            "encoder: transformer; econmt trains recurrent models only",
        ),
        (changed(OPENNMT, data__news={"path_src": "a.en"}), "neither|data.news: needs path_src and path_tgt"),
        ("a: 1\n", "neither a configuration of Joey NMT"),
        ("- 1\n", "expected keys and values at the top"),
        ("", "expected keys and values at the top"),
        ("a: [\n", "not valid YAML"),
    ],
)
def test_configurations_that_cannot_be_used(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        imported(tmp_path, text)


def leaves_of(tree: Any) -> list[tuple[str, ...]]:
    if not isinstance(tree, dict):
        return [()]
    return [(key, *rest) for key, value in tree.items() for rest in [(), *leaves_of(value)]]


@pytest.mark.parametrize("number", range(60))
def test_odd_values_are_refused_in_a_line_or_remarked(tmp_path: Path, number: int) -> None:
    draw = random.Random(number)
    text = (JOEY, OPENNMT, SOCKEYE)[number % 3]
    tree = yaml.safe_load(text)
    for _ in range(2):
        *path, name = draw.choice(leaves_of(tree))
        section = tree
        for part in path:
            section = section.get(part) if isinstance(section, dict) else {}
        if isinstance(section, dict):
            section[name] = draw.choice([None, "x", [], {}, ["a"], [1, 2], -1, True, 10**12, 0.5, {"a": 1}])
    lines: list[str] = []
    try:
        imported(tmp_path, yaml.safe_dump(json.loads(json.dumps(tree))))
    except InputError as error:
        lines += error.lines
    assert all(line.startswith(str(tmp_path / "theirs.yaml")) for line in lines)


def test_the_command(run_econmt: RunEconmt, tmp_path: Path) -> None:
    (tmp_path / "joey.yaml").write_text(JOEY)
    done = run_econmt(["recipes", "import", "joey.yaml"])
    assert done.stdout == "joey.recipe.yaml\n"
    assert "econmt: note: training.strange_option: 7 has no counterpart\n" in done.stderr
    text = (tmp_path / "joey.recipe.yaml").read_text()
    assert text.startswith("# toy, made of Joey NMT's joey.yaml.\n")
    assert "# training.strange_option: 7 has no counterpart\n" in text
    assert load_recipe(tmp_path / "joey.recipe.yaml").name == "toy"
    again = run_econmt(["recipes", "import", "joey.yaml"])
    assert (again.returncode, again.stdout) == (2, "")
    assert "exists already" in again.stderr
    assert run_econmt(["recipes", "import", "joey.yaml", "--force"]).returncode == 0
    absent = run_econmt(["recipes", "import", "absent.yaml"])
    assert absent.stderr == "econmt: error: absent.yaml: cannot be read: No such file or directory\n"
