"""Feeds random and damaged inputs to econmt within one process, and reports those that it cannot handle.

Every input must be accepted or refused by one of econmt's own errors, in lines that can be printed. Anything else is a
failure: its input is saved, and ``--again FILE`` runs it alone. Inputs are what econmt writes and reads, with some
values, words or bytes changed; the same seed gives the same ones. They are drawn here because a library that searches
takes two milliseconds for one, and most targets take less than a tenth of that.

Examples:
    python scripts/fuzz.py --seconds 60
    python scripts/fuzz.py --executions 1000000 --failures failures
    python scripts/fuzz.py --again failures/state-1.json --debug
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import copy
import io
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from econmt.checkpoint.checkpoints import load_model, load_state
from econmt.checkpoint.folder import ModelFolder
from econmt.checkpoint.state import TrainingState
from econmt.checkpoint.tensor_files import read_metadata, read_tensors
from econmt.cli.info import inspect_folder
from econmt.cli.main import main as command
from econmt.config.json_reader import parse_json
from econmt.config.recipe import Recipe, load_recipe, parse_recipe, recipe_text
from econmt.config.yaml_reader import check_section, load_section, walk
from econmt.data.batching.store import StoreDescription
from econmt.data.text.corpus import split_pair
from econmt.data.text.subwords import load_vocabularies
from econmt.decoding.formats import format_nbest, format_translation
from econmt.decoding.search.options import SearchOptions
from econmt.decoding.streams import read_chunks, shown_on_terminal
from econmt.decoding.translator import Translator
from econmt.errors import EconmtError, printable
from econmt.evaluation.scoring import Scorer, token_ids
from econmt.model import IncrementalModel
from econmt.training.results import ResultsFile
from econmt.training.run import run_recipe

SMALL = "name: n\noutput: o\ndata: {source: a, target: b, train: [c], valid: d}\nmodel: {}\ntraining: {}\n"
TINY = """
name: tiny
output: {0}/run
data:
  {{source: src, target: trg, train: ['{0}/train'], valid: '{0}/train', prepared: '{0}/prepared',
   subwords: {{type: words, source: 50, target: 50}}}}
