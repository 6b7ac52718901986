"""Configurations of Joey NMT (versions 1 and 2) as recipes."""

from __future__ import annotations

from typing import Any

from econmt.config.foreign_settings import ForeignSettings, tying
from econmt.errors import InputError

_IRRELEVANT = frozenset(
    {
        "joeynmt_version", "data.dataset_type", "data.src.min_length", "data.trg.min_length",
        "training.overwrite", "training.shuffle", "training.print_valid_sents", "training.use_cuda",
        "training.normalization", "training.loss", "training.max_output_length", "training.fp16",
        "training.eval_metric", "testing.eval_metrics", "testing.n_best", "testing.batch_type",
        "testing.max_output_length", "testing.return_prob", "testing.sacrebleu_cfg.whitespace",
        "training.learning_rate_min", "training.keep_last_ckpts", "model.init_gain",
        "model.embed_init_gain", "model.bias_initializer", "model.embed_init_weight", "model.embed_initializer",
        "data.src.tokenizer_cfg.num_merges", "data.trg.tokenizer_cfg.num_merges",
        "data.src.tokenizer_cfg.character_coverage", "data.trg.tokenizer_cfg.character_coverage",
        "data.src.tokenizer_cfg.nbest_size", "data.trg.tokenizer_cfg.nbest_size",
        "data.src.tokenizer_cfg.pretokenizer", "data.trg.tokenizer_cfg.pretokenizer",
    }
)  # fmt: skip
_UNLIMITED = 10_000_000
_SIDES = ("src", "trg")


def import_joey(tree: dict[str, Any], where: str) -> ForeignSettings:
    """Converts a configuration of Joey NMT; ``where`` is its name in errors.

    Raises:
        InputError: The model is a Transformer, or text is divided into characters.
    """
    settings = ForeignSettings(tree, where)
    _data(settings)
    _model(settings)
    _training(settings)
    _testing(settings)
    settings.finish(_IRRELEVANT)
    return settings


def _data(settings: ForeignSettings) -> None:
    take, keep = settings.take, settings.keep
    name = settings.text("name", default="joey")
    keep("name", name)
    keep("output", settings.text("training.model_dir", default=f"runs/{name}"))
    for key, side in (("data.source", "src"), ("data.target", "trg")):
        keep(key, settings.text(f"data.{side}", f"data.{side}.lang"))
    train = settings.text("data.train")
    keep("data.train", None if train is None else [train])
    keep("data.valid", settings.text("data.dev"))
    keep("data.test", settings.text("data.test"))
    if settings.take("data.dataset_type", default="plain") == "huggingface":
        settings.remark("data.dataset_type", "huggingface: store the text as PREFIX.parquet or PREFIX.tsv")
    lengths = [settings.number(f"data.{side}.max_length", "data.max_sent_length") for side in _SIDES]
    common = take("data.max_length")
    keep("data.max_length", max((length for length in (*lengths, common) if length), default=None))
    for side in _SIDES:
        if take(f"data.{side}.lowercase", "data.lowercase"):
            settings.remark(f"data.{side}.lowercase", "true: lowercase the files; text is used as it is")
        if take(f"data.{side}.normalize"):
            settings.remark(f"data.{side}.normalize", "true: normalise the files; text is used as it is")
    _subwords(settings)


