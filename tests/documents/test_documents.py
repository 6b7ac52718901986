"""Every console block and Python example of README.md and docs/ works, from the first line of its page to the last."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from econmt.config.recipe import load_recipe, recipe_text
from scripts.bench.__main__ import commands as benchmarks
from tests.conftest import PATIENCE, ROOT
from tests.documents import tiny
from tests.documents.blocks import (
    ONLY_PARSED,
    PAGES,
    SLOW,
    Block,
    blocks,
    commands,
    console_blocks,
    quoted_scripts,
    why_only_parsed,
)
from tests.documents.shell import Shell

NEEDS_EXTRA = {"serve ": "starlette", "serve-load": "starlette", "bench filters": "py3langid"}
"""Commands that need an optional package, by what they contain."""


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    opened = Shell(tmp_path_factory.mktemp("documents"))
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


_SCRIPT = re.compile(r"(?:\w+=\S+ )*python -m (scripts\.\S+) (.*)")


def _script(command: str) -> tuple[str, list[str]] | None:
    """The module and the arguments of a command that runs a script of the project, or None."""
    found = _SCRIPT.fullmatch(command)
    if found is None:
        return None
    return found[1], [tiny.PLACEHOLDERS.get(word, word) for word in shlex.split(found[2])]


MINE = {"output": "runs/mine", "data": {"train": ["mytext"], "valid": "mytext.valid", "test": None}}
"""How a reader changes the copy of a recipe."""
PYTHON_PAGES = ("README.md", "docs/python.md")
"""Pages whose Python blocks, one after the other, are a program."""


class Reader:
    """Follows one page: runs its commands in order, and edits recipes as its YAML blocks say."""

    def __init__(self, page: str, shell: Shell, folder: Path, *, with_slow: bool = False) -> None:
        self.page, self.shell, self.folder, self.with_slow = page, shell, folder, with_slow
        self.server: subprocess.Popen[bytes] | None = None
        self.port = 0

    def follow(self) -> None:
        for block in blocks(self.page):
            if block.language in ("bash", "console", "sh"):
                for command in commands(block):
                    self.execute(command, block)
            elif block.language == "yaml" and (self.folder / "mine.yaml").is_file():
                self.edit(yaml.safe_load(block.text))

        program = [block for block in blocks(self.page) if block.language == "python"]
        if program and self.page in PYTHON_PAGES:
            text = "\n".join(block.text for block in program).replace("3000", "2")
            self.check(f"{shlex.quote(sys.executable)} -c {shlex.quote(text)}", program[0])

    def execute(self, command: str, block: Block) -> None:
        if why_only_parsed(command) is not None:
            return
        if SLOW.search(command) and not self.with_slow:
            if not command.startswith("econmt train"):
                return
            command += " --dry-run"
        for part, package in NEEDS_EXTRA.items():
            if part in command:
                pytest.importorskip(package)
        if command.startswith("econmt serve"):
            self.stop()
            self.server, self.port = self.shell.serve(command, self.folder)
            return
        self.check(command.replace("127.0.0.1:5000", f"127.0.0.1:{self.port}"), block)
        if command.startswith("econmt recipes copy"):
            self.edit(MINE)

    def check(self, command: str, block: Block) -> None:
        done = self.shell.run(command, self.folder)
        ends = f"{done.stdout[-2000:]}{done.stderr[-4000:]}"
        said = f"{self.page}, block at line {block.line}: {command}\n{ends}"
        too_short = next((words for part, words in tiny.TOO_SHORT.items() if part in command), None)
        assert done.returncode == (0 if too_short is None else 2), f"exit code {done.returncode}: {said}"
        assert too_short is None or too_short in done.stderr, said
        assert "Traceback" not in done.stderr, said
        if command.startswith("curl"):
            assert '"error"' not in done.stdout, said

    def edit(self, changes: dict[str, Any]) -> None:
        """Changes ``mine.yaml`` as a reader would in an editor; a block with a name and a model is a whole recipe."""
        file = self.folder / "mine.yaml"
        recipe = {} if {"name", "model"} <= {*changes} else yaml.safe_load(file.read_text(encoding="utf-8"))
        file.write_text(yaml.safe_dump(_merged(recipe, changes), allow_unicode=True), encoding="utf-8")

    def stop(self) -> None:
        if self.server is not None:
            self.server.send_signal(signal.SIGTERM)
            self.server.communicate(timeout=PATIENCE)
            self.server = None


def _merged(old: Any, new: Any) -> Any:
    if not isinstance(old, dict) or not isinstance(new, dict):
        return new
    return old | {key: _merged(old.get(key), value) for key, value in new.items()}


def _provide(page: str, shell: Shell, store: Path, folder: Path) -> None:
    def train(command: str, where: Path) -> None:
        done = shell.run(command, where)
        assert done.returncode == 0, done.stderr

    shutil.copytree(ROOT / "recipes", folder / "recipes")
    (folder / "scripts" / "bench").mkdir(parents=True)
    shutil.copy(ROOT / "scripts" / "bench" / "en-vi.yaml", folder / "scripts" / "bench")
    (folder / ".venv").mkdir()
    (folder / ".venv" / "bin").symlink_to(Path(shell.environment["PATH"].split(os.pathsep)[0]))
    shutil.copytree(shell.environment["ECONMT_DATA"], folder, dirs_exist_ok=True)
    tiny.write_texts(folder)
    tiny.write_texts(store)
    others = ("", "yaml", "ini", "nginx")
    text = "\n".join(block.text for block in blocks(page) if block.language not in others)
    tiny.provide_models(folder, text, store, train)
    if "mine.yaml" in text and "copy multi30k mine.yaml" not in text:
        recipe = load_recipe("multi30k", [f"{key}={value}" for key, value in tiny.TRANSLATION.items()])
        (folder / "mine.yaml").write_text(recipe_text(recipe), encoding="utf-8")
        Reader(page, shell, folder).edit(MINE)


def _every_command() -> list[str]:
    """The commands of all pages' blocks, and of scripts in their text, each once."""
    in_blocks = [command for page in PAGES for block in console_blocks(page) for command in commands(block)]
    return sorted({*in_blocks, *(command for page in PAGES for command in quoted_scripts(page))})


