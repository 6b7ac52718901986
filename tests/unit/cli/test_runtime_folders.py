"""An exported folder reads text as ``econmt translate`` does, and damage of any of its files is told in one line."""

from __future__ import annotations

import gzip
import json
import math
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

import econmt_runtime
from econmt.config import limits
from econmt.data.text.corpus import read_lines
from econmt.data.text.vocabulary import SPECIAL_TOKENS, WordVocabulary
from econmt.decoding.streams import read_chunks
from econmt.errors import InputError
from econmt.export.runtime import _signed, export_runtime
from econmt_ops.backends.c import platforms
from econmt_runtime import RuntimeInputError, library, lines
from econmt_runtime.files import read_file
from econmt_runtime.text import RuntimeWords
from tests.conftest import PATIENCE, econmt_environment, run_python
from tests.unit.cli.conftest import Call
from tests.unit.cli.test_runtime import model as model
from tests.unit.cli.test_runtime import random_model
from tests.unit.cli.test_runtime import whole as whole

LIMIT = 1 << 19
GRU: Any = {"cell": "gru", "directions": [1], "residual": True}
TEXTS = {
    "mark in a later line": b"a\n\xef\xbb\xbfa b\n",
    "two marks": b"\xef\xbb\xbf\xef\xbb\xbfa\n",
    "carriage returns": b"a b\r\nb\r\r\n\r\nc\rd\n",
    "separators of Unicode": "a\u2028b\nc\u2029d\u0085e\n\x0bf\x0c\x1c\x1d\x1e\x1fg\n".encode(),
    "blanks": "\u00a0\n \t \n\u3000a\u2009\n\u200b\n\x1f\n".encode(),
    "NUL in the first line": b"\0",
    "NUL in a later line": b"a\nb\n1\0\nc",
    "a line of NUL": b"a\n" + b"\0" * LIMIT,
    "no UTF-8": b"a\nb \xff\xfe c\nd\n",
    "half a character": b"a\n\xc3",
    "a surrogate": b"a\n\xed\xa0\x80\n",
    "UTF-16": "a b c\n".encode("utf-16"),
    "decomposed": "e\u0301 a\n".encode(),
    "a long line": b"a " * 200_000 + b"\nb\n",
    "the longest line": b"a\n" + b"x" * (LIMIT - 1) + b"\nb",
    "a byte more": b"a\n" + b"x" * LIMIT + b"\n",
}


def ended(source: Iterator[list[str]] | Iterator[str]) -> tuple[list[str], str | None]:
    """The lines that a reader gives, and the message with which it ends, if it does."""
    found: list[str] = []
    try:
        for each in source:
            found += [each] if isinstance(each, str) else each
    except (InputError, RuntimeInputError) as error:
        return found, str(error)
    return found, None


@pytest.mark.parametrize("name", TEXTS)
def test_lines_are_read_as_by_econmt(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (lines, limits):
        monkeypatch.setattr(module, "LINE_BYTES", LIMIT)
    path, packed = tmp_path / "text", tmp_path / "text.gz"
    path.write_bytes(TEXTS[name])
    packed.write_bytes(gzip.compress(TEXTS[name]))
    small = 1 if len(TEXTS[name]) < 100 else 1000
    for file, block in product((path, packed), (small, 1 << 17)):
        monkeypatch.setattr(lines, "_READ", block)
        assert ended(lines.file_chunks(file)) == ended(read_lines(file))
    with path.open("rb") as one, path.open() as other:
        monkeypatch.setattr(sys, "stdin", other)
        assert ended(lines.input_chunks()) == ended(read_chunks(one.fileno(), 3))


def test_what_is_no_text_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path / "absent"):
        found, message = ended(lines.file_chunks(path))
        assert found == []
        assert message.startswith(f"{path}: ")
        assert ended(read_lines(path))[1] is not None


@pytest.fixture
def made(whole: Path, tmp_path: Path) -> Path:
    """A copy of that, which a test may break."""
    return Path(shutil.copytree(whole, tmp_path / "runtime"))


