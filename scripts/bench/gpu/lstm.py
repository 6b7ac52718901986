"""Times the persistent LSTM kernel against cuDNN.

    python -m scripts.bench gpu.lstm            # under 150 seconds, compiling included
    python -m scripts.bench gpu.lstm 128x1024   # only these batches and hidden sizes

All kernels are compiled in several processes first. Then a layer is repeated a thousand times, and layers of 100 steps
are timed in CUDA graphs. "ms" are whole layers, products and gradients included; "us" are microseconds a step of the
recurrence alone, the time of its kernels. A case that fails prints a line, and the next one follows.
tests/ops/triton/test_persistent_sizes.py compares these sizes with float64.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from econmt_ops.dispatch.device_limits import limits_of
from econmt_ops.products.stack import StackOptions
from scripts.bench.gpu.frame import (
    DEVICE,
    FAILURES,
    arguments,
    brief,
    compiled_by_workers,
    heading,
    kernel_times,
    milliseconds,
)
from scripts.bench.layers import Call, lstm_weights, passes, torch_lstm

with suppress(ImportError):  # --help works without Triton
    from econmt_ops.lstm import triton

STEPS = 100
SIZES = ["64x512", "128x512", "64x1024", "128x1024", "64x256", "128x256"]
"""Batches and hidden sizes."""
TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32 with fp16 products": torch.float32}


def layer(
    batch: int, hidden: int, dtype: torch.dtype, layers: int = 1, steps: int = STEPS
) -> dict[str, Call]:
    """Returns the passes of econmt's layers."""
    torch.manual_seed(1)
    stack = tuple(lstm_weights(hidden, torch.float32, DEVICE) for _ in range(layers))
    inputs = torch.randn(batch, steps, hidden, device=DEVICE).to(dtype).requires_grad_()
    zero = torch.zeros(batch, hidden, device=DEVICE)
    state = tuple((zero.to(dtype), zero) for _ in stack)

    def run() -> Tensor:
        return triton.lstm(inputs, stack, state, StackOptions(from_zero=True))[0]

    return passes(run, [inputs, *(part for each in stack for part in each)], torch.randn_like(inputs))


def cudnn(batch: int, hidden: int, dtype: torch.dtype, layers: int) -> dict[str, Call]:
    """Returns the passes of torch.nn.LSTM."""
    return torch_lstm(batch, STEPS, hidden, dtype, DEVICE, layers)


def directions(batch: int, hidden: int, together: str, steps: int = STEPS) -> dict[str, Call]:
    """Returns the passes of a bidirectional layer, in one launch ("yes") or one direction after the other ("no")."""
    ahead, back = (lstm_weights(hidden, torch.float32, DEVICE) for _ in range(2))
    inputs = torch.randn(batch, steps, hidden, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)

    def run() -> Tensor:
        return triton.bidirectional_lstm(inputs, ahead, back, lengths=None, together=together)[0]

    incoming = torch.randn(batch, steps, 2 * hidden, device=DEVICE, dtype=torch.bfloat16)
    return passes(run, [inputs, *ahead, *back], incoming)


def attempt(name: str, make: Callable[..., dict[str, Call]], *sizes: Any) -> str:
    """Returns the milliseconds of both passes in words."""
    try:
        torch.backends.cuda.matmul.allow_tf32 = True
        times = milliseconds(make(*sizes))
        return f"{name} {times['forward']:.3f} / {times['both']:.3f}"
    except FAILURES as error:
        return f"{name} {brief(error)}"


def time_layers(batch: int, hidden: int, layers: int = 1) -> str:
    """Returns a line with the times of econmt and cuDNN."""
    types = TYPES if layers == 1 else {"bf16": torch.bfloat16}
    parts = [attempt(f"ours {name}", layer, batch, hidden, dtype, layers) for name, dtype in types.items()]
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16), ("tf32", torch.float32)):
        parts.append(attempt(f"cuDNN {name}", cudnn, batch, hidden, dtype, layers))
    return f"ms forward / both: {'; '.join(parts)}"


def time_recurrence(batch: int, hidden: int) -> str:
    """Returns a line with the microseconds a step that the recurrence's kernels take in bfloat16."""
    try:
        both = layer(batch, hidden, torch.bfloat16)["both"]
        both()
        kernels = kernel_times(both)
    except FAILURES as error:
        return f"recurrence: {brief(error)}"
    steps = {
        way: sum(each.microseconds for each in kernels if f"lstm_{way}" in each.name) / STEPS
        for way in ("forward", "backward")
    }
    return f"recurrence: {', '.join(f'{way} {used:.2f} us' for way, used in steps.items())} a step"


def repeat(batch: int = 64, hidden: int = 512, times: int = 1000) -> str:
    """Counts the runs of a layer whose bits differ from those of the first."""
    both = layer(batch, hidden, torch.bfloat16)["both"]
    first, differing = both(), torch.zeros((), dtype=torch.int64, device=DEVICE)
    for _ in range(times):
        differing += torch.stack(
            [(one != other).any() for one, other in zip(first, both(), strict=True)]
        ).any()
    return f"{times} times forward and back, B {batch}, H {hidden}: {int(differing)} differ from the first"


def jobs(sizes: list[tuple[int, int]]) -> list[Call]:
    """Returns calls that compile every kernel, in layers of two steps."""
    made: list[Call] = []
    for batch, hidden in sizes:
        made += [lambda sizes=(batch, hidden, each, 1, 2): layer(*sizes)["both"]() for each in TYPES.values()]
    return made + [lambda together=each: directions(64, 512, together, 2)["both"]() for each in ("yes", "no")]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("sizes", nargs="*", metavar="BATCHxHIDDEN", help=f"some of {', '.join(SIZES)}")
    given = parser.parse_args()
    sizes = [(int(b), int(h)) for b, h in (text.split("x") for text in given.sizes or SIZES)]
    torch.backends.cuda.matmul.allow_tf32 = True
    begin = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - begin:5.1f} s] {text}", flush=True)

    if compiled_by_workers("gpu.lstm", given.compile, jobs(sizes)):
        return
    say(f"{heading()}, {limits_of(DEVICE)}; compiled")
    try:
        say(repeat())
    except FAILURES as error:
        say(f"repeating: {brief(error)}")
    for batch, hidden in sizes:
        say(f"B {batch}, H {hidden}: {time_layers(batch, hidden)}; {time_recurrence(batch, hidden)}")
    if (64, 512) in sizes:
        say(f"4 layers, B 64, H 512: {time_layers(64, 512, 4)}")
        for batch in (64, 128):
            parts = [attempt(f"together={each}", directions, batch, 512, each) for each in ("yes", "no")]
            say(f"both directions, B {batch}, H 512: {'; '.join(parts)}")


if __name__ == "__main__":
    main()
