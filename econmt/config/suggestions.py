"""Finds the key that an unknown key of a recipe was meant to be: by its spelling, or by its name in other toolkits."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Sequence

_STOP = "training.early_stopping."
FOREIGN = {
    "lr": "training.optimizer.learning_rate",
    "learning_rate": "training.optimizer.learning_rate",
    "initial_learning_rate": "training.optimizer.learning_rate",
    "optim": "training.optimizer.name",
    "optimizer_type": "training.optimizer.name",
    "lr_scheduler": "training.schedule.name",
    "scheduling": "training.schedule.name",
    "decay_method": "training.schedule.name",
    "learning_rate_scheduler_type": "training.schedule.name",
    "warmup_steps": "training.schedule.warmup",
    "warmup_updates": "training.schedule.warmup",
    "lr_warmup": "training.schedule.warmup",
    "learning_rate_warmup": "training.schedule.warmup",
    "decrease_factor": "training.schedule.reduce_factor",
    "learning_rate_decay": "training.schedule.reduce_factor",
    "learning_rate_reduce_factor": "training.schedule.reduce_factor",
    "patience": f"{_STOP}max_num_checkpoint_not_improved",
    "optimized_metric": f"{_STOP}metric",
    "early_stopping_metric": f"{_STOP}metric",
    "early_stopping_criteria": f"{_STOP}metric",
    "max_tokens": "training.batch.size",
    "mini_batch": "training.batch.size",
    "batch_multiplier": "training.update_interval",
    "accum_count": "training.update_interval",
    "update_freq": "training.update_interval",
    "optimizer_delay": "training.update_interval",
    "clip_norm": "training.gradient_clipping.threshold",
    "clip_grad_norm": "training.gradient_clipping.threshold",
    "max_grad_norm": "training.gradient_clipping.threshold",
    "epochs": "training.max_epochs",
    "max_epoch": "training.max_epochs",
    "after_epochs": "training.max_epochs",
    "updates": "training.max_updates",
    "train_steps": "training.max_updates",
    "max_steps": "training.max_updates",
    "max_update": "training.max_updates",
    "valid_steps": "training.checkpoint_interval",
    "valid_freq": "training.checkpoint_interval",
    "validation_freq": "training.checkpoint_interval",
    "save_checkpoint_steps": "training.checkpoint_interval",
    "report_every": "training.log_interval",
    "logging_freq": "training.log_interval",
    "disp_freq": "training.log_interval",
    "fp16": "training.precision",
    "bf16": "training.precision",
    "model_dtype": "training.precision",
    "fp16_init_scale": "training.loss_scale",
    "fp16_scale_window": "training.loss_scale_window",
    "cost_scaling": "training.loss_scale",
    "use_cuda": "training.device",
    "gpu_ranks": "training.device",
    "random_seed": "training.seed",
    "keep_checkpoint": "training.keep_last_params",
    "keep_best_ckpts": "training.keep_last_params",
    "load_model": "training.initialize_from",
    "train_from": "training.initialize_from",
    "exponential_smoothing": "training.averaging.decay",
    "average_decay": "training.averaging.decay",
    "model_dir": "output",
    "save_model": "output",
    "dev": "data.valid",
    "src": "data.source",
    "trg": "data.target",
    "tgt": "data.target",
    "max_sent_length": "data.max_length",
    "max_seq_len": "data.max_length",
    "src_seq_length": "data.max_length",
    "vocab_size": "data.subwords.size",
    "share_vocab": "data.subwords.joint",
    "shared_vocab": "data.subwords.joint",
    "embedding_dim": "model.embedding",
    "num_embed": "model.embedding",
    "word_vec_size": "model.embedding",
    "dim_emb": "model.embedding",
    "hidden_size": "model.encoder.size",
    "rnn_num_hidden": "model.encoder.size",
    "dim_rnn": "model.encoder.size",
    "num_layers": "model.encoder.layers",
    "enc_layers": "model.encoder.layers",
    "enc_depth": "model.encoder.layers",
    "dec_layers": "model.decoder.layers",
    "dec_depth": "model.decoder.layers",
    "rnn_type": "model.encoder.cell",
    "enc_cell": "model.encoder.cell",
    "dec_cell": "model.decoder.cell",
    "input_feed": "model.decoder.input_feeding",
    "global_attention": "model.attention.type",
    "attention_type": "model.attention.type",
    "embed_dropout": "model.dropout.embedding",
    "tied_embeddings": "model.weight_tying",
    "tied_softmax": "model.weight_tying",
    "share_embeddings": "model.weight_tying",
    "beam": "decoding.beam_size",
    "beam_alpha": "decoding.length_penalty_alpha",
    "lenpen": "decoding.length_penalty_alpha",
    "normalize": "decoding.length_penalty_alpha",
    "min_length": "decoding.min_output_length",
    "ban_unk_token": "decoding.ban_unk",
    "unkpen": "decoding.unk_penalty",
    "no_repeat_ngram_size": "decoding.block_ngram_repeat",
}
"""Keys by their names in Sockeye, fairseq, Joey NMT, OpenNMT and Marian."""


def meant_keys(path: Sequence[str], keys: Collection[str]) -> list[str]:
    """Returns the keys that an unknown key may mean, at most two; none if nothing is near.

    Args:
        path: parts of the unknown key. keys: all dotted keys of the schema.
    """
    wrong, section = path[-1].lower().replace("-", "_"), ".".join(path[:-1])
    spelled = "_".join([*path[:-1], wrong]).replace(".", "_")
    beside = [key for key in keys if key.rpartition(".")[0] == section]
    candidates = [
        [key for key in keys if key.replace(".", "_") == spelled],
        _similar(wrong, beside, 0.8),
        [FOREIGN[wrong]] if FOREIGN.get(wrong, "") in keys else [],
        _nearest_section(path, [key for key in keys if f"_{key.replace('.', '_')}".endswith(f"_{wrong}")]),
        _similar(wrong, beside, 0.65),
        _nearest_section(path, _similar(wrong, keys, 0.8)),
    ]
    return next((found for found in candidates if 1 <= len(found) <= 2), [])


def _similar(wrong: str, keys: Collection[str], cutoff: float) -> list[str]:
    """Returns the keys whose own name is most similar to ``wrong``, if any is similar enough."""
    names = difflib.get_close_matches(wrong, {key.rpartition(".")[2] for key in keys}, n=1, cutoff=cutoff)
    return [key for key in keys if key.rpartition(".")[2] in names]


def _nearest_section(path: Sequence[str], keys: list[str]) -> list[str]:
    """Returns the keys in the same part of the recipe as ``path``; all of them if there is none."""
    return [key for key in keys if len(path) > 1 and key.startswith(f"{path[0]}.")] or keys
