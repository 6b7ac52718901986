"""Twelve small models with their training steps, for tests and measurements of the memory account."""

from __future__ import annotations

import gc
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.checkpoint import checkpoint

import econmt_memory as memory


@dataclass
class Case:
    """A model with its optimizer and the code of a training step."""

    model: nn.Module
    optimizer: Optimizer
    loss: Callable[[], Tensor]
    passes: int = 1

    def step(self) -> None:
        """Runs a training step, of several batches if the case has several passes."""
        self.optimizer.zero_grad()
        for _ in range(self.passes):
            self.loss().backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()


def adam(model: nn.Module) -> AdamW:
    """An optimizer for the parameters that are not frozen."""
    return AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-3)


class Block(nn.Module):
    """A transformer block."""

    def __init__(self, width: int, heads: int, causal: bool = True) -> None:
        super().__init__()
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.heads, self.causal = heads, causal

    def forward(self, x: Tensor) -> Tensor:
        """Computes (B, T, D) from (B, T, D)."""
        rows, steps, width = x.shape
        qkv = self.qkv(self.before(x)).view(rows, steps, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, steps, width))
        result: Tensor = x + self.down(functional.gelu(self.up(self.after(x))))
        return result


class GPT(nn.Module):
    """A language model of transformer blocks; with ``checkpointed``, blocks are recomputed."""

    def __init__(
        self, words: int, width: int, layers: int, *, checkpointed: bool = False, tied: bool = False
    ) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.places = nn.Embedding(256, width)
        self.blocks = nn.ModuleList(Block(width, 4) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, words, bias=False)
        self.checkpointed = checkpointed
        if tied:
            self.head.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        """Returns logits (B, T, V) of token ids (B, T)."""
        x = self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def next_word_loss(model: nn.Module, ids: Tensor) -> Tensor:
    """The loss of a language model."""
    logits = model(ids)
    return functional.cross_entropy(logits.flatten(0, 1), ids.flatten())


def gpt(
    size: int = 1, *, checkpointed: bool = False, tied: bool = False, passes: int = 1, rows: int = 4
) -> Case:
    """A GPT of two layers."""
    model = GPT(500 * size, 64 * size, 2, checkpointed=checkpointed, tied=tied)
    ids = torch.randint(0, 500 * size, (rows * size, 32 * size))
    return Case(model, adam(model), lambda: next_word_loss(model, ids), passes)


class Residual(nn.Module):
    """A residual block of two convolutions."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        first = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.body = nn.Sequential(first, nn.BatchNorm2d(outputs), nn.ReLU(), second, nn.BatchNorm2d(outputs))
        self.skip = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Computes (B, C, H, W) of a residual block."""
        return functional.relu(self.body(x) + self.skip(x))


def resnet(size: int = 1, rows: int = 4) -> Case:
    """A ResNet with momentum."""
    blocks = Residual(16, 16, 1), Residual(16, 32 * size, 2), Residual(32 * size, 64 * size, 2)
    begin = nn.Conv2d(3, 16, 3, 1, 1), nn.BatchNorm2d(16), nn.ReLU()
    end = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64 * size, 10)
    model = nn.Sequential(*begin, *blocks, *end)
    images, labels = torch.randn(rows * size, 3, 32, 32), torch.randint(0, 10, (rows * size,))
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    return Case(model, optimizer, lambda: functional.cross_entropy(model(images), labels))


class EncoderDecoder(nn.Module):
    """A translation model on PyTorch's transformer."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.transformer = nn.Transformer(width, 4, 1, 1, 4 * width, 0.1, batch_first=True)
        self.head = nn.Linear(width, words)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Returns logits (B, T, V) of target positions."""
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1], device=target.device)
        hidden = self.transformer(self.words(source), self.words(target), tgt_mask=mask, tgt_is_causal=True)
        logits: Tensor = self.head(hidden)
        return logits


def encoder_decoder(size: int = 1, rows: int = 4) -> Case:
    """An encoder-decoder transformer with dropout."""
    model = EncoderDecoder(300 * size, 32 * size)
    source, target = (torch.randint(0, 300, (rows * size, length * size)) for length in (20, 16))

    def loss() -> Tensor:
        return functional.cross_entropy(model(source, target).flatten(0, 1), target.flatten())

    return Case(model, adam(model), loss)


class ViT(nn.Module):
    """A vision transformer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.first = nn.Parameter(torch.zeros(1, 1, width))
        self.places = nn.Parameter(torch.zeros(1, 65, width))
        self.blocks = nn.Sequential(*(Block(width, 4, causal=False) for _ in range(2)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Returns logits (B, 10) of images (B, 3, 32, 32)."""
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(len(x), -1, -1), x], 1) + self.places
        logits: Tensor = self.head(self.norm(self.blocks(x))[:, 0])
        return logits


