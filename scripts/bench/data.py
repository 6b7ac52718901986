"""Measures start-up, memory and speed of a token store.

    python -m scripts.bench data --pairs 10000000

A store of random ids with realistic lengths is written directly and then read by a new process, as in training.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from scripts.bench.compare.measure import resident_bytes

VOCABULARY, CHUNK, MAX_LENGTH = 32_000, 250_000, 100
MEAN_LENGTH = 25.0
"""Mean tokens of a sentence."""


def generate(folder: Path, pairs: int) -> None:
    """Writes a store whose sentences have log-normal lengths, those of a pair correlated."""
    from econmt.data.batching.token_store import TokenStoreWriter

    draw = np.random.default_rng(1)
    spread = 0.55
    centre = np.log(MEAN_LENGTH) - spread**2 / 2
    writer = TokenStoreWriter(folder, "train", VOCABULARY)
    writer.begin_file(Path("generated.en"), Path("generated.de"))
    for first in range(0, pairs, CHUNK):
        rows = min(CHUNK, pairs - first)
        common = draw.normal(centre, spread, rows)
        source, target = (
            np.clip(np.exp(common + draw.normal(0, 0.12, rows)).round(), 1, MAX_LENGTH).astype(np.int32)
            for _ in "st"
        )
        tokens = draw.integers(4, VOCABULARY, int(source.sum() + target.sum()), dtype=np.uint16)
        writer.add_arrays(tokens, source, target, np.arange(first + 1, first + rows + 1))
    description = writer.finish()
    writer.close()
    (folder / "description.json").write_text(json.dumps(description), encoding="utf-8")


def memory() -> dict[str, int]:
    """Returns resident memory in MB (10^6 bytes), now and at its peak."""
    sizes = resident_bytes(Path("/proc/self/status").read_text(encoding="utf-8"))
    return {name: size // 1_000_000 for name, size in zip(("now", "peak"), sizes, strict=True)}


def read(name: str, batches: int) -> str:
    """Opens a folder's store and reads batches in order; returns the figures as JSON."""
    folder, began = Path(name), time.perf_counter()
    import torch

    result: dict[str, object] = {"torch_import_seconds": round(time.perf_counter() - began, 2)}
    result["torch"], result["memory_after_import_torch"] = torch.__version__, memory()

    from econmt.config.recipe import BatchSize
    from econmt.data.batching.batches import BatchIterator
    from econmt.data.batching.bucket_shapes import Derived
    from econmt.data.batching.pair_flops import PairFlops
    from econmt.data.batching.token_store import TokenStore

    rule = Derived(12, PairFlops(2, 9, 0))
    began = time.perf_counter()
    store = TokenStore(folder, "train", json.loads((folder / "description.json").read_text(encoding="utf-8")))
    iterator = BatchIterator(store, BatchSize(type="sentence", size=128), rule, 1, max_length=MAX_LENGTH)
    next(iterator)
    result["start_seconds"] = round(time.perf_counter() - began, 2)
    result["memory_after_start"] = memory()
    result["pairs"], result["batches_per_epoch"] = len(store), iterator.batches_per_epoch
    wanted = min(batches or iterator.batches_per_epoch, iterator.batches_per_epoch) - 1
    began, real, padded = time.perf_counter(), 0, 0
    for _ in range(wanted):
        batch = next(iterator).trimmed()
        real += batch.source_tokens + batch.target_tokens
        padded += batch.source.numel() + batch.target_output.numel()
    seconds = time.perf_counter() - began
    result["batches_read"], result["batches_per_second"] = wanted, round(wanted / seconds)
    result["tokens_per_second"] = round(real / seconds)
    result["real_share_of_padded"] = round(real / padded, 3)
    result["memory_at_end"] = memory()
    return json.dumps(result, indent=1)


def main(words: Sequence[str] | None = None) -> None:
    from scripts.bench.frame import Bench  # imports torch, which a reading process does not have yet

    bench = Bench(__doc__)
    add = bench.add_argument
    add("--pairs", type=int, default=10_000_000)
    add("--batches", type=int, default=20_000, help="batches of 128 to read; 0: a whole epoch")
    given = bench.begin(words)
    with tempfile.TemporaryDirectory(prefix="econmt-measure-") as name:
        folder, began = Path(name), time.perf_counter()
        generate(folder, given.pairs)
        size, seconds = sum(path.stat().st_size for path in folder.iterdir()), time.perf_counter() - began
        print(f"wrote {given.pairs:,} pairs, {size / 1e9:.2f} GB, in {seconds:.0f} s", file=sys.stderr)
        code = f"from scripts.bench import data; print(data.read({name!r}, {given.batches}))"
        subprocess.run([sys.executable, "-c", code], check=True)