_FOLLOWED = [page for page in PAGES if console_blocks(page) or page == "docs/python.md"]
_LONG = ("docs/results/", "docs/controlled.md", "docs/low-rank.md")
"""Pages whose commands take long, which only thorough tests follow."""
_SLOW = {
    *("CONTRIBUTING.md", "README.md", "runtime/README.md"),
    *(f"docs/{name}.md" for name in ["beam-search", "distillation", "getting-started", "index", "inference"]),
    *(f"docs/{name}.md" for name in ["installing", "language-models", "memory-account", "memory"]),
    *(f"docs/{name}.md" for name in ["out-of-memory", "parallel", "python", "serving", "speed"]),
}
"""Pages whose commands take more than two seconds."""


def _marks(page: str) -> list[pytest.MarkDecorator]:
    """Tells how long following a page takes."""
    return [pytest.mark.thorough] if page.startswith(_LONG) else [pytest.mark.slow] * (page in _SLOW)


@pytest.mark.parametrize("page", [pytest.param(page, marks=_marks(page)) for page in _FOLLOWED])
def test_what_a_page_says_works(page: str, shell: Shell, store: Path, tmp_path: Path) -> None:
    _provide(page, shell, store, tmp_path)
    reader = Reader(page, shell, tmp_path)
    try:
        reader.follow()
    finally:
        reader.stop()


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if quoted_scripts(page)])
def test_scripts_that_the_text_of_a_page_names_run(
    page: str, shell: Shell, store: Path, tmp_path: Path
) -> None:
    _provide(page, shell, store, tmp_path)
    reader = Reader(page, shell, tmp_path)
    for command in quoted_scripts(page):
        reader.execute(command, Block("bash", command, 1))