def run(
    folder: Path, *arguments: str, text: bytes = b"a b\n", **options: Any
) -> subprocess.CompletedProcess[bytes]:
    """Runs ``python FOLDER``, which knows no package of this checkout."""
    environment = {name: value for name, value in econmt_environment().items() if name != "PYTHONPATH"}
    environment |= options.pop("env", {})
    options |= {"capture_output": True, "timeout": PATIENCE, "check": False}
    return subprocess.run([sys.executable, str(folder), *arguments], input=text, env=environment, **options)


def refusal(done: subprocess.CompletedProcess[bytes]) -> str:
    """The one line with which it was refused."""
    assert (done.returncode, done.stdout) == (2, b""), done.stderr
    (line,) = done.stderr.decode().splitlines()
    assert line.startswith("econmt_runtime: error: ")
    return line


def test_files_and_lines_before_bad_ones(model: Path, whole: Path, call: Call, tmp_path: Path) -> None:
    text = b"\xef\xbb\xbfa b c\r\n\n" + "h\u2028g\n d e\u00a0\n\u3000\n".encode() + b"b c\r\r\nzzz"
    (tmp_path / "text").write_bytes(text)
    more = "--precision", "float32", "--output-type", "score"
    translated = call("translate -m", model, "-i", tmp_path / "text", *more)
    expected = [row.split("\t") for row in translated.lines]
    for done in (run(whole, "--score", text=text), run(whole, "--score", "-i", str(tmp_path / "text"))):
        assert (done.returncode, done.stderr) == (0, b"")
        found = [row.split("\t") for row in done.stdout.decode().split("\n")[:-1]]
        assert [row[1] for row in found] == [row[1] for row in expected]
        scores = [float(row[0]) for row in expected]
        assert [float(row[0]) for row in found] == pytest.approx(scores, abs=1e-4)
    expected = run(whole, text=b"a b\nc\n").stdout
    done = run(whole, text=b"a b\nc\nd\0\ne\n")
    assert (done.returncode, done.stdout) == (2, expected)
    line = b"econmt_runtime: error: standard input:3: NUL byte at column 2; is this a text file?\n"
    assert done.stderr == line


def test_results_are_utf_8_in_any_locale() -> None:
    code = "from econmt_runtime.__main__ import _open_output; _open_output(); print('\\u0444')"
    done = run_python("-c", code, env={"PYTHONIOENCODING": "ascii"}, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "\u0444\n", "")


def write_config(folder: Path, config: dict[str, Any]) -> None:
    """Writes model.json with the checksum that belongs to it."""
    rest = {key: value for key, value in config.items() if key != "checksum"}
    (folder / "model.json").write_text(json.dumps(_signed(rest)))


def test_carriage_returns_and_comparison_of_modules(tmp_path: Path, made: Path) -> None:
    words = [*SPECIAL_TOKENS, "a", "b\rc", "\x0b", "d\u2028e", "f"]
    path = tmp_path / "vocab.txt"
    path.write_bytes("".join(word + "\n" for word in words).encode())
    ours, theirs = RuntimeWords(path), WordVocabulary(words)
    assert ours.size == theirs.size
    text = "f d\u2028e a b\rc"
    assert ours.encode(text) == theirs.encode(text) == [8, 7, 4, 5]
    assert ours.decode([4, 5, 6, 7, 8]) == theirs.decode([4, 5, 6, 7, 8])
    draw = random.Random(25)
    modules = sorted((made / "econmt_runtime").glob("*.py"))
    for module in modules:
        sound = module.read_bytes()
        damaged = bytearray(sound)
        damaged[draw.randrange(len(damaged))] ^= 1 << draw.randrange(8)
        module.write_bytes(damaged)
        assert f"{module}: absent or changed since it was exported" in refusal(run(made))
        module.write_bytes(sound)
    assert run(made).returncode == 0