model: {{embedding: 4, encoder: {{size: 4}}, decoder: {{size: 4}}, attention: {{size: 4}}}}
training: {{batch: {{size: 4}}, max_updates: 2, checkpoint_interval: 1, device: cpu, threads: 1}}
decoding: {{beam_size: 2, max_output_factor: 0.5}}
"""
HOSTILE_TEXT = [
    "", " ", "~", "null", "true", "no", "-1", "0", "1e999", ".nan", ".inf", "-.inf", "0x10", "9" * 30, "9" * 5000,
    "'", '"', "[", "]", "{", "}", "{a: b}", "[1, 2]", "[0.9]", "&a", "*a", "!!bool maybe", "!!float ''", "!!int 1.5",
    "!!binary x", "!!python/object:os.system", "!!set {a}", "%YAML 9.9", "---", "...", "? ", "- ", ": ", "#", "|", ">",
    "\x00", "\x1b[2J", "\x7f", "\x85", "\u2028", "\u202e", "\ud800", "\udcff", "\ufeff", "\U0010ffff", "²", "٣", "ﬀ",
    '"\\U00110000"', '"\\ud800"', '"\\0"', "/", "//", "..", "~nouser/x", "a/b", "a" * 300, "x" * 5000, "\n", "\r", "\t",
    "auto", "cpu", "cuda:99", "cuda:99999999999999999999", "meta", "4GiB", "1e9GiB", "best", "last", "1", "2", "2.5",
]  # fmt: skip
HOSTILE_VALUES: list[Any] = [
    None, True, False, -1, 0, 1, 2**31, 2**63, 2**64, 10**40, -(10**40), 0.5, -0.0, float("nan"), float("inf"),
    "", "x", "1", "\x00\x1b", "\ud800", "9" * 400, [], [None], [[]], {}, {"": 0}, [1] * 625, {"a": {"b": []}},
]  # fmt: skip
ADVICE = "look at it"
"""Advice that the readers of files put behind an error."""
TURN_SECONDS = 1.0


class TinyModel:
    """Tiny trained model in a folder, which the targets read and of which they damage copies."""

    def __init__(self, folder: Path) -> None:
        lines = ["a b", "b c d", "d", "a < b"] * 6
        for side in ("src", "trg"):
            (folder / f"train.{side}").write_text("".join(line + "\n" for line in lines), encoding="utf-8")
        recipe = folder / "tiny.yaml"
        recipe.write_text(TINY.format(folder), encoding="utf-8")
        run_recipe(load_recipe(recipe), [folder], console=Console(file=io.StringIO()))
        self.folder, self.run = folder, folder / "run"
        home = ModelFolder(self.run)
        self.state = json.loads((home.state(home.commits()[-1]) / "state.json").read_text(encoding="utf-8"))
        self.results = json.loads(home.results.read_text(encoding="utf-8"))
        self.meta = json.loads((folder / "prepared" / "meta.json").read_text(encoding="utf-8"))
        self.parameters = home.best.read_bytes()
        self.loaded = load_model(self.run)
        models = [IncrementalModel(self.loaded.model)]
        options = SearchOptions.from_recipe(self.loaded.recipe.decoding).changed(chunk_size=8)
        self.translator = Translator(models, self.loaded.vocabularies, options)
        self.scorer = Scorer([self.loaded.model], load_vocabularies(self.run))
        self.words = [
            "recipes", "info", "translate", "score", "evaluate", "average", "export", "profile",
        ]  # fmt: skip
        self.files = {
            str(path.relative_to(self.run)): path.read_bytes()
            for path in sorted(self.run.rglob("*"))
            if path.is_file() and path.suffix in (".yaml", ".json", ".txt", ".tsv", ".safetensors")
        }


Change = tuple[int, str, str]
Random = random.Random


def any_text(draw: Random) -> str:
    """Draws a hostile text, or a few random characters."""
    if draw.random() < 0.7:
        return draw.choice(HOSTILE_TEXT)
    bound = draw.choice([0x80, 0x3000, 0x110000])
    return "".join(chr(draw.randrange(bound)) for _ in range(draw.randrange(8)))


def any_value(draw: Random) -> Any:
    """Draws plain data of any type."""
    if draw.random() < 0.6:
        return copy.deepcopy(draw.choice(HOSTILE_VALUES))
    kinds: list[Callable[[], Any]] = [
        lambda: draw.randrange(-(10 ** draw.randrange(1, 30)), 10 ** draw.randrange(1, 30)),
        lambda: draw.uniform(-1, 1) * 10.0 ** draw.randrange(-300, 300),
        lambda: any_text(draw),
        lambda: [any_value(draw) for _ in range(draw.randrange(4))],
        lambda: {any_text(draw): any_value(draw) for _ in range(draw.randrange(3))},
    ]
    return draw.choice(kinds)()


def any_changes(draw: Random) -> list[Change]:
    """Draws changes for :func:`edited`."""
    kinds = ["replace", "replace", "insert", "cut", "twice", "end"]
    return [(draw.randrange(1 << 20), draw.choice(kinds), any_text(draw)) for _ in range(draw.randint(1, 3))]


def edited(text: str, changes: list[Change]) -> str:
    """Returns a text with some words replaced, inserted, removed or doubled, or with its end cut off."""
    for number, kind, new in changes:
        start = number % (len(text) + 1)
        end = start + 1
        while end < len(text) and (text[end].isalnum() or text[end] in "._"):
            end += 1
        word = text[start:end]
        part = {"replace": new, "insert": new + word, "cut": "", "twice": word * 2, "end": ""}
        text = text[:start] + part[kind] + ("" if kind == "end" else text[end:])
    return text


def edited_bytes(content: bytes, changes: list[Change]) -> bytes:
    """Returns edited bytes, which may no longer be text."""
    return edited(content.decode("latin-1"), changes).encode("utf-8", "surrogatepass")


def paths_in(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yields every path in plain data; of a long list the first few."""
    yield path
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from paths_in(value, (*path, key))
    elif isinstance(tree, list):
        for number, value in enumerate(tree[:8]):
            yield from paths_in(value, (*path, number))


def changed_data(draw: Random, tree: Any) -> Any:
    """Returns plain data with one to three values replaced or removed."""
    paths = list(paths_in(tree))
    changes = [(draw.choice(paths), draw.random() < 0.3, any_value(draw)) for _ in range(draw.randint(1, 3))]
    return _changed(tree, changes)


