"""Compiles the persistent kernels for one GPU without having it, and prints what each takes; see its test.

python compile_persistent.py 90 NAME ...
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from econmt_ops.backends.triton import persistent_kernels
from econmt_ops.backends.triton.persistent import Limits, plan

LIMITS = {80: Limits(108, 166_912), 86: Limits(84, 101_376), 90: Limits(132, 232_448)}
POINTERS = {
    "recurrent": "products",
    "exchange": "products",
    "cells": "fp32",
    "first_c": "fp32",
    "last_dc": "fp32",
    "state_c": "fp32",
    "state_dc": "fp32",
    "partials": "fp32",
    "counters": "i32",
    "lengths": "i64",
}
TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def constants(
    batch: int, hidden: int, back: bool, kind: str, products: str, lengths: bool, limits: Limits
) -> tuple[dict[str, Any], int]:
    """The compile-time arguments of a walk, and its warps."""
    found = plan(batch, hidden, TYPES[products], limits, back=back)
    assert found is not None
    chunks = found.chunks(4 * hidden if back else hidden)
    values: dict[str, Any] = {"H": hidden, "UNITS": found.units, "ROWS": found.rows, "SPLIT": found.split}
    values |= {"CHUNK": found.chunk, "CHUNKS": chunks, "AHEAD": min(found.ahead, chunks), "BACKWARDS": 0}
    values |= {
        "MASKED": found.masked(batch),
        "ROWS_FIRST": found.rows_first,
        "HAS_LENGTHS": lengths,
        "RING": kind != products,
        "PRECISION": "ieee",
    }
    values |= {"UP": False, "WAIT": True}
    if back:
        last = {"HAS_LAST_H": True, "HAS_LAST_C": True}
        return values | last | {"TEAM": found.team, "MULTIPLIES": True, "ENDS": True}, found.warps
    return values | {"HAS_FIRST": True, "KEEP_CELLS": True, "KEEP_SUMS": True, "D": 1}, found.warps


def compile_walk(
    capability: int, batch: int, hidden: int, back: bool, kind: str, products: str, lengths: bool
) -> dict[str, int]:
    """Registers, bytes of stack, bytes of shared memory, and matrix products of Hopper's and of older kinds."""
    limits = LIMITS[capability]
    constexprs, warps = constants(batch, hidden, back, kind, products, lengths, limits)
    kernel = persistent_kernels.lstm_backward if back else persistent_kernels.lstm_forward
    signature = {}
    for parameter in kernel.params:
        name = parameter.name
        if parameter.is_constexpr:
            signature[name] = "constexpr"
        elif parameter.do_not_specialize or name.startswith("doutputs_"):
            signature[name] = "i32"
        else:
            pointed = POINTERS.get(name, kind)
            signature[name] = "*" + (products if pointed == "products" else pointed)
    aligned = {
        (number,): [["tt.divisibility", 16]]
        for number, name in enumerate(kernel.arg_names)
        if signature[name].startswith("*") or name.startswith("doutputs_")
    }
    made = triton.compile(
        ASTSource(kernel, signature, constexprs, aligned),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": warps, "num_stages": 1, "launch_cooperative_grid": True},
    )
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        usage, code = (
            subprocess.run([tool, option, file.name], capture_output=True, text=True, check=True).stdout
            for option in ("--dump-resource-usage", "--dump-sass")
        )
    found = {name: int(value) for name, value in re.findall(r"(REG|STACK):(\d+)", usage)}
    return {
        "registers": found["REG"],
        "stack": found["STACK"],
        "shared": made.metadata.shared,
        "wide products": len(re.findall(r"HGMMA", code)),
        "products": len(re.findall(r"HMMA", code)),
        "barriers between programs": len(re.findall(r"STRONG\.GPU", code)),
    }


if __name__ == "__main__":
    for walk in json.loads(sys.argv[2]):
        print(json.dumps(compile_walk(int(sys.argv[1]), *walk)), flush=True)