def vit(size: int = 1, rows: int = 4) -> Case:
    """A vision transformer under autocast to bfloat16."""
    model = ViT(32 * size)
    images, labels = torch.randn(rows * size, 3, 32, 32), torch.randint(0, 10, (rows * size,))

    def loss() -> Tensor:
        with torch.autocast(images.device.type, dtype=torch.bfloat16):
            return functional.cross_entropy(model(images), labels)

    return Case(model, adam(model), loss)


class Recurrent(nn.Module):
    """Embedding, recurrent layers and a projection."""

    def __init__(self, layers: nn.LSTM | nn.GRU, words: int, outputs: int, *, last: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(words, layers.input_size)
        self.layers, self.last = layers, last
        self.head = nn.Linear(layers.hidden_size * (2 if layers.bidirectional else 1), outputs)

    def forward(self, ids: Tensor) -> Tensor:
        """Returns logits of token ids (B, T)."""
        hidden = self.layers(self.words(ids))[0]
        logits: Tensor = self.head(hidden[:, -1] if self.last else hidden)
        return logits


def lstm_classifier(size: int = 1) -> Case:
    """A classifier on an LSTM in two directions."""
    layers = nn.LSTM(32 * size, 32 * size, 2, batch_first=True, bidirectional=True)
    model = Recurrent(layers, 500, 5, last=True)
    ids, labels = torch.randint(0, 500, (8 * size, 20)), torch.randint(0, 5, (8 * size,))
    return Case(model, adam(model), lambda: functional.cross_entropy(model(ids), labels))


def gru_language_model(size: int = 1) -> Case:
    """A language model on a GRU, which sums the gradients of two batches."""
    words = 500 * size
    model = Recurrent(nn.GRU(64 * size, 64 * size, 1, batch_first=True), words, words, last=False)
    ids = torch.randint(0, words, (8 * size, 16))
    return Case(model, adam(model), lambda: next_word_loss(model, ids), passes=2)


class UNet(nn.Module):
    """A U-Net that predicts the noise of an image, given the time of diffusion."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(1, width), nn.SiLU(), nn.Linear(width, 2 * width))
        self.enter = nn.Conv2d(3, width, 3, 1, 1)
        self.down = nn.Sequential(nn.GroupNorm(4, width), nn.SiLU(), nn.Conv2d(width, 2 * width, 3, 2, 1))
        middle = nn.Conv2d(2 * width, 2 * width, 3, 1, 1)
        self.middle = nn.Sequential(nn.GroupNorm(4, 2 * width), nn.SiLU(), middle)
        self.up = nn.ConvTranspose2d(2 * width, width, 2, 2)
        self.leave = nn.Conv2d(2 * width, 3, 3, 1, 1)

    def forward(self, image: Tensor, time: Tensor) -> Tensor:
        """Returns the noise in images (B, 3, 32, 32) at times (B, 1)."""
        first = self.enter(image)
        low = self.down(first) + self.time(time)[:, :, None, None]
        noise: Tensor = self.leave(torch.cat([first, self.up(low + self.middle(low))], 1))
        return noise


def diffusion(size: int = 1) -> Case:
    """A diffusion model."""
    model = UNet(16 * size)
    images, noise = torch.randn(2 * size, 3, 32, 32), torch.randn(2 * size, 3, 32, 32)
    time = torch.rand(2 * size, 1)

    def loss() -> Tensor:
        share = time[:, :, None, None]
        return functional.mse_loss(model((1 - share) * images + share * noise, time), noise)

    return Case(model, adam(model), loss)


class Mixture(nn.Module):
    """A layer of experts, of which each token uses the one that it prefers."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Computes (N, D) from tokens (N, D)."""
        weights, chosen = self.router(x).softmax(-1).max(-1)
        result = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero()[:, 0]
            result = result.index_add(0, rows, weights[rows, None] * expert(x[rows]))
        return x + result


def mixture(size: int = 1) -> Case:
    """A mixture of experts."""
    width = 32 * size
    experts = Mixture(width, 4)
    model = nn.Sequential(nn.Embedding(500, width), experts, nn.LayerNorm(width), nn.Linear(width, 500))
    ids = torch.randint(0, 500, (128 * size,))
    return Case(model, adam(model), lambda: functional.cross_entropy(model(ids), ids))


class LoRA(nn.Module):
    """A frozen linear layer with a trained product of low rank beside it."""

    def __init__(self, frozen: nn.Linear, rank: int) -> None:
        super().__init__()
        self.frozen = frozen
        self.narrow = nn.Linear(frozen.in_features, rank, bias=False)
        self.wide = nn.Linear(rank, frozen.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Computes (..., D) from (..., I)."""
        result: Tensor = self.frozen(x) + self.wide(self.narrow(x))
        return result


def lora(size: int = 1) -> Case:
    """LoRA over a frozen GPT."""
    case = gpt(size)
    model = case.model
    model.requires_grad_(False)
    assert isinstance(model, GPT)
    for block in model.blocks:
        assert isinstance(block, Block)
        block.qkv, block.out = LoRA(block.qkv, 4), LoRA(block.out, 4)  # type: ignore[assignment]
    return Case(model, adam(model), case.loss)


def own(size: int = 1) -> Case:
    """A translation model of econmt."""
    from econmt.config import recipe
    from econmt.model import Implementations, TranslationModel

    sizes = {"layers": 1, "size": 32 * size}
    settings = {"embedding": 32 * size, "encoder": sizes, "decoder": sizes, "attention": {"size": 32 * size}}
    model = TranslationModel(recipe.Model.model_validate(settings), 300, 300)
    # Source words repeat as in text, so that a CPU multiplies each of them once.
    source, target = torch.randint(4, 100, (8, 12)), torch.randint(4, 300, (8, 10))
    lengths, ops = torch.full((8,), 12), Implementations.everywhere("recompute")

    def loss() -> Tensor:
        hidden = model(source, lengths, target, ops)
        logits = functional.linear(hidden, model.output.weight, model.output.bias)
        return functional.cross_entropy(logits.flatten(0, -2), target.flatten())

    return Case(model, adam(model), loss)


CASES: dict[str, Callable[[int], Case]] = {
    "GPT": gpt,
    "ResNet": resnet,
    "encoder-decoder": encoder_decoder,
    "ViT": vit,
    "LSTM classifier": lstm_classifier,
    "GRU language model": gru_language_model,
    "diffusion U-Net": diffusion,
    "mixture of experts": mixture,
    "LoRA": lora,
    "shared weights": lambda size: gpt(size, tied=True),
    "checkpointing": lambda size: gpt(size, checkpointed=True),
}
if importlib.util.find_spec("econmt") is not None:
    CASES["econmt's own"] = own
"""Functions that make the models, larger ones for larger sizes."""

LONG: dict[str, Callable[[], Case]] = {
    "GPT": lambda: gpt(8, rows=96),
    "ResNet": lambda: resnet(8, rows=1024),
    "encoder-decoder": lambda: encoder_decoder(8, rows=160),
    "ViT": lambda: vit(12, rows=800),
}
"""Functions that make models whose step takes 150 ms and more of an H100, and up to 60 GB."""


def tracked(case: Case, steps: int = 2) -> memory.Account:
    """The account of the step after some other ones."""
    for _ in range(steps):
        case.step()
    gc.collect()
    with memory.track(case.model, case.optimizer) as account:
        case.step()
    return account


def events_of(profile: torch.profiler.profile) -> list[Any]:
    """All events that PyTorch's profiler has recorded, in order."""
    results: Any = profile.profiler
    events: list[Any] = []
    waiting = [*reversed(results.kineto_results.experimental_event_tree())]
    while waiting:
        events.append(waiting.pop())
        waiting += reversed(events[-1].children)
    return sorted(events, key=lambda event: event.start_time_ns)


def counted_peak(make: Callable[[], Callable[[], object]]) -> int:
    """Returns the most live CPU bytes during a step, by the memory events of PyTorch's profiler alone.

    All memory counts that was allocated since before the model was made.

    Args:
        make: Makes the model and returns its step, which runs twice to warm up, and once to be counted.
    """
    gc.collect()
    with torch.profiler.profile(profile_memory=True) as profile:
        step = make()
        step()
        step()
        gc.collect()
        with torch.profiler.record_function("counted step"):
            step()
    events = events_of(profile)
    (counted,) = (event for event in events if event.name == "counted step")
    live: set[int] = set()
    total = peak = 0
    for event in events:
        if event.tag.name != "Allocation" or event.start_time_ns > counted.end_time_ns:
            continue
        address, size = event.extra_fields.ptr, event.extra_fields.alloc_size
        if size < 0 and address not in live:
            continue  # allocated before
        total += size
        live ^= {address}
        peak = total if event.start_time_ns < counted.start_time_ns else max(peak, total)
    return peak