def _changed(tree: Any, changes: list[tuple[tuple[Any, ...], bool, Any]]) -> Any:
    tree = json.loads(json.dumps(tree))
    for path, gone, value in changes:
        if not path:
            tree = value if gone else tree
            continue
        inner = tree
        try:
            for key in path[:-1]:
                inner = inner[key]
            if gone:
                del inner[path[-1]]
            else:
                inner[path[-1]] = value
        except (KeyError, IndexError, TypeError):  # an earlier change has removed this path
            continue
    return tree


Target = tuple[Callable[[Random], Any], Callable[[Any], object]]


def targets_of(tiny: TinyModel) -> dict[str, Target]:
    """Returns the targets by name, each as a function that draws inputs (plain data) and one that runs them."""
    data = tiny.folder / "damaged.safetensors"
    shipped = [SMALL, SMALL, SMALL, recipe_text(tiny.loaded.recipe, changed_only=True)]
    keys = [key for key, _, _ in walk(Recipe)]

    def recipe(text: str) -> None:
        parsed = parse_recipe(text, "fuzz.yaml")
        assert parse_recipe(recipe_text(parsed), "again") == parsed

    def overrides(words: list[str]) -> None:
        load_section(Recipe, SMALL, "fuzz.yaml", words)

    def state(tree: Any) -> None:
        TrainingState.from_json(json.dumps(tree), "state.json")

    def parameters(text: str) -> None:
        data.write_bytes(base64.b64decode(text))
        read_metadata(data)
        read_tensors(data)

    def stream(text: str) -> None:
        vocabularies = tiny.loaded.vocabularies
        for lines in _lines(base64.b64decode(text), tiny.folder):
            vocabularies.source.encode_many(lines)
            for number, line in enumerate(lines, 1):
                assert printable(printable(line)) == printable(line)
                shown_on_terminal(line).encode()
                with contextlib.suppress(EconmtError):
                    split_pair(line, "input", number)

    def an_override(draw: Random) -> str:
        return f"{draw.choice(keys) if draw.random() < 0.8 else any_text(draw)}={any_text(draw)}"

    short, header = _short(tiny.state), json.dumps(tiny.results)
    names = sorted(tiny.files)
    return {
        "recipe": (lambda draw: edited(draw.choice(shipped), any_changes(draw)), recipe),
        "overrides": (lambda draw: [an_override(draw) for _ in range(draw.randint(1, 2))], overrides),
        "state": (lambda draw: changed_data(draw, short), lambda tree: state(_long(tree, tiny.state))),
        "results": (lambda draw: changed_data(draw, tiny.results), lambda tree: _checked(ResultsFile, tree)),
        "meta": (lambda draw: changed_data(draw, tiny.meta), lambda tree: _checked(StoreDescription, tree)),
        "json": (lambda draw: edited(header, any_changes(draw)), lambda text: parse_json(text, "f", "a")),
        "parameters": (lambda draw: _safetensors(draw, tiny.parameters), parameters),
        "stream": (_stream, stream),
        "folder": (lambda draw: (draw.choice(names), any_changes(draw)), lambda given: _folder(tiny, *given)),
        "translate": (_stream, lambda text: _translate(tiny, text)),
        "words": (lambda draw: _words(draw, tiny), lambda words: _words_given(tiny, words)),
    }


def _checked(kind: Any, tree: Any) -> None:
    check_section(kind, parse_json(json.dumps(tree), "fuzz.json", ADVICE), "fuzz.json", ADVICE)


def _short(state: dict[str, Any]) -> dict[str, Any]:
    """Returns a state without its 700 words of random numbers, which :func:`_long` restores where unchanged."""
    return {**state, "random": dict.fromkeys(state["random"], "*"), "metrics": state["metrics"][-2:]}


def _long(tree: Any, state: dict[str, Any]) -> Any:
    if isinstance(tree, dict) and isinstance(tree.get("random"), dict):
        before = state["random"]
        known = {key: value for key, value in tree["random"].items() if key in before}
        return {**tree, "random": {key: before[key] if known[key] == "*" else known[key] for key in known}}
    return tree


def _safetensors(draw: Random, content: bytes) -> str:
    """Returns a parameter file, as base64, with changes to its header or to any byte."""
    size = int.from_bytes(content[:8], "little")
    header, rest = content[8 : 8 + size], content[8 + size :]
    kind = draw.randrange(4)
    if kind == 0:
        return base64.b64encode(edited_bytes(content, any_changes(draw))).decode()
    if kind == 1:
        header = edited_bytes(header, any_changes(draw))
    else:
        tree = json.loads(header)
        metadata = tree["__metadata__"]
        if kind == 2:
            metadata[draw.choice(list(metadata))] = any_text(draw)
        header = json.dumps(tree if kind == 2 else changed_data(draw, tree)).encode()
    return base64.b64encode(len(header).to_bytes(8, "little") + header + rest).decode()


