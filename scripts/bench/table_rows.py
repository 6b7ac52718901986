"""Rows of the documentation's tables that follow from the code: predicted bytes and sizes."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from econmt.bench.training import vocabulary_sizes
from econmt.checkpoint.tensor_files import quantized
from econmt.config.recipe import load_recipe
from econmt.data.text.corpus import find_corpus, read_pairs, search_path
from econmt.engine.devices import reproducible
from econmt.engine.precision import NAMED
from econmt.estimate.fit import fit_all
from econmt.estimate.techniques import Technique, estimator, techniques
from econmt.model import Implementations
from econmt.tasks.protocol import Shape, Task
from econmt.tasks.registry import task_of_sizes
from econmt_memory.measure.ledger import Ledger
from econmt_memory.report.tables import format_bytes
from econmt_ops.dispatch.rule import rules_only
from scripts.bench import filters
from scripts.bench.frame import ROOT

Row = Sequence[str]
Rows = Iterator[Row]
"""Cells of a Markdown table, the headings first."""

ECHO = Shape(128, 100, 100)
"""Batch of Echo's measurements: rows, source and target positions."""
FOUR_GIB = 4 << 30
RANKS = (128, 64, 32)
CERTAINTIES = (0.2, 0.5, 0.9)
KEYS = {
    "reference": "`ops={encoder: reference, decoder: reference, output: reference}`",
    "+ decoder": "`ops.decoder=recompute`",
    "+ encoder": "`ops.encoder=recompute`",
    "+ output": "`ops.output=recompute`",
    "all": "all three",
    "reference, bfloat16": "`reference` and `training.precision=bfloat16`",
    "all, bfloat16": "all three and `training.precision=bfloat16`",
}
"""Recipe keys of a technique."""


def _task(recipe: str, *changes: str) -> Task:
    """Returns the task of a recipe whose vocabularies are as large as the recipe lets them be."""
    loaded = load_recipe(str(ROOT / recipe) if "/" in recipe else recipe, changes)
    return task_of_sizes(loaded, vocabulary_sizes(loaded))


def _predicted(task: Task, rows: Sequence[Technique], shape: Shape, device: str) -> list[Ledger]:
    with reproducible(torch.device("cpu"), 1), rules_only(device):
        return [*map(estimator(task, shape, device, lambda _: None), rows)]


def _less(before: int, after: int) -> str:
    ratio = before / after
    return f"{ratio:.1f}x" if ratio >= 10 else f"{ratio:.2f}x"


def _parameters(task: Task) -> dict[str, torch.Size]:
    with torch.device("meta"):
        return {name: parameter.shape for name, parameter in task.build_model().named_parameters()}


def technique_rows() -> Rows:
    """Yields what each technique is predicted to keep and to take of Echo's step on a CPU.

    Each is compared with the reference in its own precision.
    """
    task = _task("iwslt")
    with rules_only("cpu"):
        compared = techniques(task.recipe.ops.stash, "cpu", False)
    yield "technique", "recipe", "stash", "times less", "peak", "times less"
    ledgers = dict(zip(compared, _predicted(task, compared, ECHO, "cpu"), strict=True))
    for technique, ledger in ledgers.items():
        less, reference = ["", ""], technique.compared_with(compared)
        if reference is not None and reference is not technique:
            before = ledgers[reference]
            less = [_less(before.stashed, ledger.stashed), _less(before.peak, ledger.peak)]
        stash, peak = format_bytes(ledger.stashed), format_bytes(ledger.peak)
        yield technique.name, KEYS[technique.name], stash, less[0], peak, less[1]


