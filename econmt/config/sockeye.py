"""The file ``args.yaml`` of a model folder of Sockeye 1 or 2 as a recipe."""

from __future__ import annotations

from pathlib import PurePath
from typing import Any

from econmt.config.foreign_settings import ForeignSettings, common_prefix
from econmt.errors import InputError

_IRRELEVANT = frozenset(
    {
        "overwrite_output", "no_bucketing", "quiet", "device_ids", "disable_device_locking", "lock_dir", "kvstore",
        "gradient_compression_threshold", "fill_up", "loss", "metrics", "monitor_stat_func", "omp_num_threads",
        "loss_normalization_type", "max_num_epochs_default", "conv_embed_max_filter_width", "loglevel",
        "weight_init_xavier_rand_type", "weight_init_xavier_factor_type", "embed_weight_init", "env",
        "learning_rate_half_life", "learning_rate_decay_param_reset", "decode_and_evaluate_use_cpu", "shared_vocab",
        "learning_rate_decay_optimizer_states_reset", "cache_last_best_params", "cache_metric", "params",
        "allow_missing_params", "ignore_extra_params", "round_batch_sizes_to_multiple_of", "bucket_scaling",
    }
)  # fmt: skip
_OTHER_MODELS = ("transformer_", "cnn_", "conv_embed_", "image_", "amp", "horovod", "kvstore")


def import_sockeye(tree: dict[str, Any], where: str) -> ForeignSettings:
    """Converts the arguments of ``sockeye-train``; ``where`` is their file in errors.

    Raises:
        InputError: The model is not recurrent.
    """
    named = {key.replace("-", "_"): value for key, value in tree.items()}
    settings = ForeignSettings(
        {key: value for key, value in named.items() if not key.startswith(_OTHER_MODELS)}, where
    )
    for part in ("encoder", "decoder"):
        kind = settings.take(part, default="transformer")
        if kind not in ("rnn", "rnn-with-conv-embed"):
            raise InputError(f"{where}: {part}: {kind}; econmt trains recurrent models only")
    _data(settings)
    _model(settings)
    _training(settings)
    settings.finish(_IRRELEVANT)
    return settings


def _data(settings: ForeignSettings) -> None:
    keep, text = settings.keep, settings.text
    output = text("output", default="runs/sockeye") or "runs/sockeye"
    keep("name", PurePath(output).name)
    keep("output", output)
    prepared = text("prepared_data")
    languages: tuple[str, str] | None = None
    for key, prefix in (("data.train", ""), ("data.valid", "validation_")):
        files = [text(f"{prefix}{side}") for side in ("source", "target")]
        name = key.removeprefix("data.")
        found = common_prefix(files[0], files[1]) if files[0] and files[1] else None
        if found is None or (languages or found[1:]) != found[1:]:
            why = (
                f"link {' and '.join(filter(None, files))}"
                if any(files)
                else f"{prepared} is not read: link the text"
            )
            source, target = languages or ("src", "trg")
            settings.remark(f"{prefix}source", f"{why} to {name}.{source} and {name}.{target}")
        else:
            languages, name = found[1:], found[0]
        keep(key, [name] if key == "data.train" else name)
    keep("data.source", (languages or ("src", "trg"))[0])
    keep("data.target", (languages or ("src", "trg"))[1])
    keep("data.max_length", max(settings.pair("max_seq_len", 99)))
    lists = [text(f"{side}_vocab") for side in ("source", "target")]
    sizes = settings.pair("num_words", 50_000)
    count = max(settings.pair("word_min_count", 1))
    keep("data.subwords.type", "words")
    if all(lists):
        keep("data.subwords.lists", lists)
    else:
        keep("data.subwords.source", sizes[0] or 10_000_000)
        keep("data.subwords.target", sizes[1] or 10_000_000)
        keep("data.subwords.min_count", count)
    keep("training.bucket_width", settings.number("bucket_width", default=10))


