"""A teacher, a text, and a recipe of a student, all tiny."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from econmt_distill.teachers import TeacherChoice
from tests.unit.cli.conftest import _idle_machine, call, text, word_model  # noqa: F401

STUDENT = """
name: small
output: unused
data: {source: src, target: trg, train: [unused], valid: unused, subwords: {type: bpe, size: 34}}
model:
  embedding: 6
  encoder: {cell: gru, layers: 2, size: 6, bidirectional: bottom}
  decoder: {cell: ssru, layers: 1, size: 6, input_feeding: false, state_init: last}
  attention: {type: bilinear}
  weight_tying: src_trg_softmax
training: {batch: {type: sentence, size: 8}, max_updates: 4, checkpoint_interval: 2, device: cpu, threads: 1}
decoding: {beam_size: 2, max_output_factor: 0.5}
"""
PROGRAM = """
import pathlib, sys
lines = sys.stdin.read().splitlines()
with pathlib.Path("calls").open("a") as calls:
    calls.write(f"{len(lines)}\\n")
for line in lines:
    print(line.upper())
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Writes a program of Python and returns the command that runs it, in ``tmp_path``."""
    monkeypatch.chdir(tmp_path)

    def write(code: str = PROGRAM) -> str:
        (tmp_path / "program.py").write_text(code)
        return shlex.join([sys.executable, "-S", str(tmp_path / "program.py")])

    return write


@pytest.fixture
def teacher(program: Callable[[str], str]) -> TeacherChoice:
    """A program that puts lines in capitals and notes how many it got, in the file ``calls``."""
    return TeacherChoice(command=program(PROGRAM))


def calls(folder: Path) -> list[int]:
    """Numbers of lines that the program got in each of its calls."""
    file = folder / "calls"
    return [int(line) for line in file.read_text().splitlines()] if file.exists() else []
