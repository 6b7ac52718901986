"""Updates of a pipeline over layers on several GPUs of one host, beside those of one of them.

    torchrun --nproc-per-node 2 scripts/gpu/bench_pipeline.py
    torchrun --nproc-per-node 2 scripts/gpu/bench_pipeline.py --device cpu      # processes of one thread each
    torchrun --nproc-per-node 2 scripts/gpu/bench_pipeline.py --device cpu --tiny      # whether it runs

Each row is run by processes of its own, with a limit of time, so that one that fails or hangs costs the others nothing;
of a failure the first line is told. The losses of the first update must agree, and those of the last are told.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from datetime import timedelta
from typing import NamedTuple

import torch
from torch import distributed

from econmt.engine.precision import precision_of
from econmt.parallel.pipeline_timing import Run, Timed, alone, pipelined
from econmt.parallel.stages import Stages
from econmt.recipe import Recipe, load_recipe
from econmt.tasks.protocol import Shape

TOLERANCE = {"float32": 1e-5, "tf32": 1e-3, "bfloat16": 5e-3}
"""By precision, how far apart the first losses may be."""


TURNS = 3
"""Both sides are timed by turns, so often."""


class Case(NamedTuple):
    """A row: its title, the recipe and its overrides, the sizes of vocabularies, the shape of batches."""

    title: str
    recipe: str
    overrides: tuple[str, ...]
    sizes: tuple[int, ...]
    shape: Shape

    def read(self) -> Recipe:
        """The recipe."""
        return load_recipe(self.recipe, self.overrides)


def language_model(rows: int, hidden: int, steps: int, vocabulary: int) -> Case:
    """Eight layers."""
    overrides = (
        "model.layers=8",
        f"model.size={hidden}",
        f"model.embedding={hidden}",
        "model.weight_tying=none",
        f"training.batch.size={rows}",
        f"training.bptt={steps}",
    )
    title = f"language model, 8 x {hidden}, {rows} x {steps}"
    return Case(title, "wikitext2", overrides, (vocabulary,), Shape(rows, 1, steps))


def gnmt(rows: int, positions: int, vocabulary: int, *overrides: str) -> Case:
    """Four layers a side, attention from the bottom one of the decoder."""
    title = f"gnmt, 4 + 4 layers, {rows} x {positions} x {positions}"
    return Case(title, "gnmt", overrides, (vocabulary, vocabulary), Shape(rows, positions, positions))


def cases(tiny: bool, device: str) -> list[Case]:
    """All rows."""
    if not tiny and device == "cpu":
        return [language_model(32, 512, 35, 10_000), language_model(32, 512, 70, 10_000)]
    if tiny:
        small = (
            "model.embedding=16",
            "model.encoder.size=16",
            "model.decoder.size=16",
            "model.attention.size=16",
        )
        return [language_model(4, 16, 10, 50), gnmt(4, 6, 50, *small)]
    return [
        language_model(64, 1024, 70, 33_280),
        language_model(128, 1024, 70, 33_280),
        gnmt(128, 25, 32_000),
        gnmt(128, 50, 32_000),
    ]


def row(case: Case, options: argparse.Namespace) -> None:
    """Times a case, in a process of each rank."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cpu")
    if options.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    limit = timedelta(seconds=options.limit)
    distributed.init_process_group("gloo", rank=rank, world_size=size, timeout=limit)
    recipe = case.read()
    precision = precision_of(options.precision, device, [recipe])
    run = Run(recipe, case.sizes, case.shape, precision, device, graphs=not options.eager)
    torch.set_num_threads(1)
    many = pipelined(run, Stages(size, device))
    one = alone(run) if rank == 0 else None
    for _ in range(TURNS):
        many.turn(options.updates)
        distributed.barrier()
        if one is not None:
            torch.set_num_threads(size)  # of a CPU: as many as all ranks have
            one.turn(options.updates)
            torch.set_num_threads(1)
        distributed.barrier()
    if one is not None:
        print(told(case, one.timed, many.timed, size, precision.name, device.type == "cpu"), flush=True)
        for note in (*one.timed.notes, *many.timed.notes):
            print(f"  {note}", flush=True)
    distributed.barrier()


def told(case: Case, one: Timed, many: Timed, size: int, precision: str, cpu: bool) -> str:
    """The line of a case."""
    apart = abs(one.loss[0] - many.loss[0]) / abs(one.loss[0])
    verdict = "agree" if apart <= TOLERANCE[precision] else "DIFFER"
    busy = ""
    if cpu:
        busy = f", of a processor {1e3 * one.busy:.0f} ms and on rank 0 {1e3 * many.busy:.0f}"
    return (
        f"{case.title}, {precision}: 1 rank {one.rate:,.0f} tokens/s ({1e3 * one.seconds:.1f} ms), {size} ranks "
        f"{many.rate:,.0f} ({1e3 * many.seconds:.1f} ms), {many.rate / one.rate:.2f} times{busy}; losses {verdict} "
        f"({apart:.0e}), last {one.loss[1]:.4f} and {many.loss[1]:.4f}"
    )


def drive(options: argparse.Namespace) -> None:
    """Runs every row in a process of its own beside those of the other ranks."""
    rank, port = int(os.environ["RANK"]), int(os.environ["MASTER_PORT"])
    for number, case in enumerate(cases(options.tiny, options.device)):
        own = {key: value for key, value in os.environ.items() if not key.startswith("TORCHELASTIC_")}
        own["MASTER_PORT"] = str(port + 1 + number)
        command = [sys.executable, __file__, "--row", str(number), *sys.argv[1:]]
        try:
            done = subprocess.run(
                command, env=own, capture_output=True, text=True, timeout=options.limit, check=False
            )
            output, failure = done.stdout, first_error(done.stderr) if done.returncode else ""
        except subprocess.TimeoutExpired:
            output, failure = "", f"not done after {options.limit} s"
        if output:
            print(output, end="", flush=True)
        if failure:
            print(f"{case.title}: rank {rank}: {failure}", flush=True)


def first_error(text: str) -> str:
    """The last line of the first traceback."""
    lines = [line for line in text.splitlines() if line.strip()]
    begins = [number for number, line in enumerate(lines) if line.lstrip().startswith("Traceback")]
    own = lines[begins[0] + 1 :] if begins else lines
    found = next((line for line in own if not line.startswith(" ")), "no word of why")
    return found[:200]


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--updates", type=int, default=5, help="of each turn")
    parser.add_argument("--limit", type=int, default=150, help="seconds of a row")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--precision", default="auto", help="auto, float32, tf32 or bfloat16")
    parser.add_argument("--eager", action="store_true", help="launch every kernel instead of CUDA graphs")
    parser.add_argument("--tiny", action="store_true", help="tiny models")
    parser.add_argument("--row", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.row is None:
        drive(options)
    else:
        row(cases(options.tiny, options.device)[options.row], options)


if __name__ == "__main__":
    main()
