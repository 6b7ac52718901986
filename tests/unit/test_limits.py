"""What is exactly at a limit is taken, and what is one beyond it is not."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from econmt.cli import evaluate
from econmt.config import limits, recipe
from econmt.config.conditions import (
    above_zero,
    all_of,
    any_of,
    at_least,
    at_most,
    below,
    is_empty,
    is_set,
    one_of,
    other_than,
    settings_text,
)
from econmt.config.data import Noise
from econmt.config.migration import REMOVED_KEYS, remove_keys
from econmt.config.model import largest_rank
from econmt.config.optimizer import ScheduleSection
from econmt.config.recipe import BatchSize, load_recipe
from econmt.data import files
from econmt.data.batching.batches import rows_of_batch
from econmt.decoding.text_reader import perplexity_of
from econmt.errors import InputError
from econmt.training import validation


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


def test_shares_and_updates_of_recipes() -> None:
    Noise(upper=0.25, title=0.75)
    with pytest.raises(ValueError, match="their sum must be at most 1"):
        Noise(upper=0.25, title=0.7501)
    for name, least in (("cosine", 11), ("linear", 11), ("constant", 0), ("noam", 0)):
        for updates in (None, 9, 10, 11):
            with (
                nullcontext() if (updates or 0) >= least else pytest.raises(ValueError, match="decay_updates")
            ):
                ScheduleSection(name=name, warmup=10, decay_updates=updates)
    for rows, columns in itertools.product(range(1, 9), repeat=2):
        rank, saved = largest_rank(rows, columns), rows * columns
        assert rank * (rows + columns) < saved <= (rank + 1) * (rows + columns)


@pytest.mark.parametrize("value", [None, 0, 1, 2, 3])
def test_conditions_of_numbers(value: int | None) -> None:
    values = {"a.b": 0 if value is None else value, "a.c": 2}
    found = [each.holds(values) for each in (at_most("a.b", 2), at_least("a.b", 2), below("a.b", "a.c"))]
    assert found == [values["a.b"] <= 2, values["a.b"] >= 2, values["a.b"] < 2]
    for condition, holds in (
        (at_most("x", 0), True),
        (at_most("x", -1), False),
        (at_least("x", 1), False),
        (above_zero("a.b"), (value or 0) > 0),
        (any_of(is_set("a.b"), is_set("x")), bool(value)),
        (all_of(is_set("a.b"), is_empty("x")), bool(value)),
        (one_of("a.b", 2, 3), value in (2, 3)),
        (other_than("a.b", 2, 3), value not in (2, 3)),
    ):
        assert condition.holds({"a.b": value, "a.c": 2}) == holds, condition.text
    shown = {"a.b": value, "a.c": 2}
    both = "a.c: 2" if not value else f"a.b: {value} and a.c: 2"
    assert settings_text(all_of(is_set("a.b"), is_set("a.c")), shown) == both


def test_former_keys_are_removed_only_with_their_defaults() -> None:
    for key, (default, advice) in REMOVED_KEYS.items():
        *sections, name = key.split(".")
        for value in (default, "other"):
            tree: dict[str, Any] = {name: value, "kept": 1}
            for section in reversed(sections):
                tree = {section: tree}
            refused = remove_keys(tree)
            for section in sections:
                tree = tree[section]
            assert tree == {"kept": 1, **({} if value == default else {name: value})}
            assert refused == ({} if value == default else {key: f"is no longer supported; {advice}"})


@pytest.mark.parametrize(("long", "told"), [(0, False), (1, False), (2, True), (199, True)])
def test_a_hundredth_of_the_validation_text_is_told_of(long: int, told: bool) -> None:
    limits_of = SimpleNamespace(max_length=5), SimpleNamespace(max_input_length=9)
    given = SimpleNamespace(pairs=limits_of[0], decoding=limits_of[1])
    prepared = SimpleNamespace(valid=range(200))
    with patch.object(validation, "longer_than", lambda _, most: np.arange(200) < long * (most == 5)):
        assert len(validation.check_lengths(prepared, given, True)) == told
    assert validation.check_lengths(prepared, given, False) == []
