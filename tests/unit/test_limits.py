"""What is exactly at a limit is taken, and what is one beyond it is not."""

from __future__ import annotations

import io
import os
import zipfile
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import torch

from econmt.api.translation import TrainedModel
from econmt.bench.training import vocabulary_sizes
from econmt.cli import evaluate, main, workload
from econmt.cli.main import LEAST_ADDRESS_SPACE
from econmt.cli.workload import parse_bucket
from econmt.config import conditions, limits, recipe, yaml_reader
from econmt.config.data import Noise
from econmt.config.recipe import BatchSize, load_recipe
from econmt.data import files
from econmt.data.batching.batch import BatchShape
from econmt.data.batching.batches import rows_of_batch
from econmt.data.text.tmx import read_tmx
from econmt.decoding.attention_picture import LONGEST, token_label
from econmt.decoding.text_reader import perplexity_of
from econmt.errors import EconmtError, InputError
from econmt.training import validation
from econmt_serve import docx
from econmt_serve.settings import Refused


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
        assert (
            takes(lambda: evaluate._lines(path), f"{path}:2: {length} characters, more than the 5") == whole
        )
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


def test_the_smallest_batch_the_largest_perplexity_and_the_sum_of_shares() -> None:
    words = BatchSize(type="word", size=60)
    assert [rows_of_batch(words, positions) for positions in (1, 20, 30, 31, 60, 61)] == [60, 3, 2, 1, 1, 1]
    assert rows_of_batch(BatchSize(type="sentence", size=60), 61) == 60
    assert perplexity_of(-699.0, 1) < perplexity_of(-720.0, 1) == perplexity_of(-7200.0, 2) == float("inf")
    assert perplexity_of(-6.0, 3) == pytest.approx(7.389056)
    Noise(upper=0.25, title=0.75)
    with pytest.raises(ValueError, match="their sum must be at most 1"):
        Noise(upper=0.25, title=0.7501)


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


@pytest.mark.parametrize("value", [None, 0, 1, 2, 3])
def test_conditions_of_numbers(value: int | None) -> None:
    values = {"a.b": 0 if value is None else value, "a.c": 2}
    each = conditions.at_most("a.b", 2), conditions.at_least("a.b", 2), conditions.below("a.b", "a.c")
    found = [condition.holds(values) for condition in each]
    assert found == [values["a.b"] <= 2, values["a.b"] >= 2, values["a.b"] < 2]
    for condition, holds in (
        (conditions.at_most("x", 0), True),
        (conditions.at_most("x", -1), False),
        (conditions.at_least("x", 1), False),
        (conditions.above_zero("a.b"), (value or 0) > 0),
        (conditions.any_of(conditions.is_set("a.b"), conditions.is_set("x")), bool(value)),
        (conditions.all_of(conditions.is_set("a.b"), conditions.is_empty("x")), bool(value)),
        (conditions.one_of("a.b", 2, 3), value in (2, 3)),
        (conditions.other_than("a.b", 2, 3), value not in (2, 3)),
    ):
        assert condition.holds({"a.b": value, "a.c": 2}) == holds, condition.text
    shown = {"a.b": value, "a.c": 2}
    both = "a.c: 2" if not value else f"a.b: {value} and a.c: 2"
    assert (
        conditions.settings_text(conditions.all_of(conditions.is_set("a.b"), conditions.is_set("a.c")), shown)
        == both
    )


@pytest.mark.parametrize(("long", "told"), [(0, False), (1, False), (2, True), (199, True)])
def test_a_hundredth_of_the_validation_text_is_told_of(long: int, told: bool) -> None:
    limits_of = SimpleNamespace(max_length=5), SimpleNamespace(max_input_length=9)
    given = SimpleNamespace(pairs=limits_of[0], decoding=limits_of[1])
    prepared = SimpleNamespace(valid=range(200))
    with patch.object(validation, "longer_than", lambda _, most: np.arange(200) < long * (most == 5)):
        assert len(validation.check_lengths(prepared, given, True)) == told
    assert validation.check_lengths(prepared, given, False) == []