_PIECES = [
    b"a b\n", b"d\n", b"\n", b"\r\n", b" ", b"\t", b"\xff", b"\xc3", b"\0", b"\xef\xbb\xbf", b"<unk>",
    b"b c d",
]  # fmt: skip


def _stream(draw: Random) -> str:
    """Draws lines of words, of anything, and of bytes that are no text, as base64."""
    parts = []
    for _ in range(draw.randrange(7)):
        kind = draw.random()
        if kind < 0.5:
            parts.append(draw.choice(_PIECES))
        elif kind < 0.9:
            parts.append(any_text(draw)[:50].encode("utf-8", "surrogatepass" if kind < 0.6 else "replace"))
        else:
            parts.append(draw.randbytes(draw.randrange(5)))
    return base64.b64encode(b"".join(parts)).decode()


def _lines(content: bytes, folder: Path) -> Iterator[list[str]]:
    path = folder / "stream"
    path.write_bytes(content)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        yield from read_chunks(descriptor, 4, "input")
    finally:
        os.close(descriptor)


def _folder(tiny: TinyModel, name: str, changes: list[Change]) -> None:
    """Loads a model folder with one damaged file."""
    folder = tiny.folder / "damaged"
    if not folder.exists():
        shutil.copytree(tiny.run, folder)
    path = folder / name
    try:
        path.unlink(missing_ok=True)
        path.write_bytes(edited_bytes(tiny.files[name], changes))
        home = ModelFolder(folder)
        for look in (
            lambda: inspect_folder(folder),
            lambda: load_model(folder),
            lambda: load_state(home, home.commits()[-1]),
        ):
            with contextlib.suppress(EconmtError):
                look()
    finally:
        path.unlink(missing_ok=True)
        path.write_bytes(tiny.files[name])


def _translate(tiny: TinyModel, text: str) -> None:
    for lines in _lines(base64.b64decode(text), tiny.folder):
        for number, translation in enumerate(tiny.translator.translate_chunk(lines)):
            assert "\n" not in translation.text
            assert translation.text == translation.text.strip()
            for kind in ("translation", "score", "json"):
                format_translation(translation, kind).encode("utf-8", "surrogateescape")
            format_nbest(translation, number)
        encode = token_ids(tiny.loaded.vocabularies.target)
        with contextlib.suppress(KeyError):  # the verb tells it
            tiny.scorer.score_ids(lines, [encode(line) for line in lines])


_OPTIONS = [
    "-m", "-o", "-i", "-r", "-s", "-t", "-b", "-n", "-c", "-w", "-l", "--rank", "--seed", "--threads",
    "--json", "--sample", "--temperature", "--nbest-size", "--batch-size", "--length-penalty-alpha",
    "--max-output-factor", "--tokenize", "--metrics", "--energy", "--checkpoint", "--device", "--fit",
    "--bucket", "--output-type", "--score-type", "--estimate", "--language", "--chunk-size", "--",
]  # fmt: skip


def _words(draw: Random, tiny: TinyModel) -> list[str]:
    """Draws a command line of verbs, options, files and random text."""
    names = ("run", "train.src", "train.trg", "tiny.yaml", "out", "none")
    files = [str(tiny.folder / name) for name in names]
    verb = [draw.choice(tiny.words)] if draw.random() < 0.9 else []
    choices = [_OPTIONS, _OPTIONS, files, ["show", "copy", "list", "validate"]]
    rest = [
        draw.choice(draw.choice(choices)) if draw.random() < 0.75 else any_text(draw)
        for _ in range(draw.randrange(7))
    ]
    return verb + rest


