"""Times checksums of parameters and prepared files.

    python -m scripts.bench checksums --megabytes 10 100 1000

Files of random bytes are read as econmt reads them: parameters by ``read_tensors``, other files by size, time and
sample, or as a whole. ``warm`` is the processor's time of the fastest of several passes; ``cold`` is the wall-clock
time of one pass after the system has dropped the file from its cache.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from rich.console import Console

from econmt.bench.rows import Row, table
from econmt.checkpoint import tensor_files
from econmt.checkpoint.tensor_files import check_tensors, read_tensors, write_tensors
from econmt.data.fingerprints import describe, is_as_described
from scripts.bench.arguments import parser_of
from scripts.bench.layers import in_turns

PASSES = 5


def cold(path: Path, work: Callable[[], object]) -> float:
    """Returns the wall-clock milliseconds of one call after the system has dropped the file from its cache."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)
    began = time.perf_counter()
    work()
    return 1000 * (time.perf_counter() - began)


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
        warm = in_turns({"": work}, PASSES, torch.device("cpu"), time.process_time)[""]
        yield {"MB": megabytes, "file": name, "warm": 1e3 * min(warm.samples), "cold": cold(path, work)}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--megabytes", type=int, nargs="+", default=[10, 100, 1000], help="sizes of files")
    options = parser.parse_args(arguments)
    measured: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for size in options.megabytes:
            measured += rows(Path(folder), size)
    Console(width=80).print(table(measured, measured[0], "milliseconds"))


if __name__ == "__main__":
    main()