def _subwords(settings: ForeignSettings) -> None:
    """Converts the vocabularies: words with their limits, or subwords of SentencePiece."""
    keep = settings.keep
    common = settings.text("data.level")
    levels = [settings.text(f"data.{side}.level", default=common or "word") for side in _SIDES]
    limits, counts = [], []
    for side in _SIDES:
        limit = settings.number(f"data.{side}.voc_limit", f"data.{side}_voc_limit")
        limits.append(_UNLIMITED if limit is None or limit > _UNLIMITED else int(limit))
        counts.append(settings.number(f"data.{side}.voc_min_freq", f"data.{side}_voc_min_freq", default=1))
    files = [settings.text(f"data.{side}.voc_file", f"data.{side}_vocab") for side in _SIDES]
    kinds = [settings.text(f"data.{side}.tokenizer_type", default="subword-nmt") for side in _SIDES]
    models = [settings.text(f"data.{side}.tokenizer_cfg.model_file") for side in _SIDES]
    types = [settings.text(f"data.{side}.tokenizer_cfg.model_type", default="unigram") for side in _SIDES]
    dropout = [
        settings.number(f"data.{side}.tokenizer_cfg.dropout", f"data.{side}.tokenizer_cfg.alpha")
        for side in _SIDES
    ]
    codes = [settings.text(f"data.{side}.tokenizer_cfg.codes") for side in _SIDES]
    if "char" in levels:
        raise InputError(
            f"{settings.where}: data.{_SIDES[levels.index('char')]}.level: char has no counterpart; divide the text "
            "into characters separated by spaces and set level: word"
        )
    divided = common == "bpe"  # version 1 reads text that subword-nmt has divided before
    if divided:
        settings.remark(
            "data.level", "bpe: the text is divided already, so words with @@ are kept; join translations"
        )
    if "bpe" not in levels or divided:
        keep("data.subwords.type", "words")
        if all(files):
            keep("data.subwords.lists", files)
        else:
            keep("data.subwords.source", max(5, limits[0]))
            keep("data.subwords.target", max(5, limits[1]))
            keep("data.subwords.min_count", max(1, *map(int, counts)))
        return
    joint = all(files) and files[0] == files[1]
    if all(kind == "sentencepiece" for kind in kinds) and all(models):
        keep("data.subwords.type", types[0])
        keep("data.subwords.joint", models[0] == models[1])
        keep("data.subwords.models", list(dict.fromkeys(models)))
        return
    if all(codes):
        keep("data.subwords.type", "codes")
        keep("data.subwords.joint", joint and codes[0] == codes[1])
        keep("data.subwords.files", list(dict.fromkeys(codes)))
        keep("data.subwords.size", None if limits[0] == _UNLIMITED else max(16, limits[0]))
        keep("data.subwords.min_count", max(1, *map(int, counts)))
        if dropout[0]:
            settings.remark("data.src.tokenizer_cfg.dropout", f"{dropout[0]}: needs data.subwords.type bpe")
        return
    keep("data.subwords.type", "bpe")
    keep("data.subwords.joint", joint)
    keep("data.subwords.size", None if limits[0] == _UNLIMITED else max(16, limits[0]))
    keep("data.subwords.dropout", dropout[0] if dropout[0] and dropout[0] > 0 else None)
    settings.remark(
        "data.src.tokenizer_type", f"{kinds[0]}: BPE is learnt anew from the text, by SentencePiece"
    )


def _model(settings: ForeignSettings) -> None:
    keep, take = settings.keep, settings.take
    for part in ("encoder", "decoder"):
        kind = take(f"model.{part}.type", default="recurrent")
        if kind != "recurrent":
            raise InputError(
                f"{settings.where}: model.{part}.type: {kind}; econmt trains recurrent models only"
            )
        keep(
            f"model.{part}.cell",
            settings.choose(f"model.{part}.rnn_type", {"lstm": "lstm", "gru": "gru"}, "lstm"),
        )
        layers = settings.number(f"model.{part}.num_layers", default=1)
        keep(f"model.{part}.layers", layers)
        side = {"encoder": "source", "decoder": "target"}[part]
        embeddings = f"model.{part}.embeddings"
        keep(f"model.{side}_embedding", settings.number(f"{embeddings}.embedding_dim"))
        keep(f"model.initialization.{side}_embedding", settings.text(f"{embeddings}.load_pretrained"))
        dropout = settings.number(f"model.{part}.dropout", default=0.0)
        keep(f"model.dropout.{side}_embedding", float(dropout))
        keep(f"model.dropout.{part}_layers", float(dropout) if layers > 1 else None)
    both = take("model.encoder.bidirectional", default=True)
    keep("model.encoder.bidirectional", "all" if both else "none")
    size = settings.number("model.encoder.hidden_size", default=512)
    keep("model.encoder.size", size * (2 if both else 1))
    size = settings.number("model.decoder.hidden_size", default=512)
    keep("model.decoder.size", size)
    attention = settings.choose(
        "model.decoder.attention", {"bahdanau": "additive", "luong": "bilinear"}, "bahdanau"
    )
    keep("model.attention.type", attention)
    keep("model.attention.size", size if attention == "additive" else None)
    keep("model.decoder.input_feeding", bool(take("model.decoder.input_feeding", default=True)))
    starts = {"bridge": "last", "last": "last", "zero": "zero"}
    keep("model.decoder.state_init", settings.choose("model.decoder.init_hidden", starts, "bridge"))
    keep("model.dropout.output", float(settings.number("model.decoder.hidden_dropout", default=0.0)))
    tied = tying(bool(take("model.tied_embeddings")), bool(take("model.tied_softmax")))
    keep("model.weight_tying", tied)
    if tied.startswith("src_trg"):
        if settings.recipe.get("data.subwords.type") != "words":
            keep("data.subwords.joint", True)
        elif not settings.share_words():
            settings.remark(
                "model.tied_embeddings", "true: vocabularies that differ are not shared; the target's is tied"
            )
            keep("model.weight_tying", "trg_softmax" if tied.endswith("softmax") else "none")
    weights = str(take("model.initializer", default="xavier")).removesuffix("_uniform")
    scale = settings.number("model.init_weight")
    if weights == "uniform":
        keep("model.initialization.weights", "uniform")
        keep("model.initialization.scale", scale)
    elif weights != "xavier":
        settings.remark("model.initializer", f"{weights} has no counterpart; xavier_uniform is used")
    keep("model.initialization.forget_bias", float(settings.number("model.lstm_forget_gate", default=1.0)))
    if take("model.init_rnn_orthogonal"):
        keep("model.initialization.rnn_h2h", "orthogonal")


