"""Times output layer, optimizer and dropout on a GPU.

    python -m scripts.bench gpu.output                  # all parts, under a minute
    python -m scripts.bench gpu.output output dropout   # these parts

The parts are output, packages, kernel, optimizer and dropout; tests compare them with float64. Times are milliseconds
of forward and backward in CUDA graphs, medians of replays. MiB are the peak of an eager call beyond its arguments. A
case that fails prints a line below the table. "packages" is the output layer with weights in bfloat16 beside
liger-kernel, quack-kernels and cut-cross-entropy, where they are installed, launched kernel by kernel. Errors are
relative to the norm of the exact gradients, MB (10^6 bytes) beyond the gradients.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import econmt_ops
from econmt.bench.rows import Row
from econmt_ops.dispatch.traits import implementations_of
from econmt_ops.linear_cross_entropy import recompute
from econmt_ops.optimizers.fused import FusedOptimizer
from econmt_ops.products.dropout import SeedCounter, dropout
from scripts.bench.frame import CUDA, FAILURES, Bench, Call, brief, figures_of, milliseconds
from scripts.bench.layers import kernel_times, peak_bytes, relative

with suppress(ImportError):  # --help works without Triton
    from econmt_ops.backends.triton import cross_entropy
    from econmt_ops.linear_cross_entropy import row_chunks

MEBI = 1 << 20
SIZES = ((6400, 512, 32_000), (12_800, 512, 7709), (12_800, 512, 17_191))
BESIDE_PACKAGES = (*SIZES[:2], (8192, 2048, 128_256), (4096, 4096, 128_256))
CHUNKS = (16, 32, 64, 128)


def timed(function: Callable[[], Any]) -> Row:
    """Returns the milliseconds of a call in a graph, and the MiB that an eager call allocates at its peak."""

    def measure() -> Row:
        function()
        torch.cuda.synchronize()
        peak = peak_bytes(function, CUDA) / MEBI
        return {"ms": milliseconds({"": function})[""], "MiB": round(peak, 1)}

    return figures_of(measure)


def layer(
    rows: int, hidden: int, vocabulary: int, dtype: torch.dtype, bias: bool = True
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Draws hidden states in the compute type, float32 weight and bias, and targets of which a tenth is ignored."""
    draw = torch.Generator(CUDA).manual_seed(1)
    new = functools.partial(torch.randn, generator=draw, device=CUDA)
    targets = torch.randint(vocabulary, (rows,), generator=draw, device=CUDA)
    targets[::10] = -100
    return (
        new(rows, hidden).to(dtype).requires_grad_(),
        new(vocabulary, hidden).mul_(0.05).requires_grad_(),
        targets,
        new(vocabulary).requires_grad_() if bias else None,
    )


def plain(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    smoothing: float = 0.0,
    softmax: torch.dtype = torch.float32,
) -> Tensor:
    """Computes torch's layer and loss, with the softmax in type ``softmax``."""
    bias = None if bias is None else bias.to(hidden.dtype)
    logits = functional.linear(hidden, weight.to(hidden.dtype), bias).to(softmax)
    return functional.cross_entropy(logits, targets, label_smoothing=smoothing)


def gradients(loss: Callable[..., Tensor], operands: tuple[Any, ...], **options: Any) -> list[Tensor]:
    """Returns the loss and its gradients."""
    value = loss(*operands, **options)
    leaves = [tensor for tensor in operands if tensor is not None and tensor.requires_grad]
    return [value.detach(), *torch.autograd.grad(value * 0.5, leaves)]


