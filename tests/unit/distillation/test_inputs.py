"""Records of what a stage was made from: what counts as changed, and what is not read again."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from econmt.errors import InputError
from econmt_distill import inputs
from econmt_distill.inputs import StageInputs, differences, read_inputs, take_inputs, write_record


def take(folder: Path, recorded: StageInputs | None = None, **settings: str) -> StageInputs:
    files = {"--source": folder / "a", "--target": folder / "b"}
    return take_inputs(settings, {name: path for name, path in files.items() if path.exists()}, recorded)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in "ab":
        (tmp_path / name).write_text(f"text of {name}\n")
    return tmp_path


def test_files_are_described_by_their_content(folder: Path) -> None:
    made = take(folder, size="3")
    assert made.settings == {"size": "3"}
    assert list(made.files) == ["--source", "--target"]
    for file, name in zip(made.files.values(), "ab", strict=True):
        digest = hashlib.sha256(f"text of {name}\n".encode()).hexdigest()
        assert (file.path, file.size, file.sha256) == (str(folder / name), 10, digest)
    write_record(folder / "record", made)
    assert read_inputs(folder / "record", folder) == made
    assert read_inputs(folder / "nothing", folder) is None
    (folder / "record").write_text("{}")
    with pytest.raises(InputError, match=r"record: .*; remove .* and run the command again"):
        read_inputs(folder / "record", folder)


def test_unchanged_files_are_not_read_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Path] = []
    describe = inputs.describe
    monkeypatch.setattr(inputs, "describe", lambda path: read.append(path) or describe(path))
    recorded = take(folder)
    assert read == [folder / "a", folder / "b"]
    assert take(folder, recorded) == recorded
    (folder / "b").write_text("other of b\n"[:10])
    again = take(folder, recorded)
    assert read == [folder / "a", folder / "b", folder / "b"], "the changed one alone"
    assert again.files["--source"] == recorded.files["--source"]
    assert differences(recorded, again) == [f"--target {folder}/b has changed"]
    moved = take_inputs({}, {"--source": (folder / "a").rename(folder / "c")}, recorded)
    assert len(read) == 3
    assert moved.files["--source"].path == str(folder / "c"), "where it is now, for messages"
    assert moved.files["--source"].time == recorded.files["--source"].time


def test_differences_are_told_in_words(folder: Path) -> None:
    first = take(folder, size="3", kind="x")
    assert differences(first, first) == []
    (folder / "b").unlink()
    second = take(folder, kind="y", more="z")
    changed = ["size 3 -> not given", "kind x -> y", "more not given -> z", "--target is not given any more"]
    assert differences(first, second) == changed
    assert differences(second, first)[-1] == f"--target {folder}/b was not given before"
    (folder / "c").write_text("text of c\n")
    other = take_inputs({}, {"--source": folder / "c"}, None)
    moved = StageInputs(settings={}, files=second.files)
    assert differences(moved, other) == [f"--source {folder}/a -> {folder}/c"]


def test_the_digest_is_of_settings_and_content_only(folder: Path) -> None:
    first = take(folder, size="3")
    (folder / "copy").write_text("text of a\n")
    copied = take_inputs({"size": "3"}, {"--source": folder / "copy", "--target": folder / "b"}, None)
    assert copied != first
    assert copied.digest == first.digest
    assert differences(first, copied) == []
    digests = {first.digest, take(folder, size="4").digest, take(folder).digest}
    (folder / "a").write_text("other\n")
    assert len({*digests, take(folder, size="3").digest}) == 4
