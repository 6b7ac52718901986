"""Measures whether the memory of a process grows: samples it for a while and reports whether it stays flat.

python -m scripts.soak run --minutes 31 --csv training.csv -- \\
    econmt train quickstart training.max_updates=1000000 training.early_stopping.max_num_checkpoint_not_improved=null
python -m scripts.soak run --minutes 31 --csv translating.csv --feed test.en -- econmt translate -m runs/quickstart
python -m scripts.soak draw training.csv translating.csv --picture soak.png

Resident memory is that of the command and all that it starts. It is flat if, from the second minute on, the mean of no
minute lies more than 5 % above that of another. `run` and `draw` end with 1 if it is not.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import itertools
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import IO, NamedTuple

from scripts.bench.compare.measure import end, process_memory, process_tree
from scripts.bench.frame import draw_lines

SECONDS_BETWEEN = 2.0
FIRST_MINUTE = 2
MOST_GROWTH = 0.05


class Sample(NamedTuple):
    """Seconds since the command began, and bytes that it had resident then."""

    seconds: float
    resident: int


def minutes_of(samples: Iterable[Sample]) -> dict[int, float]:
    """Returns the mean of each full minute, in bytes, by its number from 0, without the last minute."""
    grouped = {
        minute: [sample.resident for sample in group]
        for minute, group in itertools.groupby(samples, key=lambda sample: int(sample.seconds // 60))
    }
    return {minute: sum(grouped[minute]) / len(grouped[minute]) for minute in list(grouped)[:-1]}


def growth(samples: Iterable[Sample]) -> float:
    """Returns the growth from the smallest to the largest minute, from minute ``FIRST_MINUTE`` on.

    Raises ValueError if there are fewer than two such minutes.
    """
    means = [mean for minute, mean in minutes_of(samples).items() if minute >= FIRST_MINUTE]
    if len(means) < 2:
        raise ValueError(f"fewer than two full minutes from minute {FIRST_MINUTE} on; soak for longer")
    return max(means) / min(means) - 1.0


def verdict(name: str, samples: Sequence[Sample]) -> tuple[bool, str]:
    """Returns True if memory stays flat, and one line that says so."""
    share, means = growth(samples), minutes_of(samples)
    last = max(means)
    flat = share <= MOST_GROWTH
    word = "flat" if flat else "GROWS"
    return flat, (
        f"{name}: {word}: {means[FIRST_MINUTE] / 1e6:.0f} MB in minute {FIRST_MINUTE}, {means[last] / 1e6:.0f} MB in "
        f"minute {last}, minutes differ by at most {100 * share:.1f} %"
    )


def read(path: Path) -> list[Sample]:
    """Reads the samples of a file that :func:`run` wrote."""
    with path.open(encoding="utf-8", newline="") as file:
        return [Sample(float(row["seconds"]), int(row["resident_bytes"])) for row in csv.DictReader(file)]


def feed(stream: IO[bytes], text: bytes) -> None:
    """Writes a text again and again until its reader is gone."""
    with contextlib.suppress(OSError), stream:
        while True:
            stream.write(text)


def run(command: Sequence[str], minutes: float, path: Path, text: bytes | None) -> list[Sample]:
    """Runs a command for some minutes and writes a sample every ``SECONDS_BETWEEN`` seconds.

    Raises ValueError if the command ends earlier.
    """
    samples: list[Sample] = []
    with path.open("w", encoding="utf-8", newline="") as file, contextlib.ExitStack() as stack:
        out = csv.writer(file, lineterminator="\n")
        out.writerow(["seconds", "resident_bytes"])
        stdin, stdout = subprocess.DEVNULL if text is None else subprocess.PIPE, subprocess.DEVNULL
        process = subprocess.Popen(list(command), stdin=stdin, stdout=stdout, start_new_session=True)
        stack.callback(process.wait)
        stack.callback(end, process)
        began = time.monotonic()
        if text is not None:
            threading.Thread(target=feed, args=(process.stdin, text), daemon=True).start()
        while (gone := time.monotonic() - began) < 60 * minutes:
            if process.poll() is not None:
                ended = f"ended after {gone:.0f} s with status {process.returncode}"
                raise ValueError(f"{' '.join(command)}: {ended}")
            resident = sum(process_memory(each)[0] for each in process_tree(process.pid))
            samples.append(Sample(round(gone, 1), resident))
            out.writerow(samples[-1])
            file.flush()
            time.sleep(SECONDS_BETWEEN)
    return samples


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    runs = verbs.add_parser("run", help="run a command and sample its memory")
    runs.add_argument("--minutes", type=float, default=31.0, help="minutes to sample (%(default)s)")
    runs.add_argument("--csv", type=Path, required=True, help="file to write")
    runs.add_argument("--feed", type=Path, help="text that is given to standard input again and again")
    runs.add_argument("command", nargs="+", help="after --: the command")
    draws = verbs.add_parser("draw", help="draw what was sampled")
    draws.add_argument("csv", nargs="+", type=Path)
    draws.add_argument("--picture", type=Path, required=True)
    given = parser.parse_args(arguments)
    try:
        if given.verb == "run":
            text = None if given.feed is None else given.feed.read_bytes()
            curves = {given.csv.stem: run(given.command, given.minutes, given.csv, text)}
        else:
            curves = {path.stem: read(path) for path in given.csv}
            lines = {
                name: {each.seconds / 60: each.resident / 1e6 for each in curves[name]} for name in curves
            }
            title = "Memory of a process by time"
            draw_lines(lines, given.picture, axes=("minutes", "resident memory, MB"), title=title, marker="")
        told = [verdict(name, samples) for name, samples in curves.items()]
    except (OSError, ValueError) as error:
        print(f"soak: {error}", file=sys.stderr)
        return 2
    for _, line in told:
        print(line)
    return 0 if all(flat for flat, _ in told) else 1


if __name__ == "__main__":
    sys.exit(main())
