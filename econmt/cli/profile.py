"""``econmt profile``: where the bytes and the milliseconds of a training step go."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Annotated, Optional

import torch
import typer
from rich.console import Console

from econmt.cli.workload import Found, find_workload
from econmt.engine.devices import reproducible, resolve_device
from econmt.engine.precision import precision_of_run
from econmt.errors import InputError
from econmt.memory.measure.machine import describe_machine
from econmt.memory.plan.fit import Fit, fit
from econmt.memory.report.page import page
from econmt.memory.report.profiling import Profile, Say, Step, Technique, estimates, techniques
from econmt.memory.report.profiling import profile as measure_profile
from econmt.memory.report.tables import Report, fit_data, fit_table, print_report, report_data
from econmt.model import Implementations
from econmt.recipe import Recipe, load_recipe
from econmt.tasks.protocol import Shape
from econmt.training.files import write_text
from econmt.typed_yaml import parse_size
from econmt_ops.backends.steps import has_compiler
from econmt_ops.dispatch.rule import rules_only

FITTED = ("reference", "all", "all, bfloat16")
"""The techniques whose largest batches --fit --compare tells."""


def profile(
    context: typer.Context,
    recipe: Annotated[str, typer.Argument(help="Recipe: a YAML file or a shipped name.", show_default=False)],
    overrides: Annotated[
        Optional[list[str]],  # noqa: UP045  typer reads it at run time, on Python 3.10 too
        typer.Argument(
            metavar="[KEY=VALUE]...", help="Keys to change, e.g. ops.encoder=recompute.", show_default=False
        ),
    ] = None,
    bucket: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            metavar="SxT",
            help="Source x target positions, e.g. 100x80; else the recipe's worst bucket.",
            show_default=False,
        ),
    ] = None,
    batch: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(min=1, help="Sentence pairs, instead of the recipe's.", show_default=False),
    ] = None,
    compare: Annotated[bool, typer.Option("--compare", help="One row a technique.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as one JSON object.")] = False,
    trace: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="Write a PyTorch profiler trace of a step (chrome://tracing).", show_default=False),
    ] = None,
    html: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="Write one page with charts, for a browser.", show_default=False),
    ] = None,
    device: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="auto, cpu, cuda or cuda:N, instead of the recipe's.", show_default=False),
    ] = None,
    estimated: Annotated[
        bool, typer.Option("--estimate", help="Predict; no step is run, and no GPU is needed for cuda.")
    ] = False,
    measured: Annotated[
        bool, typer.Option("--measure", help="Run whole steps however long they take, if memory allows.")
    ] = False,
    budget: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--fit", metavar="BYTES", help="Largest batches in e.g. 8GiB.", show_default=False),
    ] = None,
    data_dir: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="Folder with the text; it is prepared if need be.", show_default=False),
    ] = None,
) -> None:
    """Say where the bytes and the milliseconds of a training step go, by layer; compare techniques; predict.

    \b
    Example:
      econmt profile iwslt --compare --html iwslt.html
      econmt profile iwslt --device cuda --estimate
      econmt profile iwslt --fit 8GiB --device cuda
    """
    _check(estimated, measured, budget, trace, html)
    size = None if budget is None else _bytes(budget)
    changes = [*(overrides or []), *([] if device is None else [f"training.device={device}"])]
    loaded = load_recipe(recipe, changes)
    predicted = estimated or size is not None
    where = _device(loaded.training.device, predicted)
    found = find_workload(recipe, loaded, bucket, batch, data_dir)
    run = _Run(found, where, predicted, measured, _command(context))
    if size is not None:
        run.fit(size, compare, as_json)
    else:
        run.profile(compare, as_json, trace, html)


class _Run:
    """One call of the verb.

    Args:
        found: what to profile.
        where: the device, which need not be there if ``predicted``.
        predicted: run nothing.
        measured: run whole steps however long they take.
        command: that was called, for the page.
    """

    def __init__(
        self, found: Found, where: torch.device, predicted: bool, measured: bool, command: str
    ) -> None:
        self.found, self.where, self.command = found, where, command
        self.predicted, self.measured = predicted, measured
        self.recipe = found.task.recipe
        precision = _precision(self.recipe, where, predicted)
        self.own = Technique("as in the recipe", Implementations.of(self.recipe.ops), precision)
        with rules_only(where.type) if predicted else nullcontext():
            self.compared = techniques(self.recipe.ops.stash, where.type, has_compiler() and not predicted)
        self.console = Console(highlight=False)
        if not self.console.is_terminal:
            self.console = Console(highlight=False, width=140)

    def profile(self, compare: bool, as_json: bool, trace: Path | None, html: Path | None) -> None:
        """Profile one technique or compare several; print, and write what was asked for."""
        rows = self.compared if compare else [self.own]
        with _progress() as say, reproducible(self.where, self.recipe.training.threads):
            profiles = self._profiles(rows, say)
            report = self._report(profiles)
            if trace is not None:
                shapes = (profile.timed_shape for profile in profiles)
                self._trace(next((shape for shape in shapes if shape is not None), None), trace, say)
        if html is not None:
            write_text(html, page(report))
        if as_json:
            print(json.dumps(report_data(report), indent=1))
            return
        print_report(report, self.console)
        for name, path in (("page", html), ("trace", trace)):
            if path is not None:
                print(f"{name}: {path}")

    def _profiles(self, rows: Sequence[Technique], say: Say) -> list[Profile]:
        task, shape = self.found.task, self.found.shape
        if not self.predicted:
            return measure_profile(task, rows, shape, self.where, patient=self.measured, say=say)
        ledgers = estimates(task, rows, shape, self.where.type, say)
        return [
            Profile(technique, shape, ledger, measured=False)
            for technique, ledger in zip(rows, ledgers, strict=True)
        ]

    def _report(self, profiles: list[Profile]) -> Report:
        sizes = self.found.task.sizes
        return Report(
            self.recipe.name,
            self.command,
            self.found.shape,
            sizes,
            str(self.where),
            _how(profiles, self.predicted),
            self.found.notes,
            describe_machine(str(self.where)),
            profiles,
        )

    def _trace(self, shape: Shape | None, path: Path, say: Say) -> None:
        if shape is None:
            raise InputError(
                f"--trace {path}: not even one row fits the free memory, so there is no step to trace"
            )
        say(f"tracing {shape}")
        step = Step(self.found.task, shape, self.where)
        step.use(self.own)
        step.trace(path)

    def fit(self, budget: int, compare: bool, as_json: bool) -> None:
        """Print the largest batch of each bucket."""
        rows = [each for each in self.compared if each.name in FITTED] if compare else [self.own]
        fits: dict[str, list[Fit]] = {technique.name: [] for technique in rows}
        start = self.found.shape.rows
        with _progress() as say:
            for technique in rows:
                for source, target in reversed(self.found.buckets):
                    say(f"fitting {source} x {target}: {technique.name}")
                    largest = fit(
                        self.found.task, technique, (source, target), budget, self.where.type, start
                    )
                    fits[technique.name].insert(0, largest)
                    start = max(1, largest.rows)
        if as_json:
            machine = describe_machine(str(self.where))
            record = {"recipe": self.recipe.name, "command": self.command, "device": str(self.where)}
            print(json.dumps({**record, "machine": machine, "fit": fit_data(fits, budget)}, indent=1))
            return
        precision = "" if compare else f", {str(self.own.precision).removeprefix('torch.')}"
        print(f"{self.recipe.name}, {self.where}{precision}; bytes are estimated, every row is full")
        self.console.print(fit_table(fits, budget))


def _check(
    estimated: bool, measured: bool, budget: str | None, trace: Path | None, html: Path | None
) -> None:
    """Refuse options that do not go together, and files that cannot be written.

    Raises:
        InputError: naming them.
    """
    if estimated and measured:
        raise InputError("--estimate runs no step and --measure runs whole ones; give one of them")
    if trace is not None and (estimated or budget is not None):
        raise InputError("--trace needs a real step; leave out --estimate and --fit")
    if budget is not None and (html is not None or measured):
        raise InputError("--fit prints a table of estimates; leave out --html and --measure")
    for path in (trace, html):
        if path is not None and path.is_dir():
            raise InputError(f"{path}: a folder; give the name of a file")
        if path is not None and not path.parent.is_dir():
            raise InputError(f"{path.parent}: no such folder")


def _bytes(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise InputError(f"--fit: {error}") from None


def _device(name: str, predicted: bool) -> torch.device:
    if name.partition(":")[0] == "cuda":
        if predicted:
            return torch.device("cuda")
        if not torch.cuda.is_available():
            raise InputError(
                f"device '{name}': torch sees no GPU here; add --estimate to predict without one, or give --device cpu"
            )
    return resolve_device(name)


def _precision(recipe: Recipe, where: torch.device, predicted: bool) -> torch.dtype:
    """As the recipe says; a prediction does not measure what is faster on the CPU where it is made."""
    if predicted and where.type == "cpu" and recipe.training.precision == "auto":
        return torch.float32
    return precision_of_run(recipe, where).dtype


def _how(profiles: Sequence[Profile], predicted: bool) -> str:
    """Where the figures come from."""
    guessed = [profile for profile in profiles if not profile.measured]
    if predicted:
        return "Bytes: estimated with fake tensors; no step was run."
    if not guessed:
        return "Bytes and times: measured."
    if len(guessed) < len(profiles):
        names = ", ".join(profile.technique.name for profile in guessed)
        return f"Bytes and times: measured; the device's memory is too small for {names}, whose bytes are estimated."
    timed = profiles[0].timed_shape
    if timed is None:
        return "Bytes: estimated with fake tensors; no step fits the free memory."
    return (
        f"Bytes: estimated with fake tensors. Times: measured with {timed.rows} of {profiles[0].shape.rows} rows; the "
        "whole batch does not fit the free memory or would take minutes (--measure runs it if it fits)."
    )


def _command(context: typer.Context) -> str:
    """The command that was called, as one would type it."""
    words = ["econmt", "profile"]
    for parameter in context.command.params:
        value = context.params.get(parameter.name or "")
        if value is None or value is False or value in ((), []):
            continue
        if parameter.param_type_name == "argument":
            words += value if isinstance(value, (list, tuple)) else [str(value)]
        else:
            words += [parameter.opts[0], *([] if value is True else [str(value)])]
    return shlex.join(words)


@contextmanager
def _progress() -> Iterator[Say]:
    """Something that says on a terminal what is being done."""
    with Console(stderr=True, highlight=False).status("") as status:
        yield lambda text: status.update(text)
