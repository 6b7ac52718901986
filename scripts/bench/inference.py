"""Measures translation on a CPU: speed, BLEU and memory.

    python -m scripts.bench inference runs/multi30k multi30k.lexicon test.en test.de --rounds 5
    python -m scripts.bench inference runs/multi30k multi30k.lexicon test.en test.de --threads 1 2 \\
        --ctranslate2 transformer

The ways are float32, bfloat16, 8 bits, shortlists and the runtime. With --ctranslate2 a model that CTranslate2 has
converted is timed too; it must have the vocabulary files of runs/multi30k, and the package ctranslate2 is needed.

Each way translates the text in a process of its own, in turns. The fastest round counts, by the clock and by processor
seconds, without loading the model. Where other programs use the cores, rely on processor seconds.
"""

from __future__ import annotations

import argparse
import importlib
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import sacrebleu

from econmt.bench.rows import Row
from scripts.bench.frame import SOURCES, Bench, ratio_of

WARM_UP = 64
BEAM = 5
BATCH = 64
TOP = 30
"""Translations of each word in a shortlist."""
LONGEST = 200
PRECISIONS = ("float32", "int8")


def ways(given: argparse.Namespace, folder: Path) -> dict[str, dict[str, Any]]:
    """Returns the settings of each way to translate, with each number of threads."""
    model, int8 = str(given.model), str(folder / "int8")
    listed = {"restrict_lexicon": str(given.lexicon), "restrict_lexicon_topk": TOP}
    settings: dict[str, dict[str, Any]] = {
        "bfloat16": {"model": model, "precision": "bfloat16"},
        "float32": {"model": model, "precision": "float32"},
        "float32, shortlists": {"model": model, "precision": "float32", **listed},
        "int8": {"model": int8},
        "int8, shortlists": {"model": int8, **listed},
        "runtime, float32": {"runtime": str(folder / "runtime"), "shortlist": 0},
        "runtime, int8": {"runtime": str(folder / "runtime-int8"), "shortlist": 0},
        "runtime, int8, shortlists": {"runtime": str(folder / "runtime-int8")},
    }
    if given.ctranslate2 is not None:
        for precision in PRECISIONS:
            each = {"ctranslate2": str(given.ctranslate2), "precision": precision, "model": model}
            settings[f"CTranslate2, {precision}"] = each
    if len(given.threads) == 1:
        return {way: {**each, "threads": given.threads[0]} for way, each in settings.items()}
    return {
        f"{way}, {number} thread{'s' * (number > 1)}": {**each, "threads": number}
        for number in given.threads
        for way, each in settings.items()
    }


def prepare(folder: Path, model: Path, lexicon: Path) -> None:
    """Makes the folders that the ways load."""
    listed = ["--lexicon", lexicon, "--lexicon-topk", TOP]
    for words in (
        ["quantize", "-m", model, "-o", folder / "int8"],
        ["export", "--runtime", model, folder / "runtime", *listed],
        ["export", "--runtime", folder / "int8", folder / "runtime-int8", *listed],
    ):
        subprocess.run(
            [sys.executable, "-m", "econmt", *map(str, words)], check=True, stdout=subprocess.DEVNULL
        )


def by_ctranslate2(settings: dict[str, Any]) -> Callable[[Sequence[str]], list[str]]:
    """Returns a function that translates with a folder of CTranslate2 and econmt's vocabulary files."""
    import sentencepiece

    from econmt.data.text.subwords import vocabulary_files
    from econmt.data.text.vocabulary import normalized

    files = vocabulary_files(Path(settings["model"]))
    source, target = (
        sentencepiece.SentencePieceProcessor(model_file=str(file)) for file in (files[0], files[-1])
    )
    # It is no package that econmt asks for.
    translator = importlib.import_module("ctranslate2").Translator(
        settings["ctranslate2"],
        compute_type=settings["precision"],
        inter_threads=settings["threads"],
        intra_threads=1,
    )

    def run(texts: Sequence[str]) -> list[str]:
        cut = [source.encode(normalized(text), out_type=str) for text in texts]
        results = translator.translate_batch(
            cut, beam_size=BEAM, max_batch_size=BATCH, max_decoding_length=LONGEST
        )
        return [target.decode(each.hypotheses[0]) for each in results]

    return run


