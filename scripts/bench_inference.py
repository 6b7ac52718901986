"""Words a second, BLEU, start and memory of one model on a CPU: float32, bfloat16, 8 bits, shortlists, the runtime.

    scripts/bench_inference.py runs/multi30k multi30k.lexicon test.en test.de --rounds 5

Every way translates the text in a process of its own, one after the other, round after round; the best of the rounds
counts, of seconds on the clock and of processor seconds, the loading of the model left out. Where other programs take
the cores, processor seconds say more.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
WARM_UP = 64


def ways(folder: Path, model: Path, lexicon: Path, top: int) -> dict[str, dict[str, Any]]:
    """What each way loads, the first of them today's."""
    listed = {"restrict_lexicon": str(lexicon), "restrict_lexicon_topk": top}
    return {
        "bfloat16": {"model": str(model), "precision": "bfloat16"},
        "float32": {"model": str(model), "precision": "float32"},
        "float32, shortlists": {"model": str(model), "precision": "float32", **listed},
        "int8": {"model": str(folder / "int8")},
        "int8, shortlists": {"model": str(folder / "int8"), **listed},
        "runtime, float32": {"runtime": str(folder / "runtime"), "shortlist": 0},
        "runtime, int8": {"runtime": str(folder / "runtime-int8"), "shortlist": 0},
        "runtime, int8, shortlists": {"runtime": str(folder / "runtime-int8")},
    }


def prepare(folder: Path, model: Path, lexicon: Path, top: int) -> None:
    """Makes the folders of all ways."""
    listed = ["--lexicon", lexicon, "--lexicon-topk", top]
    for words in (
        ["quantize", "-m", model, "-o", folder / "int8"],
        ["export", "--runtime", model, folder / "runtime", *listed],
        ["export", "--runtime", folder / "int8", folder / "runtime-int8", *listed],
    ):
        subprocess.run(
            [sys.executable, "-m", "econmt", *map(str, words)], check=True, stdout=subprocess.DEVNULL
        )


def translate(given: dict[str, Any], source: Path, output: Path, threads: int) -> None:
    """Translates in this process; prints the two kinds of seconds."""
    lines = source.read_text(encoding="utf-8").splitlines()
    run: Callable[[Sequence[str]], list[Any]]
    if "runtime" in given:
        import econmt_runtime

        translator = econmt_runtime.load(given["runtime"], threads=threads, shortlist=given.get("shortlist"))
        run = translator.translate
    else:
        from econmt import api

        model = api.load(
            given["model"], device="cpu", precision=given.get("precision", "auto"), threads=threads
        )
        listed = {name: value for name, value in given.items() if name.startswith("restrict")}

        def run(texts: Sequence[str]) -> list[Any]:
            return model.translate(list(texts), **listed)

    run(lines[:WARM_UP])
    clock, processor = time.perf_counter(), time.process_time()
    found = run(lines)
    print(time.perf_counter() - clock, time.process_time() - processor)
    output.write_text("".join(f"{each.text}\n" for each in found), encoding="utf-8")


def start(folder: Path, line: str) -> tuple[float, float, float]:
    """Seconds from nothing to the first translation, of the clock and of the processor, and resident megabytes."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    code = "import resource, sys; from econmt_runtime.__main__ import main; main(FOLDER)\n"
    code += "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr)"
    code = f"import sys; sys.path.insert(0, FOLDER)\n{code}".replace("FOLDER", repr(str(folder)))
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-I", "-c", code], input=line, capture_output=True, text=True, check=True
    )
    seconds = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return seconds, processor, int(done.stderr) / 1024


def bleu(output: Path, reference: Path) -> float:
    import sacrebleu

    texts = [path.read_text(encoding="utf-8").splitlines() for path in (output, reference)]
    return float(sacrebleu.corpus_bleu(texts[0], [texts[1]]).score)


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    for name in ("model", "lexicon", "source", "reference"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--top", type=int, default=30, help="of the lexicon, a word")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--way", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.way:
        own = ways(given.folder, given.model, given.lexicon, given.top)[given.way]
        translate(own, given.source, given.folder / "output", given.threads)
        return
    os.environ.update(OPENBLAS_NUM_THREADS="1", PYTHONPATH=f"{ROOT}:{ROOT / 'ops'}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder, given.model, given.lexicon, given.top)
        seconds: dict[str, list[tuple[float, float]]] = {}
        quality: dict[str, tuple[float, int]] = {}
        for _ in range(given.rounds):
            for way in ways(folder, given.model, given.lexicon, given.top):
                command = [sys.executable, __file__, *sys.argv[1:], "--way", way, "--folder", str(folder)]
                done = subprocess.run(command, check=True, capture_output=True, text=True)
                clock, processor = map(float, done.stdout.split())
                seconds.setdefault(way, []).append((clock, processor))
                words = len((folder / "output").read_text(encoding="utf-8").split())
                quality[way] = bleu(folder / "output", given.reference), words
        report(seconds, quality)
        line = given.source.read_text(encoding="utf-8").splitlines()[0] + "\n"
        for kind in ("runtime", "runtime-int8"):
            found = [start(folder / kind, line) for _ in range(5 * given.rounds)]
            clock, processor, memory = (min(values) for values in zip(*found, strict=True))
            print(f"{kind}: start {clock:.3f} s, of a processor {processor:.3f} s, {memory:.0f} MiB resident")


def report(seconds: dict[str, list[tuple[float, float]]], quality: dict[str, tuple[float, int]]) -> None:
    """The table; what a way gains is the median over the rounds of its ratio to the first of the same round."""
    print("| | words/s | words a processor second | to bfloat16's | BLEU |\n|---|---|---|---|---|")
    today = next(iter(seconds.values()))
    for way, found in seconds.items():
        clock, processor = (min(values) for values in zip(*found, strict=True))
        ratios = sorted(one[1] / other[1] for one, other in zip(today, found, strict=True))
        score, words = quality[way]
        gain = f"{ratios[len(ratios) // 2]:.1f}x ({ratios[0]:.1f} to {ratios[-1]:.1f})"
        print(f"| {way} | {words / clock:,.0f} | {words / processor:,.0f} | {gain} | {score:.2f} |")


if __name__ == "__main__":
    main()
