"""Times output layer, optimizer and dropout on a GPU.

    python -m scripts.bench gpu.output                  # all parts, under a minute
    python -m scripts.bench gpu.output output dropout   # these parts

The parts are output, kernel, optimizer and dropout; tests compare them with float64. Times are milliseconds of forward
and backward in CUDA graphs, medians of replays. The peak is the memory of an eager call beyond its arguments. A case
that fails prints a line, and the next one follows.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from econmt_ops.dispatch.traits import implementations_of
from econmt_ops.linear_cross_entropy import recompute
from econmt_ops.optimizers.fused import FusedOptimizer
from econmt_ops.products.dropout import SeedCounter, dropout, keep_threshold
from scripts.bench.gpu.frame import (
    DEVICE,
    FAILURES,
    arguments,
    brief,
    chosen_parts,
    heading,
    kernel_times,
    milliseconds,
)
from scripts.bench.layers import Call, peak_bytes

with suppress(ImportError):  # --help works without Triton
    from econmt_ops.backends.triton import cross_entropy, random
    from econmt_ops.linear_cross_entropy import row_chunks

MEBI = 1 << 20
SIZES = ((6400, 512, 32_000), (12_800, 512, 7709), (12_800, 512, 17_191))
CHUNKS = (16, 32, 64, 128)


@contextmanager
def case(name: str) -> Iterator[None]:
    """Prints the error of a case that fails, and goes on."""
    try:
        yield
    except FAILURES as error:
        print(f"{name}: {brief(error)}", flush=True)


def timed(function: Callable[[], Any]) -> tuple[float, float]:
    """Returns the milliseconds of a call in a graph, and the MiB that an eager call allocates at its peak."""
    function()
    torch.cuda.synchronize()
    peak = peak_bytes(function, DEVICE) / MEBI
    return milliseconds({"": function})[""], peak


def layer(
    rows: int, hidden: int, vocabulary: int, dtype: torch.dtype, bias: bool = True
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Draws hidden states in the compute type, float32 weight and bias, and targets of which a tenth is ignored."""
    draw = torch.Generator(DEVICE).manual_seed(1)
    new = functools.partial(torch.randn, generator=draw, device=DEVICE)
    targets = torch.randint(vocabulary, (rows,), generator=draw, device=DEVICE)
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
    bias: Tensor | None,
    smoothing: float,
    softmax: torch.dtype,
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


def output() -> None:
    """Prints milliseconds and MiB of forward and backward of the output layer."""
    print("output layer, forward + backward in a graph: ms / MiB at the peak beyond the arguments")
    heads = ["torch 16", "torch 32", "recompute", *(f"triton {chunk} MiB" for chunk in CHUNKS)]
    print(" " * 38 + "".join(f"{head:>17}" for head in heads))
    for dtype, smoothing, size in (
        (d, s, n) for n in SIZES for d in (torch.bfloat16, torch.float32) for s in (0.0, 0.1)
    ):
        operands = layer(*size, dtype, bias=False)
        on_gpu = implementations_of("linear_cross_entropy")["triton"].function
        calls: list[tuple[Callable[..., Tensor], int]] = [
            (functools.partial(plain, softmax=dtype), 0),
            (functools.partial(plain, softmax=torch.float32), 0),
            (by(recompute.linear_cross_entropy), 0),
            *((by(on_gpu), chunk) for chunk in CHUNKS),
        ]
        cells = []
        for call, chunk in calls:
            before, row_chunks.CHUNK_BYTES = row_chunks.CHUNK_BYTES, chunk * MEBI or MEBI
            cells.append("failed")
            with case(f"{size} {dtype} {chunk}"):
                used, peak = timed(functools.partial(gradients, call, operands, smoothing=smoothing))
                cells[-1] = f"{used:8.3f} /{peak:7.0f}"
            row_chunks.CHUNK_BYTES = before
        name = f"{' x '.join(map(str, size))} {str(dtype)[6:]} smoothing {smoothing}"
        print(f"{name:38}" + "".join(f"{cell:>17}" for cell in cells), flush=True)