def stash_rows() -> Rows:
    """Yields what each value of ``ops.stash`` is predicted to keep of Echo's step on a CPU."""
    task, lean = _task("iwslt"), Implementations.leanest("cpu")
    yield "`ops.stash`", "float32: stash", "peak", "bfloat16: stash", "peak"
    for stash in ("outputs", "attention", "cells", "gates"):
        kept = lean._replace(stash=stash)
        both = [Technique("", kept, precision) for precision in (NAMED["float32"], NAMED["bfloat16"])]
        ledgers = _predicted(task, both, ECHO, "cpu")
        yield stash, *(format_bytes(size) for ledger in ledgers for size in (ledger.stashed, ledger.peak))


def fit_rows() -> Rows:
    """Yields the largest batches of Echo's model that are predicted to fit 4 GiB of a GPU."""
    task = _task("iwslt")
    yield "precision, both sides", "everything kept: rows", "econmt: rows", "times the rows"
    with reproducible(torch.device("cpu"), 1), rules_only("cuda"):
        named = {each.name: each for each in techniques(task.recipe.ops.stash, "cuda", False)}
        for precision in (NAMED["bfloat16"], NAMED["float32"]):
            narrow = "" if precision.name == "float32" else f", {precision.name}"
            ways = [named[name + narrow] for name in ("reference", "all")]
            fits = (fit_all(task, way, [ECHO[1:]], FOUR_GIB, "cuda", ECHO.rows) for way in ways)
            kept, lean = (next(found).rows for found in fits)
            yield precision.name, f"{kept:,}", f"{lean:,}", f"{lean / kept:.1f}"


def size_rows() -> Rows:
    """Yields parameters of models, and bytes of their files in each precision."""
    yield "recipe", "parameters", "float32", "bfloat16", "int8"
    for name in ("multi30k", "student"):
        shapes = _parameters(_task(name))
        tensors = {key: torch.ones(shape) for key, shape in shapes.items()}
        files = [tensors, *(quantized(tensors, each, Path(name)) for each in (torch.bfloat16, torch.int8))]
        sizes = [sum(tensor.nbytes for tensor in each.values()) for each in files]
        count = sum(shape.numel() for shape in shapes.values())
        yield f"`{name}`", f"{count:,}", *(f"{size / 1e6:.1f} MB" for size in sizes)


def rank_rows() -> Rows:
    """Yields parameters of recipe ``multi30k`` by the rank of its LSTMs."""
    yield "rank", "parameters", "in LSTMs", "in LSTMs, relative to whole matrices"
    unfactored = 0
    for rank in (None, *RANKS):
        keys = [] if rank is None else [f"model.encoder.rank={rank}", f"model.decoder.rank={rank}"]
        sizes = {name: shape.numel() for name, shape in _parameters(_task("multi30k", *keys)).items()}
        inside = sum(size for name, size in sizes.items() if "layers." in name)
        unfactored = unfactored or inside
        yield str(rank or "whole"), f"{sum(sizes.values()):,}", f"{inside:,}", f"{inside / unfactored:.2f}"


def filter_rows(data: Path | None) -> Rows:
    """Yields the shares of lines that the language filter takes for another language."""
    search = search_path(None, data)
    vietnamese = find_corpus("vlsp20-en-vi/news_valid", "en", "vi", search, progress=False)
    foreign = [target for _, target in read_pairs(vietnamese)]
    yield "text", "certainty", "correct pairs left out", "German found", "Vietnamese found"
    for text, prefix in (("Multi30k", "multi30k/train"), ("Tatoeba", "tatoeba-en-de/train")):
        classified = filters.Classified.of(prefix, foreign, search)
        for number, certainty in enumerate(CERTAINTIES):
            percents = (f"{100 * share:.2f} %" for share in classified.shares(certainty))
            yield "" if number else text, f"{certainty}", *percents


def quickstart_rows() -> Iterator[str]:
    """Yields some of the lines that training the recipe ``quickstart`` prints, in float32 with one thread."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "econmt", "train", "quickstart", "training.threads=1"]
        command += ["training.precision=float32", "training.device=cpu", f"output={folder}/quickstart"]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    for update in (50, 150, 300):
        yield next(line for line in output.splitlines() if re.match(f"checkpoint {update}:", line))