@pytest.mark.thorough
@pytest.mark.parametrize("command", [command for command in _every_command() if SLOW.search(command)])
def test_commands_that_take_long_work(command: str, shell: Shell, store: Path, tmp_path: Path) -> None:
    _provide("docs/parallel.md", shell, store, tmp_path)
    Reader("a page", shell, tmp_path, with_slow=True).execute(command, Block("bash", command, 1))


def test_only_named_commands_are_not_executed() -> None:
    every = _every_command()
    assert len([command for command in every if why_only_parsed(command) is None]) > 140
    for reason, parts in ONLY_PARSED.items():
        for part in parts:
            assert any(part in f"{command} " for command in every), f"no page has '{part}' ({reason})"


class ArgumentsReadError(Exception):
    """Raised where a script has read its arguments and would begin its work."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "command", [each for each in _every_command() if _script(each) and "--help" not in each]
)
def test_scripts_have_the_options_that_pages_give(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, words = _script(command)
    if module == "scripts.bench":
        assert words[0] in benchmarks(), command
        module, words = f"scripts.bench.{words[0].replace('-', '_')}", words[1:]

    def stop_after(method: str) -> None:
        read = getattr(argparse.ArgumentParser, method)

        def stop(parser: argparse.ArgumentParser, given: Sequence[str] | None = None) -> None:
            read(parser, given)
            raise ArgumentsReadError

        monkeypatch.setattr(argparse.ArgumentParser, method, stop)

    monkeypatch.setattr(sys, "argv", [module, *words])
    stop_after("parse_args")
    stop_after("parse_intermixed_args")
    with pytest.raises(ArgumentsReadError):
        importlib.import_module(module).main()


NOTEBOOK = ROOT / "docs" / "tour.ipynb"
LARGEST_OUTPUT = 15_000
"""Bytes of the outputs of a cell."""
SMALL = {
    "model.embedding": 6,
    "model.encoder.size": 8,
    "model.decoder.size": 8,
    "model.attention.size": 5,
    "training.checkpoint_interval": 2,
    "training.device": "cpu",
    "decoding.beam_size": 3,
    "training.decode_and_evaluate": 4,
}


def cells(kind: str) -> list[dict[str, Any]]:
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    return [cell for cell in notebook["cells"] if cell["cell_type"] == kind]


@pytest.mark.slow
def test_the_cells_run_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    namespace: dict[str, Any] = {"__name__": "__main__"}
    said = []
    for number, cell in enumerate(cells("code")):
        source = "".join(cell["source"])
        small = source.replace('"training.max_updates": 1200', f'**{SMALL}, "training.max_updates": 4')
        small = small.replace('"training.max_updates": 2,', f'**{SMALL}, "training.max_updates": 2,')
        assert (small != source) == ("econmt.train(" in source)
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(small, f"{NOTEBOOK.name} cell {number}", "exec"), namespace)
        said.append(printed.getvalue())
    assert "max_updates 4 reached | best checkpoint:" in said[0]
    assert "<TrainedModel quickstart: en to de, 1 x lstm 8" in said[1]
    assert "log-probability: -" in said[2]
    assert namespace["axes"].images[0].get_array().shape == namespace["best"].attention.shape
    plain, own = (line for line in said[-1].splitlines() if "peak" in line)
    assert plain.startswith("plain PyTorch: peak ")
    assert own.startswith("econmt: peak ")


def test_the_notebook_is_small_and_has_outputs() -> None:
    code = cells("code")
    assert all(len(json.dumps(cell["outputs"])) < LARGEST_OUTPUT for cell in code)
    assert all(cell["outputs"] for cell in code)
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    text = "".join("".join(cell["source"]) for cell in cells("markdown"))
    for title in ("## Train", "## Translate", "## Attention", "## Memory"):
        assert title in text
