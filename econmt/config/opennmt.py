"""Configurations of OpenNMT-py as recipes."""

from __future__ import annotations

from pathlib import PurePath
from typing import Any

from econmt.config.foreign_settings import ForeignSettings, common_prefix, tying
from econmt.errors import InputError

_IRRELEVANT = frozenset(
    {
        "save_data", "overwrite", "num_workers", "gpu_ranks", "bucket_size", "pool_factor", "prefetch_factor",
        "batch_size_multiple", "vocab_size_multiple", "valid_batch_size", "max_generator_batches", "n_sample",
        "skip_empty_level", "log_file", "tensorboard", "tensorboard_log_dir", "exp", "exp_host", "queue_size",
        "bucket_size_init", "bucket_size_increment", "subword_nbest", "src_subword_nbest", "tgt_subword_nbest",
        "src_subword_type", "tgt_subword_type", "accum_steps", "dropout_steps", "model_dtype", "apex_opt_level",
        "dump_samples", "dump_fields", "dump_transforms", "valid_metrics", "report_stats_from_parameters",
        "model_task", "save_format", "seed_config", "early_stopping_criteria", "reuse_copy_attn",
    }
)  # fmt: skip
_COPIES = 50
"""Entries for unknown words of a sentence, which OpenNMT-py does not limit."""
_SUBWORDS = {"sentencepiece", "bpe", "onmt_tokenize"}


def import_opennmt(tree: dict[str, Any], where: str) -> ForeignSettings:
    """Converts a configuration of OpenNMT-py; ``where`` is its name in errors.

    Raises:
        InputError: The model is not recurrent, or the configuration names no training text.
    """
    corpora = tree.get("data")
    if not isinstance(corpora, dict):
        raise InputError(f"{where}: data: expected the corpora, each with path_src and path_tgt")
    settings = ForeignSettings({key: value for key, value in tree.items() if key != "data"}, where)
    _corpora(settings, corpora)
    _model(settings)
    _training(settings)
    settings.finish(_IRRELEVANT)
    return settings


def _corpora(settings: ForeignSettings, corpora: dict[str, Any]) -> None:
    """Converts the corpora; files that are not named PREFIX.SOURCE and PREFIX.TARGET are to be linked so."""
    keep = settings.keep
    output = settings.text("save_model", default="runs/opennmt") or "runs/opennmt"
    keep("name", PurePath(output).name)
    keep("output", output)
    files = {}
    for name, corpus in corpora.items():
        if not isinstance(corpus, dict) or not {"path_src", "path_tgt"} <= corpus.keys():
            raise InputError(f"{settings.where}: data.{name}: needs path_src and path_tgt")
        files[name] = str(corpus["path_src"]), str(corpus["path_tgt"])
    if set(files) <= {"valid"}:
        raise InputError(f"{settings.where}: data: has no training corpus")
    named = {name: common_prefix(*paths) for name, paths in files.items()}
    languages = {None if each is None else each[1:] for each in named.values()}
    source, target = (languages.pop() or ("src", "tgt")) if len(languages) == 1 else ("src", "tgt")
    prefixes = {}
    for name, found in named.items():
        prefixes[name] = name if found is None or found[1:] != (source, target) else found[0]
        if prefixes[name] == name:
            settings.remark(
                f"data.{name}", f"link {' and '.join(files[name])} to {name}.{source} and {name}.{target}"
            )
    keep("data.source", source)
    keep("data.target", target)
    training = [name for name in corpora if name != "valid"]
    keep("data.train", [prefixes[name] for name in training])
    if "valid" not in corpora:
        settings.remark("data.valid", "missing; a recipe needs validation text: set data.valid")
    keep("data.valid", prefixes.get("valid", "valid"))
    weights = [
        float(settings.checked(f"data.{name}.weight", corpora[name].get("weight", 1))) for name in training
    ]
    if len(set(weights)) > 1:
        keep("data.mixing.weights", [weights])
    common = settings.take("transforms", default=[])
    lists = [corpora[name].get("transforms") or common for name in training]
    if not all(isinstance(each, list) for each in lists):
        raise InputError(f"{settings.where}: transforms: expected a list, as [sentencepiece, filtertoolong]")
    transforms = {str(name) for each in lists for name in each}
    for each in sorted(transforms - {"filtertoolong", *_SUBWORDS}):
        settings.remark("transforms", f"{each} has no counterpart")
    for name, corpus in corpora.items():
        for key in corpus.keys() - {"path_src", "path_tgt", "weight", "transforms"}:
            settings.remark(f"data.{name}.{key}", f"{corpus[key]} has no counterpart")
    lengths = [settings.number(f"{side}_seq_length", default=192) for side in ("src", "tgt")]
    keep("data.max_length", max(lengths) if "filtertoolong" in transforms else 10_000)
    keep("data.empty_lines", "skip")
    _vocabulary(settings, transforms)


