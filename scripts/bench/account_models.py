"""Compares predicted with measured memory of many models.

    python -m scripts.bench account-models
    python -m scripts.bench account-models --models vgg16 gpt2 --batch 2 --length 64
    python -m scripts.bench account-models --device cuda

Models have random weights. The packages that they come from are optional: torchvision, timm, transformers and
torch_geometric; without one its models are left out. A row has the peak of the third step as the allocator counts it,
on a CPU as memory.track does, the peak that memory.predict gives before the first step, and the seconds of processor
time that it takes.
"""

from __future__ import annotations

import importlib
import importlib.util
import multiprocessing
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

import econmt_memory as memory
from econmt.bench.rows import Row
from scripts.bench.frame import Bench, figures_of


def _wide(width: int, layers: int, heads: int, **more: Any) -> dict[str, Any]:
    return {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads, **more}


_GPT_NEO = {"num_layers": 12, "attention_types": [[["global", "local"], 6]]}
_QWEN = {"num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 3072, "tie_word_embeddings": True}
_OPT_350M = {"ffn_dim": 4096, "word_embed_proj_dim": 512, "do_layer_norm_before": False}
MODELS: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    **{
        name: (package, name, optimizer, {})
        for package, optimizer, names in (
            ("torchvision", "SGD", ("vgg16", "resnet152", "regnet_x_400mf", "alexnet", "densenet121", "resnet50")),
            ("torchvision", "Adam", ("vgg19", "mnasnet1_0", "regnet_y_400mf", "squeezenet1_1", "shufflenet_v2_x1_0")),
            ("torchvision", "AdamW", ("resnet18", "resnet101", "convnext_tiny", "convnext_base", "resnext50_32x4d")),
            ("torchvision", "RMSprop", ("mobilenet_v2", "mobilenet_v3_large", "mobilenet_v3_small")),
            ("timm", "SGD", ("mixnet_m", "dm_nfnet_f0", "regnety_120", "ese_vovnet19b_dw")),
            ("timm", "AdamW", ("resnest14d", "vit_small_patch16_224")),
            ("torch_geometric", "Adam", ("GCN", "GIN", "GraphSAGE", "EdgeCNN")),
        )
        for name in names
    },
    "distilgpt2": ("transformers", "gpt2", "AdamW", {"n_layer": 6}),
    "gpt2": ("transformers", "gpt2", "AdamW", {}),
    "gpt-neo-125m": ("transformers", "gpt_neo", "Adam", _wide(768, 12, 12, **_GPT_NEO)),
    "opt-125m": ("transformers", "opt", "AdamW", {}),
    "opt-350m": ("transformers", "opt", "Adafactor", _wide(1024, 24, 16, **_OPT_350M)),
    "Cerebras-GPT-111M": ("transformers", "gpt2", "Adam", {"n_layer": 10, "activation_function": "gelu"}),
    "pythia-1b": ("transformers", "gpt_neox", "SGD", _wide(2048, 16, 8, intermediate_size=8192, vocab_size=50304)),
    "t5-small": ("transformers", "t5", "Adafactor", {}),
    "t5-base": ("transformers", "t5", "AdamW", {"d_model": 768, "d_ff": 3072, "num_layers": 12, "num_heads": 12}),
    "Qwen3-0.6B": ("transformers", "qwen3", "Adafactor", _wide(1024, 28, 16, **_QWEN)),
    "Albert": ("transformers", "albert", "Adam", _wide(768, 12, 12, intermediate_size=3072)),
    "Bart": ("transformers", "bart", "AdamW", {"d_model": 768, "encoder_layers": 6, "decoder_layers": 6}),
    "Bert": ("transformers", "bert", "AdamW", {}),
    "Bert_large": ("transformers", "bert", "SGD", _wide(1024, 24, 16, intermediate_size=4096)),
    "BigBird": ("transformers", "big_bird", "Adam", {}),
    "DistilBert": ("transformers", "distilbert", "AdamW", {}),
    "Longformer": ("transformers", "longformer", "AdamW", {"attention_window": 64, "max_position_embeddings": 4098}),
    "Roberta_base": ("transformers", "roberta", "AdamW", {"max_position_embeddings": 514}),
    "Whisper": ("transformers", "whisper", "AdamW", {}),
    "clip": ("transformers", "clip", "AdamW", {}),
}  # fmt: skip
"""Package, name there, optimizer and settings of models that such predictions are compared on."""
IN_BFLOAT16 = ("pythia-1b", "Qwen3-0.6B")
_CLASSES = {
    **dict.fromkeys(("t5", "bart"), "AutoModelForSeq2SeqLM"),
    **dict.fromkeys(
        ("albert", "bert", "big_bird", "distilbert", "longformer", "roberta"), "AutoModelForMaskedLM"
    ),
    "clip": "AutoModel",
    "whisper": "AutoModelForSpeechSeq2Seq",
}
"""Classes of transformers by type of model; others are AutoModelForCausalLM."""


