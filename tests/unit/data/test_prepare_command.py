"""``econmt prepare``: its report, what fingerprints notice, and one clear line for what is wrong with the text."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from econmt.cli.main import main
from econmt.data.files import describe, is_as_described
from econmt.errors import InputError
from econmt_memory.report.tables import format_bytes
from tests.golden import assert_golden

Command = Callable[..., tuple[int, str, str]]
RECIPE = """\
name: try
output: model
data:
  source: en
  target: de
  train: [train]
  valid: valid
  subwords: {type: bpe, size: 60}
training:
  max_updates: 1
"""


@pytest.fixture
def econmt(corpus: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    """Run a command; gives exit code, standard output and standard error."""
    Path("recipe.yaml").write_text(RECIPE, encoding="utf-8")

    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(["prepare", "recipe.yaml", "--data-dir", "corpus", *arguments])
        captured = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return ended.value.code, captured.out, captured.err

    return run


def test_the_whole_report(econmt: Command) -> None:
    """Over words, one sentence of which is too long, another blank and unknown in parts."""
    (Path("corpus") / "test.en").write_text("ba zozozo\n\n" + "li " * 30 + "\n")
    (Path("corpus") / "test.de").write_text("de\nba\nmo\n")
    words = "data.subwords={type: words}", "data.max_length=8", "data.test=test"
    for name, more in (("fixed", "training.bucket_width=4"), ("derived", "training.max_buckets=3")):
        code, out, _ = econmt(*words, more, "training.batch.size=8", "--output", name)
        assert code == 0
        files = sum(path.stat().st_size for path in Path(name).iterdir())
        head, rest = out.split("\n", 1)
        assert head.startswith(f"store       {name} ({format_bytes(files)}, made in ")
        assert_golden(f"prepare-{name}", re.sub(r"\.\.\.\S*corpus", "...", rest))


def test_second_run_is_the_same_report_without_work(econmt: Command) -> None:
    first = econmt()
    made = Path("model/prepared/train.tokens").stat().st_ino
    assert econmt() == first
    assert "vocabulary  source 60, target 60 (joint)" in first[1]
    assert "Training leaves out pairs" not in first[1]
    assert Path("model/prepared/train.tokens").stat().st_ino == made


def test_bad_text_gets_one_clear_line(econmt: Command, corpus: Path) -> None:
    english = corpus / "train.en"
    english.write_bytes(english.read_bytes().replace(b"\n", b"\n\xff", 4).replace(b"\xff", b"", 3))
    code, out, err = econmt()
    assert (code, out) == (2, "")
    assert err.startswith(f"econmt: error: {english}:5: not valid UTF-8")
    assert err.count("\n") == 1
    assert not Path("model/prepared").exists()


LARGE = 5 << 20


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """A file of which a sample is read."""
    path = tmp_path / "large"
    path.write_bytes(bytes(range(256)) * (LARGE // 256))
    return path


def change(path: Path, place: int) -> None:
    """Changes a byte, and not the time of the file."""
    status = path.stat()
    with path.open("r+b") as stream:
        stream.seek(place)
        stream.write(b"\xee" if place % 256 != 0xEE else b"\x11")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def test_a_small_file_is_its_own_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("econmt.data.files._BLOCK", 40)  # as many bytes as the sample of a larger file has
    path = tmp_path / "small"
    path.write_bytes(bytes(range(256)) * 40)
    description = describe(path)
    assert description["sha256"] == description["sample"]
    for place in (0, 5000, 10239):
        change(path, place)
        assert not is_as_described(path, description, verify=False)
        path.write_bytes(bytes(range(256)) * 40)
        os.utime(path, ns=(description["time"], description["time"]))


def test_a_sample_sees_the_ends_and_most_large_changes_and_verify_everything(large: Path) -> None:
    description = describe(large)
    assert description["size"] == LARGE
    assert description["sha256"] != description["sample"]
    found = []
    for place in range(0, LARGE, 40_000):
        before = large.read_bytes()
        change(large, place)
        assert not is_as_described(large, description, verify=True)
        found.append(not is_as_described(large, description, verify=False))
        large.write_bytes(before)
        os.utime(large, ns=(description["time"], description["time"]))
    assert found[0]
    assert 0.4 < sum(found) / len(found) < 0.8  # 256 of 320 blocks, drawn with repetition
    change(large, LARGE - 1)
    assert not is_as_described(large, description, verify=False)


def test_the_places_depend_on_the_content(large: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_bytes(large.read_bytes()[:-1] + b"x")
    assert describe(other)["sample"] != describe(large)["sample"]


def test_an_absent_file_is_told(large: Path) -> None:
    description = describe(large)
    large.unlink()
    with pytest.raises(InputError, match=rf"^{large}: cannot read: No such file"):
        is_as_described(large, description, verify=False)
    with pytest.raises(InputError, match=rf"^{large}: cannot read: No such file"):
        describe(large)
