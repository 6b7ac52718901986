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
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

import econmt_ops
from econmt.bench.rows import Row
from econmt_ops.dispatch.rule import captured
from scripts.bench.frame import CUDA, Bench, Call, in_turns, milliseconds
from scripts.bench.layers import peak_bytes, relative

LAYERS = ((6400, 512, 32_000), (12_800, 512, 7709), (8192, 2048, 128_256))
"""Rows, inputs and words of the output layer."""
SEQUENCES = (
    (256, 50, 128, 1), (64, 100, 512, 1), (64, 100, 512, 2), (16, 1024, 768, 1), (128, 100, 1024, 1),
    (1, 1024, 512, 1), (256, 256, 128, 1), (32, 35, 200, 1), (32, 35, 200, 2), (16, 20, 64, 1),
)  # fmt: skip
"""Batch, steps, hidden size and number of layers of the LSTM."""
PRECISIONS = ("bfloat16", "tf32", "ieee")
TURNS = 9


def by_torch(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Computes the loss by torch, with the softmax in float32."""
    return functional.cross_entropy(functional.linear(hidden, weight).float(), targets)


def losses() -> tuple[dict[str, Call], list[str]]:
    """Returns functions of hidden states, weight and targets, and the names of those that no graph can capture."""
    functions: dict[str, Call] = {"econmt": econmt_ops.linear_cross_entropy, "torch": by_torch}
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


def output() -> Iterator[Row]:
    """Yields both passes of the output layer and its loss."""
    functions, uncaptured = losses()
    for rows, inner, words in LAYERS:
        draw = torch.Generator(CUDA).manual_seed(1)
        make = partial(torch.randn, generator=draw, device=CUDA)
        hidden = make(rows, inner).bfloat16().requires_grad_()
        weight = make(words, inner).mul_(0.02).bfloat16().requires_grad_()
        targets = torch.randint(words, (rows,), generator=draw, device=CUDA)
        few = hidden.detach()[:1024].requires_grad_(), weight, targets[:1024]
        exact = [part.detach().double().requires_grad_() for part in few[:2]]
        loss = functional.cross_entropy(exact[0] @ exact[1].t(), few[2])
        wanted = [part.float() for part in torch.autograd.grad(loss, exact)]
        del exact, loss
        calls: dict[str, Call] = {}
        notes: dict[str, Row] = {}
        for name, function in functions.items():
            errors = map(relative, loss_gradients(function, *few), wanted)
            calls[name] = partial(loss_gradients, function, hidden, weight, targets)
            calls[name]()
            torch.cuda.synchronize()
            peak = peak_bytes(calls[name], CUDA) - hidden.nbytes - weight.nbytes
            notes[name] = {"MB": round(peak / 1e6), "errors": " ".join(f"{error:.1e}" for error in errors)}
        del wanted
        for name, taken in milliseconds(calls, TURNS, eager=uncaptured).items():
            yield {
                "rows x width x words": f"{rows} x {inner} x {words}",
                "way": name,
                "ms": taken,
                **notes[name],
            }


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
        self.module = kind(hidden, hidden, layers, batch_first=True, device=CUDA)
        self.inputs = torch.randn(batch, steps, hidden, device=CUDA, requires_grad=True)
        self.incoming = torch.randn(batch, steps, hidden, device=CUDA)
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
        exact = torch.nn.LSTM(*sizes, batch_first=True, device=CUDA).double()
        exact.load_state_dict(module.state_dict())
        inputs = self.inputs.detach().double().requires_grad_()
        outputs = exact(inputs)[0]
        wanted = outputs, *torch.autograd.grad(outputs, [inputs, *exact.parameters()], self.incoming.double())
        return max(map(relative, self(), wanted))


def host_and_eager(stacks: dict[str, Stack]) -> dict[str, tuple[float, float]]:
    """Returns by name the microseconds until a call returns and the milliseconds of a call among many, in turns."""
    eager = in_turns(stacks, CUDA, turns=TURNS)
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


def lstm() -> Iterator[Row]:
    """Yields stacks of LSTM layers beside torch.nn.LSTM, with and without a CUDA graph."""
    kinds = {"econmt_ops": econmt_ops.LSTM, "torch.nn": torch.nn.LSTM}
    for precision, shape in itertools.product(PRECISIONS, SEQUENCES):
        allow_tf32(precision)
        stacks = {name: Stack(kind, shape, precision) for name, kind in kinds.items()}
        errors = {name: stack.error() for name, stack in stacks.items()}
        calls = host_and_eager(stacks)
        with captured():
            graphs = milliseconds(stacks, TURNS)
        for name, (host, eager) in calls.items():
            row: Row = {
                "precision": precision,
                "B x T x H x layers": " x ".join(map(str, shape)),
                "module": name,
            }
            row |= {"host us": round(host), "eager ms": f"{eager:.3f}", "graph ms": f"{graphs[name]:.3f}"}
            row["error"] = f"{errors[name]:.1e}"
            if name == "econmt_ops":
                row["eager, x"] = f"{calls['torch.nn'][1] / eager:.2f}"
                row["graph, x"] = f"{graphs['torch.nn'] / graphs[name]:.2f}"
            yield row


PARTS = {"output": output, "lstm": lstm}


def main(words: Sequence[str] | None = None) -> None:
    bench = Bench(__doc__, compiles=True, parts=PARTS)
    given = bench.begin(words)
    bench.device = CUDA
    jobs = [partial(compile_lstm, *each) for each in itertools.product(PRECISIONS, SEQUENCES)]
    if "lstm" in given.parts and bench.compiled(jobs):
        return
    bench.print_header()
    for part in given.parts:
        bench.report(PARTS[part](), part)
