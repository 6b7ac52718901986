"""Times checksums of parameters and prepared files.

    python -m scripts.bench checksums --megabytes 10 100 1000

Files of random bytes are read as econmt reads them: parameters by ``read_tensors``, other files by size, time and
sample, or as a whole. ``warm`` is the processor's time of the fastest of several passes; ``cold`` is the wall-clock
time of one pass after the system has dropped the file from its cache. Both are milliseconds.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from econmt.bench.rows import Row
from econmt.checkpoint import tensor_files
from econmt.checkpoint.tensor_files import check_tensors, read_tensors, write_tensors
from econmt.data.files import describe, is_as_described
from scripts.bench.data import forget
from scripts.bench.frame import CPU, Bench, in_turns


def read_unchecked(path: Path) -> object:
    """Reads parameters as if they had no checksum."""
    check = tensor_files.check_tensors
    try:
        tensor_files.check_tensors = tensor_files.read_metadata
        return read_tensors(path)
    finally:
        tensor_files.check_tensors = check


def rows(folder: Path, megabytes: int) -> Iterator[Row]:
    """Yields the operations on a file of this size, each with its milliseconds warm and cold."""
    parameters, text = folder / "params.safetensors", folder / "text"
    metadata = {"format": tensor_files.FORMAT, "update": "1"}
    write_tensors(parameters, {"weight": torch.rand(megabytes * 250_000)}, metadata)
    text.write_bytes(parameters.read_bytes())
    description = describe(text)
    works: list[tuple[str, Path, Callable[[], object]]] = [
        ("parameters read without checksum", parameters, lambda: read_unchecked(parameters)),
        ("parameters read with checksum", parameters, lambda: read_tensors(parameters)),
        ("parameters read back after a checkpoint", parameters, lambda: check_tensors(parameters)),
        ("text: size, time, sample", text, lambda: is_as_described(text, description, verify=False)),
        ("text: --verify", text, lambda: is_as_described(text, description, verify=True)),
    ]
    for name, path, work in works:
        warm = in_turns({"": work}, CPU, turns=5, clock=time.process_time)[""]
        forget(path)
        began = time.perf_counter()
        work()
        cold = time.perf_counter() - began
        yield {"MB": megabytes, "file": name, "warm": 1e3 * min(warm.samples), "cold": 1e3 * cold}


def main(words: Sequence[str] | None = None) -> None:
    bench = Bench(__doc__)
    bench.add_argument("--megabytes", type=int, nargs="+", default=[10, 100, 1000], help="sizes of files")
    given = bench.begin(words)
    with tempfile.TemporaryDirectory() as folder:
        bench.report(row for size in given.megabytes for row in rows(Path(folder), size))