def _vocabulary(settings: ForeignSettings, transforms: set[str]) -> None:
    keep, number = settings.keep, settings.number
    sizes = [int(number(f"{side}_vocab_size", default=32768)) for side in ("src", "tgt")]
    counts = [int(number(f"{side}_words_min_frequency", default=0)) for side in ("src", "tgt")]
    files = [settings.text(f"{side}_vocab") for side in ("src", "tgt")]
    models = [settings.text(f"{side}_subword_model") for side in ("src", "tgt")]
    alpha = number("subword_alpha", "src_subword_alpha", default=0)
    settings.take("tgt_subword_alpha")
    joint, copying = bool(settings.take("share_vocab")), bool(settings.take("copy_attn"))
    keep("model.decoder.copy_attention", copying)
    if not transforms & _SUBWORDS:
        keep("data.subwords.type", "words")
        keep("data.subwords.source", sizes[0])
        keep("data.subwords.min_count", max(1, *counts))
        keep("data.subwords.target", sizes[1])
        if joint or copying:
            settings.share_words()
            keep("data.subwords.copies", _COPIES if copying else None)
            if not joint:
                settings.remark("copy_attn", "true: the vocabulary is one of both languages")
    elif "sentencepiece" in transforms and models[0]:
        both = [models[0], models[1] or models[0]]
        keep("data.subwords.type", "unigram")
        keep("data.subwords.joint", both[0] == both[1])
        keep("data.subwords.models", list(dict.fromkeys(both)))
        settings.remark("src_subword_model", "set data.subwords.type to bpe if the model is of that type")
        if alpha:
            settings.remark(
                "src_subword_alpha", f"{alpha}: drawing segmentations needs data.subwords.type bpe"
            )
    elif "bpe" in transforms and models[0]:
        both = [models[0], models[1] or models[0]]
        keep("data.subwords.type", "codes")
        keep("data.subwords.joint", joint and both[0] == both[1])
        keep("data.subwords.files", list(dict.fromkeys(both)))
        keep("data.subwords.size", sizes[0])
        keep("data.subwords.min_count", max(1, *counts))
        if alpha:
            settings.remark("src_subword_alpha", f"{alpha}: skipping merges needs data.subwords.type bpe")
    else:
        keep("data.subwords.type", "bpe")
        keep("data.subwords.joint", joint)
        keep("data.subwords.size", sizes[0])
        keep("data.subwords.dropout", float(alpha) if alpha else None)
        settings.remark(
            "transforms", "subwords without a model: BPE is learnt anew from the text, by SentencePiece"
        )
    if files[0] and not transforms & _SUBWORDS:
        settings.remark(
            "src_vocab", f"{files[0]}: learnt anew; to use it set data.subwords.lists to both files"
        )


def _model(settings: ForeignSettings) -> None:
    keep, take, number = settings.keep, settings.take, settings.number
    kinds = str(take("encoder_type", default="rnn")), str(take("decoder_type", default="rnn"))
    if kinds[0] not in ("rnn", "brnn") or kinds[1] != "rnn":
        raise InputError(
            f"{settings.where}: encoder_type {kinds[0]}, decoder_type {kinds[1]}; econmt trains recurrent models only"
        )
    cell = settings.choose("rnn_type", {"LSTM": "lstm", "GRU": "gru", "SRU": "sru"}, "LSTM")
    size = number("hidden_size", "rnn_size", default=500)
    layers = number("layers", default=2)
    for part, short in (("encoder", "enc"), ("decoder", "dec")):
        keep(f"model.{part}.cell", cell)
        keep(f"model.{part}.size", number(f"{short}_hid_size", f"{short}_rnn_size", default=size))
        keep(f"model.{part}.layers", number(f"{short}_layers", default=layers))
    keep("model.encoder.bidirectional", "all" if kinds[0] == "brnn" else "none")
    width = number("word_vec_size", default=500)
    keep("model.source_embedding", number("src_word_vec_size", default=width))
    keep("model.target_embedding", number("tgt_word_vec_size", default=width))
    keep("model.decoder.input_feeding", bool(take("input_feed", default=1)))
    attention = settings.choose(
        "global_attention", {"general": "bilinear", "mlp": "additive", "dot": "dot"}, "general"
    )
    keep("model.attention.type", attention)
    keep("model.attention.size", settings.recipe["model.decoder.size"] if attention == "additive" else None)
    settings.choose("global_attention_function", {"softmax": "softmax"}, "softmax")
    if take("coverage_attn"):
        keep("model.attention.coverage.type", "count")
        settings.remark(
            "coverage_attn", "true: the sum of the attention (count) enters an additive attention"
        )
    gate = settings.choose(
        "context_gate", {"None": False, "both": True, "source": True, "target": True}, "None"
    )
    keep("model.decoder.context_gating", gate)
    take("bridge")
    keep("model.decoder.state_init", "last")
    keep("model.weight_tying", tying(bool(take("share_embeddings")), bool(take("share_decoder_embeddings"))))
    dropout = float(number("dropout", default=0.3))
    many = max(settings.recipe["model.encoder.layers"], settings.recipe["model.decoder.layers"]) > 1
    keep("model.dropout.layers", dropout if many else None)
    keep("model.dropout.output", dropout)
    scale, glorot = float(number("param_init", default=0.1)), bool(take("param_init_glorot"))
    if scale > 0.0 and not glorot:
        keep("model.initialization.weights", "uniform")
        keep("model.initialization.scale", scale)
    keep("model.initialization.source_embedding", settings.text("src_embeddings", "both_embeddings"))
    keep("model.initialization.target_embedding", settings.text("tgt_embeddings"))


