"""Compiles kernels for GPUs that this machine does not have, by the calls that would launch them there.

Run as a program, in a process of its own, because there the interpreter is off:

    python -m tests.ops.triton.compiling CAPABILITY NAME...        for example 90

prints a JSON object: for each of these calls the registers and the bytes of stack and of shared memory of each kernel.
Without names they are those of `compiling_persistent`, disassembled, which takes longer than most compilations.
"""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from econmt_ops.backends.cuda.adam import AdamSettings
from econmt_ops.backends.protocol import AttentionBackward, AttentionInputs
from econmt_ops.backends.triton import adam_8bit, cells, persistent
from econmt_ops.backends.triton.attention import TritonAttention
from econmt_ops.core.arguments import Update
from tests.ops.simulated_gpu import simulated_gpu
from tests.ops.triton import (
    compiling_output,
    compiling_persistent,
    compiling_recurrence,
    compiling_scan_cells,
)

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


def pretend(capability: int) -> None:
    """Has Triton compile for a GPU of that capability, as if it were there."""
    driver.set_active(
        SimpleNamespace(
            get_current_device=lambda: 0,
            get_current_stream=lambda _device: 0,
            get_current_target=lambda: GPUTarget("cuda", capability, 32),
        )
    )


def compile_only(capability: int) -> list[Any]:
    """From now on a launch compiles its kernel for that capability and does no more; returns what has been compiled."""
    pretend(capability)
    compiled: list[Any] = []
    run = JITFunction.run

    def warm_up(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        compiled.append(run(self, *arguments, grid=grid, warmup=True, **options))

    JITFunction.run = warm_up
    return compiled


def resources(kernel: Any, *, disassembled: bool) -> dict[str, Any]:
    """What a compiled kernel takes of a multiprocessor, and some of its instructions if it is disassembled."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        found = subprocess.run(
            [CUOBJDUMP, "--dump-resource-usage", *(["--dump-sass"] if disassembled else []), file.name],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    usage = {name: int(value) for name, value in re.findall(r"(REG|STACK):(\d+)", found)}
    taken = {"name": kernel.metadata.name, "shared": kernel.metadata.shared}
    taken |= {"registers": usage["REG"], "stack": usage["STACK"]}
    if not disassembled:
        return taken
    return taken | {
        "wide products": len(re.findall(r"\bHGMMA\b", found)),
        "products": len(re.findall(r"\bHMMA\b", found)),
        "barriers between programs": len(re.findall(r"STRONG\.GPU", found)),
    }


def launches() -> dict[str, Callable[[], None]]:
    """Launches by name."""
    found: dict[str, Callable[[], None]] = {}
    for size in 512, 1024:
        for dtype in torch.bfloat16, torch.float32:
            for kind in (
                ("additive", "norm", "dot") if (size, dtype) == (512, torch.bfloat16) else ("additive",)
            ):
                found[f"{kind} {size} {str(dtype)[6:]}"] = lambda args=(size, dtype, kind): attend(*args)
    found["additive 300 bfloat16"] = lambda: attend(300, torch.bfloat16, "additive")
    found["cell 512 bfloat16"] = lambda: step(512, torch.bfloat16)
    found["adam 300"] = lambda: update(300)
    found["adam 512"] = lambda: update(512)
    found["adam 512 bfloat16"] = lambda: update(512, torch.bfloat16)
    return found


def update(columns: int, dtype: torch.dtype = torch.float32) -> None:
    """Adam with 8-bit moments: with a divisor and a step that may be skipped, or in one pass with the norm."""
    values, scales, scalar = torch.zeros(64, columns, dtype=dtype), torch.zeros(64, 2), torch.zeros(())
    codes = values.to(torch.int8), scales, values.to(torch.uint8), scales
    norm = dtype == torch.bfloat16
    others = (None, 1.0, None) if norm else (scalar, math.inf, scalar)
    settings = AdamSettings((0.9, 0.999), 1e-8, 0.01, True, scalar, *others)
    adam_8bit.run(settings, [Update(values, values, codes, {"step": scalar}, 3)], norm=norm)


def attend(size: int, dtype: torch.dtype, kind: str) -> None:
    """Forward, backward and the sum over steps; 16 positions, so that nothing is cut down for being short."""
    batch, positions = 16, 100
    keys = torch.zeros(batch, positions, size, dtype=dtype)
    score = None if kind == "dot" else torch.zeros(size)
    norm = (torch.zeros(size, dtype=dtype), torch.zeros(size, dtype=dtype)) if kind == "norm" else None
    lengths = torch.zeros(batch, dtype=torch.int64)
    kernels = TritonAttention(AttentionInputs(keys, keys, score, norm, 1.0, lengths))
    both, output = torch.zeros(batch, 2 * size, dtype=dtype), torch.zeros(batch, size, dtype=dtype)
    weights, dscores = torch.zeros(batch, positions, dtype=dtype), torch.zeros(batch, positions)
    query, share = both[:, :size], both[:, size:]
    kernels.attend(query, share, weights, [output, output])
    back = AttentionBackward(query, output, weights, output, [output, output], None, both, dscores)
    kernels.backward(back)
    if score is not None:
        kernels.key_gradients(query, dscores)


def step(size: int, dtype: torch.dtype) -> None:
    """A cell, forward and back, and the states of a block."""
    gates, h = (torch.zeros(16, columns, dtype=dtype) for columns in (4 * size, size))
    c = torch.zeros(16, size)
    cells.forward(gates, c, c, [h, h])
    cells.backward(gates, c, c, [h, h], c, gates)
    persistent.scan_cells(gates.unsqueeze(0), c)


def every_launch(capability: int, *names: str) -> dict[str, Callable[[], object]]:
    """The launches of these names, those of other modules, too; without names one of each persistent kernel."""
    if not names:
        return dict(compiling_persistent.launches(capability))
    found: dict[str, Callable[[], object]] = dict(launches())
    for module in (compiling_output, compiling_recurrence, compiling_scan_cells):
        found.update(module.launches())
    others = [name for name in names if name not in found]
    found.update(compiling_persistent.launches(capability, *others) if others else {})
    return {name: found[name] for name in names if name in found}


def taken(capability: int, *names: str) -> dict[str, list[dict[str, Any]]]:
    """What the kernels of these calls take; without names those of the persistent kernels, disassembled."""
    compiled, found = compile_only(capability), {}
    with simulated_gpu(capability=divmod(capability, 10)):
        for name, call in every_launch(capability, *names).items():
            compiled.clear()
            call()
            found[name] = [resources(kernel, disassembled=not names) for kernel in compiled]
    return found


if __name__ == "__main__":
    print(json.dumps(taken(int(sys.argv[1]), *sys.argv[2:])))