def _text(
    kind: str, settings: dict[str, Any], batch: int, length: int
) -> tuple[nn.Module, Callable[[], Tensor]]:
    """Returns a model of transformers and its loss."""
    library: Any = importlib.import_module("transformers")
    config = library.AutoConfig.for_model(kind, **settings)
    config.use_cache, config.decoder_start_token_id = False, 0
    model = getattr(library, _CLASSES.get(kind, "AutoModelForCausalLM")).from_config(config)
    words = getattr(config, "text_config", config).vocab_size
    tokens = torch.randint(5, words - 5, (batch, length))
    given: dict[str, Any] = {"input_ids": tokens, "labels": tokens}
    if kind == "whisper":
        given = {"input_features": torch.randn(batch, config.num_mel_bins, 3000), "labels": tokens}
    if kind == "clip":
        given = {"input_ids": tokens[:, :64], "pixel_values": torch.randn(batch, 3, 224, 224)}
        given["return_loss"] = True
    return model, lambda: model(**given).loss


def _other(package: str, kind: str, batch: int) -> tuple[nn.Module, Callable[[], Tensor]]:
    """Returns a model of graphs or images and its loss."""
    if package == "torch_geometric":
        model = getattr(importlib.import_module("torch_geometric.nn"), kind)(64, 64, 3, 64)
        nodes, edges = torch.randn(1000 * batch, 64), torch.randint(0, 1000 * batch, (2, 8000 * batch))
        return model, lambda: model(nodes, edges).sum()
    library: Any = importlib.import_module("timm" if package == "timm" else "torchvision.models")
    model = (library.create_model if package == "timm" else library.get_model)(kind)
    images, labels = torch.randn(batch, 3, 224, 224), torch.randint(0, 1000, (batch,))
    return model, lambda: nn.functional.cross_entropy(model(images), labels)


def measure(name: str, device: str, batch: int, length: int) -> Row:
    """Returns a row of the table."""
    package, kind, optimizer_name, settings = MODELS[name]
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16 if name in IN_BFLOAT16 else torch.float32)
    with torch.device(device):
        of_text = package == "transformers"
        model, loss = _text(kind, settings, batch, length) if of_text else _other(package, kind, batch)
    optimizer: Any = getattr(torch.optim, optimizer_name)(model.train().parameters(), lr=1e-4)

    def step() -> None:
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()

    begin = time.process_time()
    predicted = memory.predict(step, model, optimizer, device=device).peak_bytes
    took = time.process_time() - begin
    step()
    step()
    if device == "cpu":
        with memory.track(model, optimizer) as account:
            step()
        peak = account.peak_bytes
    else:
        torch.cuda.reset_peak_memory_stats()
        step()
        peak = torch.cuda.max_memory_allocated()
    sizes = {"measured, MB": round(peak / 1e6, 1), "predicted, MB": round(predicted / 1e6, 1)}
    return {**sizes, "difference, %": round(100 * (predicted / peak - 1), 2), "predicting, s": round(took, 1)}


def main(words: Sequence[str] | None = None) -> None:
    """Measures the models and prints a table."""
    bench = Bench(__doc__, device="cpu", threads=1)
    add = bench.add_argument
    add("--models", nargs="*", choices=list(MODELS), metavar="NAME", help="names of models; all by default")
    add("--batch", type=int, help="images, sentences or thousands of nodes in a batch (2; on a GPU 16)")
    add("--length", type=int, help="tokens in a sentence (128; on a GPU 512)")
    given = bench.begin(words)
    device, on_gpu = given.device.type, given.device.type == "cuda"
    batch, length = given.batch or (16 if on_gpu else 2), given.length or (512 if on_gpu else 128)
    missing = {package for package, *_ in MODELS.values() if importlib.util.find_spec(package) is None}
    if missing:
        print(f"Not installed, and left out: {', '.join(sorted(missing))}")
    names = [name for name in given.models or MODELS if MODELS[name][0] not in missing]

    # Each model has its own process, since workspaces and blocks of an allocator stay.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), max_tasks_per_child=1) as pool:
        rows = bench.report(
            {"model": name, "optimizer": MODELS[name][2]}
            | figures_of(pool.submit(measure, name, device, batch, length).result)
            for name in names
        )
    errors = [abs(row["difference, %"]) for row in rows if "difference, %" in row]
    if errors:
        print(f"{len(errors)} models: median {statistics.median(errors):.2f} %, at most {max(errors):.2f} %")
