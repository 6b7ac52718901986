"""Compares ops on a GPU with PyTorch and other packages.

    python -m scripts.bench gpu.peers           # all parts
    python -m scripts.bench gpu.peers lstm      # one of them

The parts are output (the loss of an output layer, weights in bfloat16) and lstm (econmt_ops.LSTM and torch.nn.LSTM).
Each result is compared with float64 first; the error is relative to the norm of the exact values. Times are
milliseconds in CUDA graphs, medians of replays in turns; MB (10^6 bytes) are what an eager call allocates at its peak
beyond its gradients. liger-kernel and cut-cross-entropy, which cannot be captured in a graph, are timed where they are
installed.

The part lstm runs forward and backward with all gradients: under autocast to bfloat16, and in float32 with TF32 allowed
(PyTorch's default for cuDNN) and forbidden. "host" is the time until an eager call returns, in microseconds; "eager" is
the time of an eager call among many, "graph" that of one in a CUDA graph, both in milliseconds.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

import econmt_ops
from econmt_ops.dispatch.rule import captured
from econmt_ops.linear_cross_entropy import recompute
from scripts.bench.gpu.frame import (
    DEVICE,
    arguments,
    chosen_parts,
    compiled_by_workers,
    heading,
    milliseconds,
)
from scripts.bench.layers import Call, in_turns, peak_bytes, relative

LAYERS = ((6400, 512, 32_000), (12_800, 512, 7709), (8192, 2048, 128_256))
"""Rows, inputs and words of the output layer."""
SEQUENCES = (
    (256, 50, 128, 1),
    (64, 100, 512, 1),
    (64, 100, 512, 2),
    (16, 1024, 768, 1),
    (128, 100, 1024, 1),
    (1, 1024, 512, 1),
    (256, 256, 128, 1),
    (32, 35, 200, 1),
    (32, 35, 200, 2),
    (16, 20, 64, 1),
)
"""Batch, steps, hidden size and number of layers of the LSTM."""
PRECISIONS = ("bfloat16", "tf32", "ieee")
TURNS = 9
LARGE = recompute.LARGE_VOCABULARY


def by_econmt(large: int, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Computes the loss by econmt_ops, which divides vocabularies from ``large`` words on by words, not by rows."""
    recompute.LARGE_VOCABULARY = large
    return econmt_ops.linear_cross_entropy(hidden, weight, targets)