@pytest.mark.parametrize("place", ["", "econmt_runtime"])
def test_modules_beside_the_runtime_are_not_imported(
    whole: Path, made: Path, tmp_path: Path, place: str
) -> None:
    for name in ("numpy", "argparse", "sentencepiece", "json", "zipfile", "ctypes"):
        (made / place / f"{name}.py").write_text("raise SystemExit('planted')\n")
    done = run(made, cwd=tmp_path)
    expected = econmt_runtime.load(whole).translate(["a b"])[0].text + "\n"
    assert (done.returncode, done.stdout.decode(), done.stderr) == (0, expected, b"")


def test_no_bytecode_is_written_or_read(whole: Path, tmp_path: Path) -> None:
    made = tmp_path / "runtime"
    shutil.copytree(whole, made, ignore=shutil.ignore_patterns("__pycache__"))
    expected = run(made, env={"PYTHONDONTWRITEBYTECODE": ""}).stdout
    # Python keeps that of a folder's __main__ before the first line of it runs.
    assert [cache.name.partition(".")[0] for cache in made.rglob("*.pyc")] in ([], ["__main__"])
    run_python("-m", "compileall", "-q", made)
    caches = list((made / "econmt_runtime").rglob("*.pyc"))
    assert len(caches) > 10
    for cache in caches:
        cache.write_bytes(cache.read_bytes()[:20])
    done = run(made)
    assert (done.returncode, done.stdout, done.stderr) == (0, expected, b"")


def damage(path: Path, fault: str) -> None:
    content = path.read_bytes()
    path.unlink()
    if fault == "pipe":
        os.mkfifo(path)
    elif fault == "folder":
        path.mkdir()
    elif fault in ("zero", "null"):
        path.symlink_to(f"/dev/{fault}")
    elif fault != "absent":
        path.write_bytes(content[: len(content) // 2] if fault == "cut" else b"\xff\xfe" * 40)


@pytest.mark.parametrize(
    "file", ["model.json", "arrays.safetensors", "vocab.source.txt", "econmt_runtime/search.py", "LIBRARY"]
)
@pytest.mark.parametrize("fault", ["pipe", "zero", "folder", "null", "absent", "cut", "garbage"])
def test_broken_files_are_refused_in_a_line(made: Path, file: str, fault: str) -> None:
    path = made / file if file != "LIBRARY" else next((made / "econmt_runtime").glob("_kernels*"))
    damage(path, fault)
    if fault == "pipe" or file == "model.json" or (fault == "absent" and file.endswith(".py")):
        assert str(path) in refusal(run(made))
    opened = len([*Path("/dev/fd").iterdir()])
    with pytest.raises(RuntimeInputError, match=f"^{re.escape(str(path))}: "):
        econmt_runtime.load(made)
    assert len([*Path("/dev/fd").iterdir()]) == opened


def test_files_have_bounded_sizes(whole: Path, tmp_path: Path) -> None:
    for file in ("model.json", "vocab.source.txt", "econmt_runtime/search.py"):
        made = shutil.copytree(whole, tmp_path / Path(file).name)
        os.truncate(made / file, 1 << 40)  # without blocks on the disk
        with pytest.raises(RuntimeInputError, match=r"1,099,511,627,776 bytes, more than"):
            econmt_runtime.load(made)
    os.truncate(made / file, (whole / file).stat().st_size)


WRONG: Any = (None, True, -1, 0, 10**30, 2.5, math.nan, math.inf, "", "x", "\ud800", [], [[]], {}, {"x": {}})


def places(value: Any, *above: Any) -> Iterator[tuple[Any, ...]]:
    """The keys that lead to each value."""
    if above:
        yield above
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inner:
        yield from places(each, *above, key)


def test_every_value_of_the_configuration_is_checked(whole: Path, made: Path) -> None:
    sound = json.loads((whole / "model.json").read_text())
    tried = refused = 0
    for place in places(sound):
        if place[0] in ("checksum", "files") and len(place) > 1:
            continue
        for wrong in WRONG:
            config = json.loads(json.dumps(sound))
            inside = config
            for key in place[:-1]:
                inside = inside[key]
            inside[place[-1]] = wrong
            write_config(made, config)
            tried += 1
            try:
                econmt_runtime.load(made).translate(["a b", ""])
            except RuntimeInputError:
                refused += 1
        if isinstance(place[-1], str) and place[0] != "checksum":
            del inside[place[-1]]
            write_config(made, config)
            with pytest.raises(RuntimeInputError):
                econmt_runtime.load(made)
    assert tried > 300
    assert refused > 0.85 * tried
    (made / "model.json").write_text("[" * 100_000)
    with pytest.raises(RuntimeInputError, match="not a file written by econmt export --runtime"):
        econmt_runtime.load(made)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"files": {"../model.json": "0"}}, "files: '../model.json' is not the name of a file in this"),
        ({"files": {"a\0b": "0"}}, "files: 'a\\x00b' is not the name of a file in this folder"),
        ({"files": {"/etc/passwd": "0"}}, "files: '/etc/passwd' is not the name"),
        ({"vocabulary_files": ["no.txt"]}, "vocabulary_files: 'no.txt' is not listed in files"),
        ({"vocabulary_files": []}, "vocabulary_files: not a list of 1 to 64 values"),
        ({"vocabulary_files": ["x"] * 65}, "vocabulary_files: not a list of 1 to 64 values"),
        ({"vocabulary_files": ["vocab.source.txt"] * 3}, "vocabulary_files: more than two"),
        ({"encoder": {**GRU, "directions": [1, 3]}}, "encoder.directions[1]: not a whole number from 1 to 2"),
        ({"max_length": "60"}, "max_length: not a whole number from 1 to 10000"),
        ({"decoding": {"beam_size": 65}}, "decoding.beam_size: not a whole number from 1 to 64"),
        ({"encoder": {**GRU, "residual": 1}}, "encoder.residual: not a value of type bool"),
        ({"encoder": {"cell": "sru"}}, "encoder.cell: not one of gru, lnglstm, lnlstm, lstm, ssru"),
    ],
)
def test_messages_name_the_key(made: Path, changes: dict[str, Any], message: str) -> None:
    write_config(made, {**json.loads((made / "model.json").read_text()), **changes})
    with pytest.raises(RuntimeInputError) as error:
        econmt_runtime.load(made)
    assert f"model.json: {message}" in str(error.value)