def test_positions_digits_and_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    most = limits.POSITIONS
    for sizes in ((most, 1), (1, most), (most + 1, 1), (1, most + 1)):
        text = f"{sizes[0]}x{sizes[1]}"
        assert takes(lambda: parse_bucket(text), f"at most {most} positions") == (max(sizes) == most)  # noqa: B023
    path = tmp_path / "recipe.yaml"
    for count in (yaml_reader._DIGITS, yaml_reader._DIGITS + 1):
        path.write_text(f"training: {{seed: {'9' * count}}}\n")
        assert takes(lambda: load_recipe(path), "characters; give at most") == (count == yaml_reader._DIGITS)
    label = token_label("x" * LONGEST)
    assert (label, token_label("x" * (LONGEST + 1))) == ("x" * LONGEST, "x" * (LONGEST - 1) + "…")
    monkeypatch.setattr(limits, "LINE_BYTES", 6)
    for segment in ("abcdef", "abcdefg"):
        units = "".join(f"<tuv xml:lang='{code}'><seg>{segment}</seg></tuv>" for code in ("en", "de"))
        (tmp_path / "a.tmx").write_text(f"<tmx><body><tu>{units}</tu></body></tmx>")
        read = partial(list, read_tmx(tmp_path / "a.tmx", "en", "de"))
        assert takes(read, "a segment of 7 characters or more") == (segment == "abcdef")


def test_the_least_address_space(monkeypatch: pytest.MonkeyPatch) -> None:
    for size, enough in ((LEAST_ADDRESS_SPACE - 1, False), (LEAST_ADDRESS_SPACE, True), (None, True)):
        monkeypatch.setattr(main, "_address_space", lambda: size)  # noqa: B023
        for words, loads in (
            (["train", "quickstart"], True),
            (["evaluate"], "evaluate" not in main.WITHOUT_TORCH),
        ):
            with nullcontext() if enough or not loads else pytest.raises(EconmtError, match="ulimit -v"):
                main._check_address_space(words)


def test_the_size_of_a_document(monkeypatch: pytest.MonkeyPatch) -> None:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr("a", "x" * 5)
        archive.writestr("b", "x" * 6)
    for most, refused in ((11, False), (10, True)):
        monkeypatch.setattr(docx, "_LARGEST", most)
        with pytest.raises(Refused, match="MiB when unpacked") if refused else nullcontext():
            assert [*docx._unpacked(content.getvalue()).values()] == [b"x" * 5, b"x" * 6]


def test_sizes_of_vocabularies_that_a_recipe_has() -> None:
    for joint, both in (("joint: false, target: 60", (50, 60)), ("joint: true", (50, 50))):
        words = f"data.subwords={{type: words, source: 50, {joint}}}"
        assert vocabulary_sizes(load_recipe("quickstart", [words])) == both
    for streams, size in ((1, 64), (6, 64), (7, 32), (13, 8), (14, 4), (20, 4)):
        factors = [f"data.source_factors={[f'f{number}' for number in range(streams)]}"]
        factors.append(f"model.source_factors_num_embed={[2] * streams}")
        *_, last = sizes = vocabulary_sizes(load_recipe("quickstart", factors))
        assert (len(sizes), last) == (2 + streams, size)


@pytest.mark.parametrize("stored", [["int8"], ["int8", "int8"], ["int8", None], [None, "int8"], [None]])
def test_auto_is_8_bits_only_if_all_models_are_stored_so(stored: list[str | None]) -> None:
    loaded = [SimpleNamespace(stored=each) for each in stored]
    for requested, expected in (("auto", None not in stored), ("int8", True), ("float32", False)):
        model = SimpleNamespace(device=torch.device("cpu"), _requested_precision=requested, loaded=loaded)
        assert (TrainedModel._precision(model, [load_recipe("quickstart")]) == torch.int8) == expected


def test_the_most_frequent_shape_has_the_most_rows_of_all_its_batches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shapes = [BatchShape(4, 4, 1, 10), BatchShape(8, 8, 6, 3), BatchShape(9, 9, 17, 1)]
    batch = SimpleNamespace(source=np.zeros((17, 9)), target_output=np.zeros((17, 9)))
    batches = SimpleNamespace(worst_batch=lambda: batch, shapes=lambda: shapes)
    monkeypatch.setattr(workload, "training_batches", lambda *_: batches)
    for name in ("task_of_sizes", "make_task"):
        monkeypatch.setattr(workload, name, lambda *_: SimpleNamespace(sizes=()))
    found = workload._from_text(None, SimpleNamespace(folder="here"))
    assert (found.shape, found.frequent) == ((17, 9, 9), (6, 8, 8))