def by_torch(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Computes the loss by torch, with the softmax in float32."""
    return functional.cross_entropy(functional.linear(hidden, weight).float(), targets)


def losses() -> tuple[dict[str, Call], list[str]]:
    """Returns functions of hidden states, weight and targets, and the names of those that no graph can capture."""
    functions: dict[str, Call] = {
        "ours": partial(by_econmt, LARGE),
        "ours, by rows": partial(by_econmt, 1 << 62),
        "ours, by words": partial(by_econmt, 0),
        "torch": by_torch,
    }
    others: dict[str, Call] = {}
    if importlib.util.find_spec("liger_kernel"):
        liger = importlib.import_module("liger_kernel.transformers").LigerFusedLinearCrossEntropyLoss()
        others["Liger"] = lambda hidden, weight, targets: liger(weight, hidden, targets)
    if importlib.util.find_spec("cut_cross_entropy"):
        others["cut cross-entropy"] = importlib.import_module("cut_cross_entropy").linear_cross_entropy
    return {**functions, **others}, list(others)


def loss_gradients(loss: Call, hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
    """Returns the gradients of hidden states and weight."""
    return torch.autograd.grad(loss(hidden, weight, targets), (hidden, weight))


def output() -> None:
    """Measures both passes of the output layer and its loss."""
    functions, uncaptured = losses()
    for rows, inner, words in LAYERS:
        draw = torch.Generator(DEVICE).manual_seed(1)
        make = partial(torch.randn, generator=draw, device=DEVICE)
        hidden = make(rows, inner).bfloat16().requires_grad_()
        weight = make(words, inner).mul_(0.02).bfloat16().requires_grad_()
        targets = torch.randint(words, (rows,), generator=draw, device=DEVICE)
        few = hidden.detach()[:1024].requires_grad_(), weight, targets[:1024]
        exact = [part.detach().double().requires_grad_() for part in few[:2]]
        loss = functional.cross_entropy(exact[0] @ exact[1].t(), few[2])
        wanted = [part.float() for part in torch.autograd.grad(loss, exact)]
        del exact, loss
        calls: dict[str, Call] = {}
        notes: dict[str, str] = {}
        for name, function in functions.items():
            errors = map(relative, loss_gradients(function, *few), wanted)
            note = f"errors {' '.join(f'{error:.1e}' for error in errors)}"
            calls[name] = partial(loss_gradients, function, hidden, weight, targets)
            calls[name]()
            torch.cuda.synchronize()
            peak = peak_bytes(calls[name], DEVICE) - hidden.nbytes - weight.nbytes
            notes[name] = f"{peak / 1e6:8.0f} MB  {note}"
        del wanted
        print(f"{rows} x {inner} x {words}")
        for name, taken in milliseconds(calls, TURNS, eager=uncaptured).items():
            print(f"  {name:20} {taken:8.3f} ms {notes[name]}", flush=True)


class Stack:
    """An LSTM stack's training step without an optimizer.

    Args:
        kind: `torch.nn.LSTM` or `econmt_ops.LSTM`.
        shape: batch, steps, hidden size and number of layers.
        precision: one of `PRECISIONS`.
    """

    def __init__(self, kind: Call, shape: tuple[int, int, int, int], precision: str) -> None:
        batch, steps, hidden, layers = shape
        torch.manual_seed(1)
        self.module = kind(hidden, hidden, layers, batch_first=True, device=DEVICE)
        self.inputs = torch.randn(batch, steps, hidden, device=DEVICE, requires_grad=True)
        self.incoming = torch.randn(batch, steps, hidden, device=DEVICE)
        self.lowered = precision == "bfloat16"

    def __call__(self) -> tuple[Tensor, ...]:
        """Returns the outputs (B, T, H) and all gradients."""
        with torch.autocast("cuda", torch.bfloat16, enabled=self.lowered):
            outputs: Tensor = self.module(self.inputs)[0]
        leaves = [self.inputs, *self.module.parameters()]
        return outputs, *torch.autograd.grad(outputs, leaves, self.incoming.to(outputs.dtype))

    def error(self) -> float:
        """Returns the largest error of the outputs and gradients against float64, as a ratio of norms."""
        module = self.module
        sizes = module.input_size, module.hidden_size, module.num_layers
        exact = torch.nn.LSTM(*sizes, batch_first=True, device=DEVICE).double()
        exact.load_state_dict(module.state_dict())
        inputs = self.inputs.detach().double().requires_grad_()
        outputs = exact(inputs)[0]
        wanted = outputs, *torch.autograd.grad(outputs, [inputs, *exact.parameters()], self.incoming.double())
        return max(map(relative, self(), wanted))


def host_and_eager(stacks: dict[str, Stack]) -> dict[str, tuple[float, float]]:
    """Returns by name the microseconds until a call returns and the milliseconds of a call among many, in turns."""
    eager = in_turns(stacks, TURNS, DEVICE)
    host: dict[str, list[float]] = {name: [] for name in stacks}
    for _, (name, stack) in itertools.product(range(5 * TURNS), stacks.items()):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        stack()
        host[name].append(1e6 * (time.perf_counter() - begin))
    return {name: (statistics.median(host[name]), 1e3 * eager[name].median) for name in stacks}


def allow_tf32(precision: str) -> None:
    """Sets PyTorch's switches; of the products outside of cuDNN they stay as they are by default."""
    torch.backends.cudnn.allow_tf32 = precision != "ieee"
    torch.backends.cuda.matmul.allow_tf32 = False


def compile_lstm(precision: str, shape: tuple[int, int, int, int]) -> None:
    """Runs a layer once over a few steps, which compiles its kernels."""
    allow_tf32(precision)
    Stack(econmt_ops.LSTM, (shape[0], 3, shape[2], 1), precision)()


def lstm() -> None:
    """Measures stacks of LSTM layers beside torch.nn.LSTM, with and without a CUDA graph."""
    kinds = {"ours": econmt_ops.LSTM, "nn.LSTM": torch.nn.LSTM}
    print(
        f"{'B x T x H x layers':20} precision  {'':8} {'host us':>8} {'eager ms':>9} {'graph ms':>9}  error"
    )
    for precision, shape in itertools.product(PRECISIONS, SEQUENCES):
        allow_tf32(precision)
        stacks = {name: Stack(kind, shape, precision) for name, kind in kinds.items()}
        errors = {name: stack.error() for name, stack in stacks.items()}
        calls = host_and_eager(stacks)
        with captured():
            graphs = milliseconds(stacks, TURNS)
        for name, (host, eager) in calls.items():
            print(
                f"{' x '.join(map(str, shape)):20} {precision:10} {name:8} {host:8.0f} {eager:9.3f} "
                f"{graphs[name]:9.3f}  {errors[name]:.1e}",
                flush=True,
            )
        ratios = calls["nn.LSTM"][1] / calls["ours"][1], graphs["nn.LSTM"] / graphs["ours"]
        print(f"{'':40} eager {ratios[0]:.2f}x, graph {ratios[1]:.2f}x", flush=True)


PARTS: dict[str, Callable[[], None]] = {"output": output, "lstm": lstm}


def main() -> None:
    parser = arguments(__doc__)
    parts, worker = chosen_parts(parser, PARTS)
    jobs = [partial(compile_lstm, *each) for each in itertools.product(PRECISIONS, SEQUENCES)]
    if "lstm" in parts and compiled_by_workers("gpu.peers", worker, jobs):
        return
    print(heading())
    for part in parts:
        PARTS[part]()


if __name__ == "__main__":
    main()
