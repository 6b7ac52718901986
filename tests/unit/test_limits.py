"""What is exactly at a limit is taken, and what is one beyond it is not."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from econmt.cli import evaluate
from econmt.config import limits, recipe
from econmt.config.recipe import BatchSize, load_recipe
from econmt.data import files
from econmt.data.batching.batches import rows_of_batch
from econmt.decoding.text_reader import perplexity_of
from econmt.errors import InputError


def takes(call: Callable[[], object], refusal: str) -> bool:
    """True unless the call is refused with these words."""
    try:
        call()
    except InputError as error:
        return refusal not in str(error)
    return True


def test_sizes_of_lines_and_recipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "JUDGED", 5)
    monkeypatch.setattr(recipe, "LARGEST_RECIPE", 5)
    path = tmp_path / "text"
    for length, whole in ((5, True), (6, False)):
        path.write_text("a\n" + "x" * length + "\n")
        assert takes(lambda: evaluate._lines(path), f"{path}:2: 6 characters, more than the 5 that") == whole
        path.write_text("x" * length)
        assert takes(lambda: load_recipe(path), "is too large for a recipe") == whole


@pytest.mark.parametrize("most", [1, 15, 10_000])
def test_numbers_of_calls(most: int) -> None:
    refused, number, whole = "n: expected a ", limits.check_number, limits.check_whole
    for value, plain, above, counted in (
        (0, True, False, False),
        (1, True, True, True),
        (most, True, True, True),
        (most + 1, False, False, False),
        (-1, False, False, False),
        (True, False, False, False),
    ):
        assert takes(partial(number, "n", value, most), refused) == plain
        assert takes(partial(number, "n", value, most, whole=True), refused) == plain
        assert takes(partial(number, "n", value, most, above=True), refused) == above
        assert takes(partial(whole, "n", value, most), refused) == counted
    assert takes(lambda: number("n", 0.5, most), refused)
    assert not takes(lambda: number("n", 0.5, most, whole=True), refused)
    assert not takes(lambda: whole("n", 1.0, most), refused)
    assert takes(lambda: whole("n", None, most), refused)
    assert limits.natural("9" * 15) == 10**15 - 1
    assert limits.natural("9" * 16) is limits.natural("") is limits.natural("²") is None


def test_the_smallest_batch_and_the_largest_perplexity() -> None:
    words = BatchSize(type="word", size=60)
    assert [rows_of_batch(words, positions) for positions in (1, 20, 30, 31, 60, 61)] == [60, 3, 2, 1, 1, 1]
    assert rows_of_batch(BatchSize(type="sentence", size=60), 61) == 60
    assert perplexity_of(-699.0, 1) < perplexity_of(-720.0, 1) == perplexity_of(-7200.0, 2) == float("inf")
    assert perplexity_of(-6.0, 3) == pytest.approx(7.389056)


def test_a_file_with_another_time_is_read_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_BLOCK", 4)
    monkeypatch.setattr(files, "_BLOCKS", 2)  # the first and the last
    path = tmp_path / "file"
    content = b"first..middle..last"
    for changed, same_time, same in (
        (content, True, True),
        (b"first..MIDDLE..last", True, False),
        (b"first..middle..LAST", False, False),
        (content + b".", False, False),
    ):
        path.write_bytes(content)
        described, status = files.describe(path), path.stat()
        path.write_bytes(changed)
        for later in (0, 1):
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + later))
            assert files.is_as_described(path, described, verify=False) == (same if later else same_time)
            assert files.is_as_described(path, described, verify=True) == same