def kernel() -> None:
    """Prints times of the loss kernel alone, for logits that fit into the cache and others."""
    print("the loss kernel: us, TB/s of two reads and one write")
    targets = torch.randint(7000, (4096,), device=DEVICE)
    losses = torch.empty(4096, device=DEVICE)
    for rows, vocabulary, dtype in (
        (512, 32_000, torch.bfloat16),
        (2048, 32_000, torch.bfloat16),
        (2048, 7744, torch.bfloat16),
        (256, 32_000, torch.float32),
    ):
        with case(f"{rows} {vocabulary}"):
            logits = torch.randn(rows, vocabulary, device=DEVICE).to(dtype)
            inputs = (logits, vocabulary, targets[:rows], losses[:rows], None, 0.1, -100, True)
            used, _ = timed(functools.partial(cross_entropy.make_losses, *inputs))
            rate = 3 * logits.nbytes / used / 1e9
            print(f"{rows:5} x {vocabulary} {str(dtype)[6:]:9} {1e3 * used:6.1f} {rate:4.1f}", flush=True)


def kernels_of(function: Call) -> str:
    """Returns the number of kernels that a call launches, and those that take longest."""
    kernels = kernel_times(function)
    parts = ", ".join(f"{each.name[:40]} {each.microseconds:.0f} us" for each in kernels[:5])
    return f"{sum(each.launches for each in kernels)} launches: {parts}"


def optimizer() -> None:
    """Prints times of clipping and Adam over 26.6 million values in 24 tensors."""
    shapes = [(32_000, 512)] + 10 * [(2048, 512)] + 12 * [(2048,)] + [(4096, 60)]
    parameters = [nn.Parameter(torch.randn(shape, device=DEVICE)) for shape in shapes]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    values = sum(parameter.numel() for parameter in parameters)
    rate = torch.tensor(1e-3, device=DEVICE)
    with case("optimizer"):
        ours = FusedOptimizer(parameters, name="adam", learning_rate=rate)
        ours.prepare()

        def step() -> None:
            ours.clip("norm", 1.0)
            ours.step()

        used, peak = timed(step)
        moved = 36 * values / used / 1e9  # gradients twice; parameters and two moments, read and written
        print(f"clip + Adam, {values / 1e6:.1f} M values: {used:.3f} ms, {moved:.2f} TB/s, {peak:.1f} MiB")
        print("  " + kernels_of(step), flush=True)
    with case("torch's optimizer"):
        of_torch = torch.optim.Adam(parameters, lr=rate, fused=True, capturable=True)

        def torchs() -> None:
            nn.utils.clip_grad_norm_(parameters, 1.0)
            of_torch.step()

        print(f"  torch's clip_grad_norm_ and fused Adam: {timed(torchs)[0]:.3f} ms", flush=True)


def dropped() -> None:
    """Prints times of dropout of (128, 100, 512)."""
    for dtype in (torch.bfloat16, torch.float32):
        values = torch.randn(128, 100, 512, device=DEVICE, dtype=dtype, requires_grad=True)
        incoming = torch.randn_like(values)
        seeds = SeedCounter(1, DEVICE)
        seed = seeds.draw()

        def both(
            drop: Callable[[Tensor], Tensor], values: Tensor = values, incoming: Tensor = incoming
        ) -> None:
            torch.autograd.grad(drop(values), values, incoming)

        cells = []
        for name, drop in (
            ("ours", lambda values, seed=seed: dropout(values, 0.2, seed, index=1)),
            ("variational", lambda values, seed=seed: dropout(values, 0.2, seed, True)),
            ("torch", lambda values: functional.dropout(values, 0.2)),
        ):
            with case(f"dropout {name}"):
                used, peak = timed(functools.partial(both, drop))
                cells.append(f"{name} {1e3 * used:.1f} us / {peak:.0f} MiB")
        with case("mask"):
            make = functools.partial(random.keep_mask, values.numel(), seed, 1, keep_threshold(0.2))
            cells.append(f"mask alone {1e3 * timed(make)[0]:.1f} us")
        print(
            f"dropout 128 x 100 x 512 {str(dtype)[6:]}, forward + backward: " + ", ".join(cells), flush=True
        )


PARTS: dict[str, Callable[[], None]] = {
    "output": output,
    "kernel": kernel,
    "optimizer": optimizer,
    "dropout": dropped,
}


def main() -> None:
    parts, _ = chosen_parts(arguments(__doc__), PARTS)
    began = time.perf_counter()
    print(heading())
    for part in parts:
        with case(part):
            PARTS[part]()
        print(f"[{part}: {time.perf_counter() - began:.0f} s]", flush=True)


if __name__ == "__main__":
    main()