def test_closed_streams_are_told_and_any_python_finds_the_library_of_a_folder(whole: Path) -> None:
    for closed, message in (("<&-", "standard input is closed"), (">&-", "standard output is closed")):
        command = ["bash", "-c", f'"$0" "$1" {closed}', sys.executable, str(whole)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
        assert done.returncode == 2
        assert message in done.stderr
        assert len(done.stderr.splitlines()) == 1
    # The name without the version of this Python: the library has no part of it.
    (path,) = (whole / "econmt_runtime").glob("_kernels*")
    assert path.name == f"_kernels.{library._HERE}.so" == f"_kernels.{platforms.HERE}.so"
    size = path.stat().st_size
    assert len(read_file(path, size)) == size
    with pytest.raises(RuntimeInputError, match=f"{size:,} bytes, more than the limit of {size - 1:,};"):
        read_file(path, size - 1)


@pytest.mark.parametrize("package", ["numpy", "sentencepiece"])
def test_packages_that_are_not_installed_are_named(subword_model: Path, tmp_path: Path, package: str) -> None:
    folder = random_model(subword_model, tmp_path / "model", "additive")
    made = export_runtime(folder, tmp_path / "runtime")
    code = (
        f"import runpy, sys; sys.argv = ['runtime']; sys.modules[{package!r}] = None\n"
        f"runpy.run_path({str(made)!r}, run_name='__main__')"
    )
    command = [sys.executable, "-I", "-c", code]
    done = subprocess.run(command, input=b"a\n", capture_output=True, timeout=PATIENCE)
    assert refusal(done).endswith(
        f"this Python has no {package}; install it, as with pip install numpy sentencepiece"
    )