def _training(settings: ForeignSettings) -> None:
    keep, take, number = settings.keep, settings.take, settings.number
    optimizers = {name: name for name in ("sgd", "adam", "adamw", "adadelta", "adagrad", "rmsprop")}
    keep("training.optimizer.name", settings.choose("training.optimizer", optimizers, "sgd"))
    rate = number("training.learning_rate", default=3.0e-4)
    keep("training.optimizer.betas", take("training.adam_betas"))
    keep("training.optimizer.weight_decay", float(number("training.weight_decay", default=0.0)))
    factor = number("training.learning_rate_factor", default=1.0)
    warmup, patience = number("training.learning_rate_warmup"), number("training.patience", default=10)
    reduction = number("training.decrease_factor", default=0.1)
    schedules = {
        "None": "constant", "plateau": "plateau-reduce", "noam": "noam", "warmupinversesquareroot": "inverse-sqrt",
    }  # fmt: skip
    schedule = settings.choose("training.scheduling", schedules, "None")
    keep("training.schedule.name", schedule)
    if schedule == "plateau-reduce":
        keep("training.schedule.reduce_factor", reduction)
        keep(
            "training.schedule.reduce_num_not_improved", int(patience) + 1
        )  # reduced after patience is exceeded
    elif schedule in ("noam", "inverse-sqrt"):
        keep("training.schedule.warmup", int(warmup or 4000))
        rate = factor if schedule == "noam" else rate
    keep("training.optimizer.learning_rate", float(rate))
    norm, value = number("training.clip_grad_norm"), number("training.clip_grad_val")
    keep("training.gradient_clipping.type", "norm" if norm else "value" if value else "none")
    keep("training.gradient_clipping.threshold", float(norm or value) if norm or value else None)
    keep("training.label_smoothing", number("training.label_smoothing"))
    words = str(take("training.batch_type", default="sentence")).startswith("token")
    keep("training.batch.type", "word" if words else "sentence")
    keep("training.batch.size", number("training.batch_size", default=64))
    keep("training.update_interval", number("training.batch_multiplier"))
    keep("training.max_epochs", number("training.epochs"))
    keep("training.max_updates", number("training.updates"))
    if not {"training.max_epochs", "training.max_updates"} & settings.recipe.keys():
        settings.remark("training.epochs", "missing: training stops early, as by default")
    else:
        settings.recipe["training.early_stopping.max_num_checkpoint_not_improved"] = None
    keep("training.checkpoint_interval", number("training.validation_freq", default=1000))
    keep("training.log_interval", number("training.logging_freq", default=100))
    measures = take("training.eval_metric", "testing.eval_metrics", default="bleu")
    measure = measures[0] if isinstance(measures, list) and measures else measures
    metric = str(take("training.early_stopping_metric", default="eval_metric"))
    known = {
        "loss": "perplexity",
        "ppl": "perplexity",
        "bleu": "bleu",
        "chrf": "chrf",
        "token_accuracy": "accuracy",
    }
    named = str(measure) if metric == "eval_metric" else metric
    if named not in known:
        settings.remark("training.early_stopping_metric", f"{named} has no counterpart; bleu is used")
    keep("training.early_stopping.metric", known.get(named, "bleu"))
    kept = number("training.keep_best_ckpts", "training.keep_last_ckpts", default=5)
    keep("training.keep_last_params", kept if kept > 0 else None)
    keep("training.seed", number("training.random_seed"))
    if take("training.use_cuda", default=True) is False:
        keep("training.device", "cpu")
    if load := settings.text("training.load_model"):
        settings.remark("training.load_model", f"{load}: models of other toolkits cannot be loaded")
    if take("training.normalization", default="batch") != "tokens":
        settings.remark("training.normalization", "the loss is a mean over target tokens, as with tokens")


def _testing(settings: ForeignSettings) -> None:
    keep, number = settings.keep, settings.number
    keep("decoding.beam_size", number("testing.beam_size", default=1))
    alpha = number("testing.beam_alpha", "testing.alpha", default=-1)
    keep("decoding.length_penalty_alpha", float(max(alpha, 0.0)))
    keep("decoding.length_penalty_beta", 5.0 if alpha > 0 else None)
    keep("decoding.batch_size", number("testing.batch_size"))
    least = number("testing.min_output_length")
    keep("decoding.min_output_length", least if least and least > 1 else None)
    keep("decoding.ban_unk", True if settings.take("testing.generate_unk") is False else None)
    grams, repetition = number("testing.no_repeat_ngram_size"), number("testing.repetition_penalty")
    keep("decoding.block_ngram_repeat", grams if grams and grams > 0 else None)
    keep("decoding.repetition_penalty", float(repetition) if repetition and repetition > 0 else None)
    tokenizer = settings.text("testing.sacrebleu_cfg.tokenize")
    keep("training.bleu_tokenizer", tokenizer)