def by(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Gives an implementation of the op the arguments of `plain`."""

    def loss(
        hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, smoothing: float
    ) -> Tensor:
        options = {"label_smoothing": smoothing, "ignore_index": -100, "reduction": "mean"}
        return function(hidden, weight, targets, bias=bias, **options)

    return loss


def output() -> Iterator[Row]:
    """Yields both passes of the output layer: milliseconds, and MiB at the peak beyond the arguments."""
    for size, dtype, smoothing in product(SIZES, (torch.bfloat16, torch.float32), (0.0, 0.1)):
        operands = layer(*size, dtype, bias=False)
        on_gpu = implementations_of("linear_cross_entropy")["triton"].function
        calls: list[tuple[str, Callable[..., Tensor], int]] = [
            ("torch, 16-bit softmax", functools.partial(plain, softmax=dtype), 1),
            ("torch, float32 softmax", functools.partial(plain, softmax=torch.float32), 1),
            ("recompute", by(recompute.linear_cross_entropy), 1),
            *((f"triton, {chunk} MiB", by(on_gpu), chunk) for chunk in CHUNKS),
        ]
        shape: Row = {"rows x width x words": " x ".join(map(str, size)), "dtype": str(dtype)[6:]}
        for name, call, chunk in calls:
            before, row_chunks.CHUNK_BYTES = row_chunks.CHUNK_BYTES, chunk * MEBI
            run = functools.partial(gradients, call, operands, smoothing=smoothing)
            yield {**shape, "smoothing": str(smoothing), "way": name, **timed(run)}
            row_chunks.CHUNK_BYTES = before


def installed() -> dict[str, Call]:
    """Returns the output layers and losses of the packages that are installed, by name."""
    ways: dict[str, Call] = {}
    with suppress(ImportError):
        whole = importlib.import_module("liger_kernel.ops.fused_linear_cross_entropy")
        ways["Liger"] = lambda *operands: whole.LigerFusedLinearCrossEntropyFunction.apply(*operands)[0]
    with suppress(ImportError):
        hopper = importlib.import_module("liger_kernel.ops.cutedsl.ops.fused_scaled_cross_entropy_sm90")

        def mean(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
            losses: Tensor = hopper.LigerFusedScaledCrossEntropySM90Function.apply(hidden, weight, targets)
            return losses.sum() / (targets >= 0).sum()

        ways["Liger, Hopper"] = mean
    with suppress(ImportError):
        chunked = importlib.import_module("quack.linear_cross_entropy").chunked_linear_cross_entropy
        for rows in (1024, 4096):
            ways[f"QuACK, {rows:,} rows"] = functools.partial(chunked, chunk_size=rows)
    with suppress(ImportError):
        ways["cut cross-entropy"] = importlib.import_module("cut_cross_entropy").linear_cross_entropy
    return ways


def packages() -> Iterator[Row]:
    """Yields both passes of the output layer and its loss beside other packages, compared on 1,024 rows first."""
    captured: dict[str, Call] = {"econmt": econmt_ops.linear_cross_entropy, "torch": plain}
    known = captured | installed()
    for size in BESIDE_PACKAGES:
        hidden, weight, targets, _ = layer(*size, torch.bfloat16, bias=False)
        weight = weight.detach().bfloat16().requires_grad_()
        few = hidden.detach()[:1024].requires_grad_(), weight, targets[:1024]
        exact = (*(part.detach().double().requires_grad_() for part in few[:2]), few[2])
        wanted = gradients(plain, exact, softmax=torch.float64)[1:]
        notes: dict[str, str] = {}
        for name, way in known.items():
            try:
                found = map(relative, gradients(way, few)[1:], wanted)
                notes[name] = " ".join(f"{error:.1e}" for error in found)
            except FAILURES as error:
                print(f"{name} of {size}: {brief(error)}", flush=True)
        ways = {name: known[name] for name in notes}
        calls = {
            name: functools.partial(gradients, way, (hidden, weight, targets)) for name, way in ways.items()
        }
        times = milliseconds(calls, eager=set(ways) - set(captured))
        for name, call in calls.items():
            call()  # cuBLAS allocates its workspace
            peak = peak_bytes(call, CUDA) - hidden.nbytes - weight.nbytes
            row: Row = {"rows x width x words": " x ".join(map(str, size)), "way": name, "ms": times[name]}
            yield row | {"MB": round(peak / 1e6), "errors": notes[name]}


def kernel() -> Iterator[Row]:
    """Yields times of the loss kernel alone, for logits that fit into the cache and others: two reads and a write."""
    targets = torch.randint(7000, (4096,), device=CUDA)
    losses = torch.empty(4096, device=CUDA)
    for rows, vocabulary, dtype in (
        (512, 32_000, torch.bfloat16),
        (2048, 32_000, torch.bfloat16),
        (2048, 7744, torch.bfloat16),
        (256, 32_000, torch.float32),
    ):
        logits = torch.randn(rows, vocabulary, device=CUDA).to(dtype)
        inputs = (logits, vocabulary, targets[:rows], losses[:rows], None, 0.1, -100, True)
        row = {"rows": rows, "words": vocabulary, "dtype": str(dtype)[6:]}
        row |= timed(functools.partial(cross_entropy.make_losses, *inputs))
        yield row | ({"TB/s": 3 * logits.nbytes / row["ms"] / 1e9} if "ms" in row else {})


def optimizer() -> Iterator[Row]:
    """Yields times of clipping and Adam over 26.6 million values in 24 tensors, and the kernels that take longest."""
    shapes = [(32_000, 512)] + 10 * [(2048, 512)] + 12 * [(2048,)] + [(4096, 60)]
    parameters = [nn.Parameter(torch.randn(shape, device=CUDA)) for shape in shapes]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    values = sum(parameter.numel() for parameter in parameters)
    rate = torch.tensor(1e-3, device=CUDA)
    ours = FusedOptimizer(parameters, name="adam", learning_rate=rate)
    ours.prepare()
    of_torch = torch.optim.Adam(parameters, lr=rate, fused=True, capturable=True)

    def step() -> None:
        ours.clip("norm", 1.0)
        ours.step()

    def torch_step() -> None:
        nn.utils.clip_grad_norm_(parameters, 1.0)
        of_torch.step()

    for name, call in (("econmt", step), ("clip_grad_norm_ and fused Adam", torch_step)):
        row = {"clip + Adam": name, "values": values, **timed(call)}
        if "ms" in row:  # gradients twice; parameters and two moments, read and written
            row["TB/s"] = 36 * values / row["ms"] / 1e9
        yield row
    kernels = kernel_times(step)
    for each in kernels[:5]:
        yield {"clip + Adam": each.name[:40], "values": "", "ms": each.microseconds / 1e3}
    yield {"clip + Adam": "launches", "values": sum(each.launches for each in kernels)}


def dropped() -> Iterator[Row]:
    """Yields times of both passes of dropout of (128, 100, 512)."""
    seed = SeedCounter(1, CUDA).draw()
    for dtype in (torch.bfloat16, torch.float32):
        values = torch.randn(128, 100, 512, device=CUDA, dtype=dtype, requires_grad=True)
        incoming = torch.randn_like(values)
        ways: dict[str, Callable[[Tensor], Tensor]] = {
            "econmt": lambda values: dropout(values, 0.2, seed, index=1),
            "torch": lambda values: functional.dropout(values, 0.2),
        }
        calls: dict[str, Call] = {
            name: functools.partial(_both, drop, values, incoming) for name, drop in ways.items()
        }
        for name, call in calls.items():
            yield {"dropout 128 x 100 x 512": name, "dtype": str(dtype)[6:], **timed(call)}


def _both(drop: Callable[[Tensor], Tensor], values: Tensor, incoming: Tensor) -> None:
    torch.autograd.grad(drop(values), values, incoming)


PARTS = {"output": output, "packages": packages, "kernel": kernel, "optimizer": optimizer, "dropout": dropped}


def main(words: Sequence[str] | None = None) -> None:
    bench = Bench(__doc__, parts=PARTS)
    given = bench.begin(words)
    bench.device = CUDA
    bench.print_header()
    for part in given.parts:
        try:
            bench.report(PARTS[part](), part)
        except FAILURES as error:
            print(f"{part}: {brief(error)}", flush=True)