def _model(settings: ForeignSettings) -> None:
    keep, take = settings.keep, settings.take
    cells = {name: name for name in ("lstm", "lnlstm", "lnglstm", "gru")}
    cell, size = (
        settings.choose("rnn_cell_type", cells, "lstm"),
        settings.number("rnn_num_hidden", default=1024),
    )
    layers, residual = settings.pair("num_layers", 1), bool(take("rnn_residual_connections"))
    first = settings.number("rnn_first_residual_layer", default=2)
    if residual and first != 2:
        settings.remark("rnn_first_residual_layer", f"{first} has no counterpart; 2 is used instead")
    dropouts = {
        "encoder_layers": "rnn_dropout_inputs", "source_embedding": "embed_dropout",
    }  # fmt: skip
    values = {name: [float(each) for each in settings.pair(key, 0.0)] for name, key in dropouts.items()}
    for number, part in enumerate(("encoder", "decoder")):
        keep(f"model.{part}.cell", cell)
        keep(f"model.{part}.size", size)
        keep(f"model.{part}.layers", layers[number])
        keep(f"model.{part}.residual", (residual and layers[number] > 1) or None)
        keep(f"model.dropout.{part}_layers", values["encoder_layers"][number])
        side = ("source", "target")[number]
        keep(f"model.dropout.{side}_embedding", values["source_embedding"][number])
    widths = settings.pair("num_embed", 512)
    keep("model.source_embedding", widths[0])
    keep("model.target_embedding", widths[1])
    for name in ("rnn_dropout_states", "rnn_dropout_recurrent"):
        if any(within := settings.pair(name, 0.0)):
            settings.remark(name, f"{within} has no counterpart")
    keep("model.dropout.output", float(settings.number("rnn_decoder_hidden_dropout", default=0.0)))
    if take("rnn_encoder_reverse_input") and layers[0] > 1:
        keep("model.encoder.reverse_input", True)
    kinds = {"mlp": "additive", "coverage": "additive"}
    kinds |= {name: name for name in ("dot", "bilinear")}
    named = str(settings.take("rnn_attention_type", default="mlp"))
    if named not in kinds:
        settings.remark("rnn_attention_type", f"{named} has no counterpart; mlp is used instead")
    kind = kinds.get(named, "additive")
    scaled = take("rnn_scale_dot_attention") and kind == "dot"
    keep("model.attention.type", "scaled_dot" if scaled else kind)
    keep("model.attention.size", settings.number("rnn_attention_num_hidden") or size)
    coverage, hidden = settings.text("rnn_attention_coverage_type"), take("rnn_attention_coverage_num_hidden")
    if named == "coverage":
        keep("model.attention.coverage.type", coverage or "count")
        keep("model.attention.coverage.num_hidden", hidden)
    keep("model.decoder.context_gating", bool(take("rnn_context_gating")))
    keep("model.decoder.state_init", settings.text("rnn_decoder_state_init", default="last") or "zero")
    normal = bool(take("layer_normalization"))
    keep("model.layer_normalization", normal)
    keep("model.attention.layer_norm", normal and kind == "additive")
    tied = str(take("weight_tying_type", default="trg_softmax")) if take("weight_tying") else "none"
    if tied.startswith("src_trg") and not settings.share_words():
        settings.remark(
            "weight_tying_type", f"{tied}: vocabularies that differ are not shared; the target's is tied"
        )
        tied = "trg_softmax" if tied.endswith("softmax") else "none"
    keep("model.weight_tying", tied)
    weights = settings.choose("weight_init", {"xavier": "xavier", "uniform": "uniform"}, "xavier")
    scale = settings.number("weight_init_scale")
    keep("model.initialization.weights", weights)
    keep("model.initialization.scale", float(scale) if scale and weights == "uniform" else None)
    keep("model.initialization.forget_bias", float(settings.number("rnn_forget_bias", default=0.0)))
    starts = {"orthogonal": "orthogonal", "orthogonal_stacked": "orthogonal_stacked", "default": "default"}
    keep("model.initialization.rnn_h2h", settings.choose("rnn_h2h_init", starts, "default"))


def _training(settings: ForeignSettings) -> None:
    keep, take, number = settings.keep, settings.take, settings.number
    names = ("adam", "sgd", "nag", "adagrad", "adadelta", "rmsprop", "nadam")
    keep("training.optimizer.name", settings.choose("optimizer", {name: name for name in names}, "adam"))
    keep("training.optimizer.learning_rate", float(number("initial_learning_rate", default=3.0e-4)))
    keep("training.optimizer.weight_decay", float(number("weight_decay", default=0.0)))
    momentum = number("momentum")
    keep("training.optimizer.momentum", float(momentum) if momentum else None)
    schedules = {
        "plateau-reduce": "plateau-reduce", "none": "constant", "None": "constant",
        "inv-sqrt-decay": "inverse-sqrt", "fixed-rate-inv-sqrt-t": "inverse-sqrt",
    }  # fmt: skip
    schedule = settings.choose("learning_rate_scheduler_type", schedules, "plateau-reduce")
    keep("training.schedule.name", schedule)
    warmup = int(number("learning_rate_warmup", default=0))
    keep("training.schedule.warmup", max(1, warmup) if schedule == "inverse-sqrt" else warmup)
    factor, patience = number("learning_rate_reduce_factor"), number("learning_rate_reduce_num_not_improved")
    if schedule == "plateau-reduce":
        keep("training.schedule.reduce_factor", factor)
        keep("training.schedule.reduce_num_not_improved", patience)
    clipping = settings.choose(
        "gradient_clipping_type", {"none": "none", "abs": "value", "norm": "norm"}, "none"
    )
    threshold = number("gradient_clipping_threshold", default=1.0)
    keep("training.gradient_clipping.type", clipping)
    keep("training.gradient_clipping.threshold", float(threshold) if clipping != "none" else None)
    keep("training.label_smoothing", float(number("label_smoothing", default=0.0)))
    keep(
        "training.batch.type",
        settings.choose("batch_type", {"sentence": "sentence", "word": "word"}, "sentence"),
    )
    keep("training.batch.size", number("batch_size", default=64))
    keep("training.update_interval", number("update_interval"))
    keep("training.checkpoint_interval", number("checkpoint_interval", "checkpoint_frequency", default=4000))
    patience = number("max_num_checkpoint_not_improved", default=32)
    settings.recipe["training.early_stopping.max_num_checkpoint_not_improved"] = (
        patience if patience and patience > 0 else None
    )
    metrics = {name: name for name in ("perplexity", "bleu", "chrf", "accuracy")}
    keep("training.early_stopping.metric", settings.choose("optimized_metric", metrics, "perplexity"))
    for ours, theirs in (("updates", "updates"), ("epochs", "num_epochs"), ("seconds", "seconds")):
        keep(f"training.max_{ours}", number(f"max_{theirs}"))
        if ours != "seconds" and patience and patience > 0:
            keep(f"training.min_{ours}", number(f"min_{theirs}"))
    keep("training.decode_and_evaluate", number("decode_and_evaluate"))
    kept = number("keep_last_params", default=-1)
    keep("training.keep_last_params", kept if kept > 0 else None)
    keep("training.monitor_pattern", settings.text("monitor_pattern"))
    keep("training.fixed_param_strategy", settings.text("fixed_param_strategy"))
    keep("training.seed", number("seed"))
    if take("use_cpu"):
        keep("training.device", "cpu")