def _words_given(tiny: TinyModel, words: list[str]) -> None:
    """Runs a command line, unless it would train, download or fill memory."""
    first = next((word for word in words if not word.startswith("-")), None)
    if first in ("train", "prepare", "bench", "profile", None) or "\0" in "".join(words):
        words = ["recipes", "show", *words]
    words = [word.encode("utf-8", "replace").decode() if any(map(_is_half, word)) else word for word in words]
    before = sys.stdin, sys.stdout, sys.stderr, Path.cwd(), torch.get_num_threads()
    said = io.StringIO()
    scratch = tiny.folder / "scratch"
    scratch.mkdir(exist_ok=True)
    code: object = 0
    try:
        os.chdir(scratch)
        sys.stdout = sys.stderr = said
        sys.stdin = (tiny.folder / "train.src").open(encoding="utf-8")
        command([*words, "--debug"] if "--" not in words else words)
    except SystemExit as end:
        code = end.code
    finally:
        sys.stdin.close()
        sys.stdin, sys.stdout, sys.stderr = before[:3]
        os.chdir(before[3])
        torch.set_num_threads(before[4])
        shutil.rmtree(scratch, ignore_errors=True)
    assert code in (None, 0, 1, 2), said.getvalue()[-2000:]


def _is_half(character: str) -> bool:
    return "\ud800" <= character <= "\udfff" and not "\udc80" <= character <= "\udcff"


def attempt(run: Callable[[Any], object], given: Any) -> str | None:
    """Runs one input; returns how it failed, or None if it was accepted or refused by a printable error."""
    try:
        run(given)
    except EconmtError as error:
        for line in error.lines or [""]:
            if not line.strip() or printable(line) != line:
                return f"no line to print: {error!r}"
    except Exception as error:  # noqa: BLE001  whatever it is, it is what is looked for
        return f"{type(error).__name__}: {' '.join(str(error).split())[-300:]}"
    return None


def options_of(description: str | None) -> argparse.ArgumentParser:
    """Returns the command line that both fuzzing scripts have."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=description, formatter_class=formatter)
    add = parser.add_argument
    add("--seed", type=int, default=int(time.time()), help="seed of the inputs; default: the time")
    add("--failures", type=Path, default=Path("fuzz-failures"), help="folder for inputs that failed")
    add("--again", type=Path, help="run one saved input alone, and print how it fails")
    return parser


def save(folder: Path, name: str, record: object, failure: str) -> None:
    """Writes an input that failed into a folder, and prints where and how."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps(record) + "\n", encoding="utf-8")
    print(f"{path}: {printable(failure)}", flush=True)


def main() -> int:
    parser = options_of(__doc__)
    add = parser.add_argument
    add("--seconds", type=float, default=60.0, help="seconds for all targets together (60)")
    add("--executions", type=int, help="number of executions, instead of --seconds")
    add("--debug", action="store_true", help="with --again: show the traceback")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name, contextlib.redirect_stderr(io.StringIO()):
        targets = targets_of(TinyModel(Path(name)))
        if options.again is not None:
            saved = json.loads(options.again.read_text(encoding="utf-8"))
            target = targets[saved["target"]][1]
            if options.debug:
                target(saved["input"])
            failure = attempt(target, saved["input"])
            print(failure or "it passes")
            return int(failure is not None)
        return run_all(targets, options)


def run_all(targets: dict[str, Target], options: argparse.Namespace) -> int:
    """Runs all targets in turns and prints how many executions each had; returns 1 if an input failed."""
    began, draw = time.monotonic(), random.Random(options.seed)
    counts, seconds, seen = Counter[str](), Counter[str](), set[str]()
    until = float("inf") if options.executions else began + options.seconds
    while time.monotonic() < until and not (options.executions and counts.total() >= options.executions):
        for name, (draws, run) in targets.items():
            start = now = time.monotonic()
            # Each gets the same time, so that quick targets have more executions than slow ones.
            while now < min(start + TURN_SECONDS, until):
                given = draws(draw)
                failure = attempt(run, given)
                counts[name] += 1
                now = time.monotonic()
                if failure is not None and f"{name} {failure[:60]}" not in seen:
                    seen.add(f"{name} {failure[:60]}")
                    record = {"target": name, "input": given, "failure": failure}
                    save(options.failures, f"{name}-{counts[name]}", record, failure)
            seconds[name] += now - start
    took = time.monotonic() - began
    print(
        f"seed {options.seed}: {counts.total():,} executions in {took:.0f} s, {len(seen)} kinds of failures"
    )
    for name in targets:
        print(f"  {name:<12}{counts[name]:>10,}{counts[name] / max(seconds[name], 1e-9):>10,.0f} a second")
    return int(bool(seen))


if __name__ == "__main__":
    sys.exit(main())
