from __future__ import annotations

import gzip
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import PATIENCE, econmt_environment
from tests.unit.cli.conftest import Call, Ended

INPUT = "a b c\n\nd\n  \nh g f e d\n"


def test_files_in_and_out_and_lines_without_tokens(call: Call, word_model: Path, tmp_path: Path) -> None:
    expected = call("translate", "-m", word_model, text=INPUT).out
    (tmp_path / "in.gz").write_bytes(gzip.compress(INPUT.encode()))
    ended = call("translate", "-m", word_model, "-i", tmp_path / "in.gz", "-o", tmp_path / "out")
    tokens = len(expected.split()) + 3  # with the end of each sentence
    assert (ended.out, f"5 lines, {tokens} target tokens in" in ended.err) == ("", True)
    assert (tmp_path / "out").read_text() == expected
    ended = call("translate --long-lines skip --max-input-length 2 -m", word_model, text="\na b c\n")
    assert ended.out == "\n\n"
    assert "2 lines, 0 target tokens in" in ended.err
    assert "econmt: 1 line, 0 target tokens in" in call("translate", "-m", word_model, text="\n").err


def test_attention_is_drawn_and_sampling_follows_its_seed(
    call: Call, word_model: Path, tmp_path: Path
) -> None:
    picture = tmp_path / "a.png"
    options = ("--output-type", "attention", "--attention-picture", picture)
    ended = call("translate -m", word_model, *options, text="\na b c\n")
    assert [bool(json.loads(line)["attention"]) for line in ended.lines] == [False, True]
    assert picture.read_bytes().startswith(b"\x89PNG")

    def drawn(*options: object) -> list[str]:
        return call("translate", "-m", word_model, "--sample", *options, text=INPUT * 3).lines

    assert drawn("--seed", 3) == drawn("--seed", 3, "--batch-size", 2)
    assert drawn("--seed", 3) != drawn("--seed", 4)
    greedy = call("translate", "-m", word_model, "-b", 1, text=INPUT * 3).lines
    assert drawn("--temperature", 0.0001) == drawn("--top-p", 0.001) == greedy


def test_checkpoints_can_be_chosen(call: Call, word_model: Path) -> None:
    def scores(*options: object) -> list[str]:
        return call("translate", "-m", word_model, "--output-type", "score", *options, text=INPUT).lines

    assert scores("--checkpoint", "last") == scores("--checkpoint", 8)
    assert scores("--checkpoint", word_model / "params.00006.safetensors") == scores("--checkpoint", 6)
    assert scores("--checkpoint", 6) != scores("--checkpoint", 8)
    several = scores("-m", word_model, "--checkpoint", 6, "--checkpoint", 8)
    assert several not in (scores("--checkpoint", 6), scores("--checkpoint", 8))


def failure(ended: Ended, *words: str) -> None:
    code, _, err = ended
    errors = [line for line in err.splitlines() if line.startswith("econmt: error: ")]
    assert code == 2
    assert len(errors) == 1
    assert "Traceback" not in err
    for word in words:
        assert word in errors[0]


def test_bad_text_names_its_line_and_loses_nothing(call: Call, word_model: Path, tmp_path: Path) -> None:
    ended = call("translate", "-m", word_model, text=b"a b\nc\n\xff\nd\n")
    failure(ended, "standard input:3", "UTF-8")
    assert len(ended.lines) == 2
    failure(call("translate", "-m", word_model, text=b"a\0b\n"), "standard input:1", "NUL")
    (tmp_path / "in").write_bytes(b"a\nb\xc3\n")
    (tmp_path / "out").write_text("old")
    ended = call("translate -m", word_model, "-i", tmp_path / "in", "-o", tmp_path / "out")
    failure(ended, "in:2", "UTF-8")
    assert (tmp_path / "out").read_text() == "old"  # nothing of the chunk was translated


def test_several_translations_are_listed_as_moses_does(call: Call, word_model: Path) -> None:
    text = "a b c\n\nd\n"
    several = ("translate", "-m", word_model, "-b", 3, "--nbest-size", 2)
    rows = [line.split(" ||| ") for line in call(*several, "--chunk-size", 1, text=text).lines]
    assert [row[0] for row in rows] == ["0", "0", "1", "2", "2"]
    objects = call(*several, "--output-type", "json", text=text).lines
    found = [json.loads(line)["nbest"] for line in objects]
    attending = map(json.loads, call(*several, "--output-type", "attention", text=text).lines)
    assert [len(line["nbest"]) for line in attending] == [2, 0, 2]
    assert [row[1] for row in rows if row[0] == "0"] == [each["translation"] for each in found[0]]
    likely, score = float(rows[0][2].removeprefix("logprob= ")), float(rows[0][3])
    assert likely == pytest.approx(found[0][0]["log_probability"], abs=1e-5)
    assert score == pytest.approx(found[0][0]["score"], abs=1e-5)
    assert rows[2][1:] == ["", "logprob= 0.000000", "0.000000"]


def test_pipes_are_read_and_answered_line_by_line(word_model: Path, call: Call) -> None:
    command = [sys.executable, "-m", "econmt", "translate", "-m", str(word_model), "--threads", "1"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, env=econmt_environment(), **pipes) as process:
        # The answer comes while the input is still open.
        for line in (b"a b\n", b"c d\n"):
            process.stdin.write(line)
            process.stdin.flush()
            assert process.stdout.readline().endswith(b"\n")
        process.stdout.close()
        try:
            process.stdin.write(b"e f\n" * 10)
            process.stdin.close()
        except BrokenPipeError:
            pass
        talk = process.stderr.read().decode()
        process.wait(timeout=PATIENCE)
    assert "Traceback" not in talk
    assert "error" not in talk
    reading, writing = os.pipe()
    os.write(writing, b"a b\n")
    os.close(writing)
    assert len(call("translate", "-m", word_model, "-i", f"/dev/fd/{reading}").lines) == 1
    os.close(reading)


@pytest.mark.parametrize("name", ["recipe.yaml", "params.best.safetensors", "vocab.source.txt"])
def test_a_pipe_in_a_model_folder_is_refused(call: Call, copy: Path, name: str) -> None:
    (copy / name).unlink()
    os.mkfifo(copy / name)
    ended = call("translate", "-m", copy, text="a\n")
    assert (ended.code, ended.out) == (2, "")
    assert f"{copy / name}: a named pipe, not a file" in ended.err


def test_a_terminal_is_told_how_many_lines_are_done(
    call: Call, word_model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    given = ("-m", word_model, "-o", tmp_path / "made")
    source = text / "test.src"
    assert "lines" not in call("translate", *given, "-i", source).err.replace("12 lines,", "")
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "12 of 12 lines" in without_colours(call("translate", *given, "-i", source).err)
    assert "12 lines" in without_colours(call("translate", *given, text=source.read_bytes()).err)
    scored = call("score", *given, "-s", source, "-t", text / "test.trg")
    assert "12 of 12 pairs" in without_colours(scored.err)


def without_colours(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def test_options_that_change_the_next_tokens(call: Call, word_model: Path) -> None:
    text = "a b c\nd\n"
    long = call("translate", "-m", word_model, "--min-output-length", 7, "--ban-unk", text=text).succeeded()
    assert all(len(line.split()) >= 7 and "<unk>" not in line for line in long.lines)