def _training(settings: ForeignSettings) -> None:
    keep, take, number = settings.keep, settings.take, settings.number
    names = {name: name for name in ("sgd", "adagrad", "adadelta", "adam", "adafactor")} | {
        "fusedadam": "adam"
    }
    optimizer = settings.choose("optim", names, "sgd")
    keep("training.optimizer.name", optimizer)
    keep("training.optimizer.learning_rate", float(number("learning_rate", default=1.0)))
    betas = [float(number("adam_beta1", default=0.9)), float(number("adam_beta2", default=0.999))]
    keep("training.optimizer.betas", betas if optimizer == "adam" else None)
    updates = int(number("train_steps", default=100_000))
    keep("training.max_updates", updates)
    settings.recipe["training.early_stopping.max_num_checkpoint_not_improved"] = (
        int(number("early_stopping", default=0)) or None
    )
    schedules = {"none": "none", "noam": "noam", "rsqrt": "inverse-sqrt"}
    schedule = settings.choose("decay_method", schedules, "none")
    warmup = int(number("warmup_steps", default=4000))
    start, interval = number("start_decay_steps", default=50_000), int(number("decay_steps", default=10_000))
    factor = number("learning_rate_decay", default=0.5)
    if schedule == "none" and start < updates:
        # The first reduction is that at the start; here it comes an interval after it.
        keep("training.schedule.name", "step")
        keep("training.schedule.decay_start", max(0, int(start) - interval))
        keep("training.schedule.decay_interval", interval)
        keep("training.schedule.reduce_factor", float(factor))
    elif schedule != "none":
        keep("training.schedule.name", schedule)
        keep("training.schedule.warmup", max(1, warmup))
    norm = float(number("max_grad_norm", default=5.0))
    keep("training.gradient_clipping.type", "norm" if norm > 0.0 else "none")
    keep("training.gradient_clipping.threshold", norm if norm > 0.0 else None)
    keep("training.label_smoothing", float(number("label_smoothing", default=0.0)))
    words = str(take("batch_type", default="sents")).startswith("tok")
    keep("training.batch.type", "word" if words else "sentence")
    keep("training.batch.size", number("batch_size", default=64))
    keep("training.update_interval", number("accum_count", default=1))
    keep("training.checkpoint_interval", int(number("valid_steps", "save_checkpoint_steps", default=10_000)))
    take("save_checkpoint_steps")
    keep("training.log_interval", int(number("report_every", default=50)))
    kept = number("keep_checkpoint", default=-1)
    keep("training.keep_last_params", int(kept) if kept > 0 else None)
    decay = float(number("average_decay", default=0.0))
    if decay > 0.0:
        keep("training.averaging.start", "at-once")
        keep("training.averaging.decay", 1.0 - decay)
    seed = int(number("seed", default=-1))
    keep("training.seed", seed if seed >= 0 else None)
    if load := settings.text("train_from"):
        settings.remark("train_from", f"{load}: models of other toolkits cannot be loaded")
    if take("normalization", default="sents") != "tokens":
        settings.remark("normalization", "the loss is a mean over target tokens, as with tokens")
    processes = int(number("world_size", default=1))
    if processes > 1:
        settings.remark("world_size", f"{processes}: run econmt train with --processes {processes}")