def translate(settings: dict[str, Any], lines: list[str]) -> tuple[float, float, list[str]]:
    """Translates in this process; returns seconds of the clock and of the processor, and the translations."""
    threads = settings["threads"]
    run: Callable[[Sequence[str]], list[Any]]
    if "ctranslate2" in settings:
        run = by_ctranslate2(settings)
    elif "runtime" in settings:
        import econmt_runtime

        shortlist = settings.get("shortlist")
        run = econmt_runtime.load(settings["runtime"], threads=threads, shortlist=shortlist).translate
    else:
        from econmt import api

        precision = settings.get("precision", "auto")
        model = api.load(settings["model"], device="cpu", precision=precision, threads=threads)
        listed = {name: value for name, value in settings.items() if name.startswith("restrict")}

        def run(texts: Sequence[str]) -> list[Any]:
            return model.translate(list(texts), **listed)

    run(lines[:WARM_UP])
    clock, processor = time.perf_counter(), time.process_time()
    translations = run(lines)
    seconds = time.perf_counter() - clock, time.process_time() - processor
    return *seconds, [each if isinstance(each, str) else each.text for each in translations]


def start(folder: Path, line: str) -> tuple[float, float, float]:
    """Returns seconds of clock and processor until the first translation, and resident MiB."""
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


def main(words: Sequence[str] | None = None) -> None:
    bench = Bench(__doc__, threads=None)
    add = bench.add_argument
    add("model", type=Path, help="model folder")
    add("lexicon", type=Path, help="file from econmt lexicon")
    add("source", type=Path, help="text to translate")
    add("reference", type=Path, help="its translation")
    add("--rounds", type=int, default=3, help="translations of the text by each way (%(default)s)")
    add("--threads", type=int, nargs="+", default=[1], help="CPU threads to translate with (1)")
    add("--ctranslate2", type=Path, help="a converted model with the vocabulary files of the first")
    given = bench.begin(words)
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    os.environ["PYTHONPATH"] = os.pathsep.join([SOURCES, os.environ.get("PYTHONPATH", "")])
    lines, reference = (
        read.read_text(encoding="utf-8").splitlines() for read in (given.source, given.reference)
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder, given.model, given.lexicon)
        seconds: dict[str, list[tuple[float, float]]] = {}
        quality: dict[str, tuple[float, int]] = {}
        for _ in range(given.rounds):
            for way, settings in ways(given, folder).items():
                with ProcessPoolExecutor(1, get_context("fork")) as process:
                    clock, processor, texts = process.submit(translate, settings, lines).result()
                seconds.setdefault(way, []).append((clock, processor))
                bleu = float(sacrebleu.corpus_bleu(texts, [reference]).score)
                quality[way] = bleu, sum(len(text.split()) for text in texts)
        bench.report(rows(seconds, quality))
        for kind in ("runtime", "runtime-int8"):
            starts = [start(folder / kind, lines[0] + "\n") for _ in range(5 * given.rounds)]
            clock, processor, memory = (min(values) for values in zip(*starts, strict=True))
            print(f"{kind}: start {clock:.3f} s, of a processor {processor:.3f} s, {memory:.0f} MiB resident")


def rows(
    seconds: dict[str, list[tuple[float, float]]], quality: dict[str, tuple[float, int]]
) -> Iterator[Row]:
    """Yields a row for each way, whose processor seconds are compared with the first way's of the same round."""
    first = [processor for _, processor in next(iter(seconds.values()))]
    for way, samples in seconds.items():
        clock, processor = (min(values) for values in zip(*samples, strict=True))
        score, words = quality[way]
        row: Row = {"way": way, "words/s": round(words / clock)}
        row["words a processor s"] = round(words / processor)
        row["to bfloat16's"] = str(ratio_of(first, [each for _, each in samples]))
        yield row | {"BLEU": f"{score:.2f}"}
