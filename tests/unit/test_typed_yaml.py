from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict

from econmt.config.yaml_reader import dotted, load_section, parse_size, walk
from econmt.errors import InputError


class Anything(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    value: Any = None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("true", True), ("False", False), ("yes", "yes"), ("on", "on"), ("no", "no"), ("3e-4", 0.0003),
        ("1E3", 1000.0), ("+1.5", 1.5), (".5", 0.5), ("010", 10), ("0o17", 15), ("0x1f", 31), ("-3", -3),
        ("1:30", "1:30"), ("1_000", "1_000"), ("2001-01-01", "2001-01-01"), ("~", None), ("", None), ("'~'", "~"),
        ("<<", "<<"), ("[1, [a, {b: 2}]]", [1, ["a", {"b": 2}]]),
    ],
)  # fmt: skip
def test_scalars_are_those_of_yaml_1_2(text: str, expected: object) -> None:
    value = load_section(Anything, f"value: {text}\n", "file").value
    assert value == expected
    assert type(value) is type(expected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "file:1: expected keys and values (value), the file is empty"),
        ("# only a comment\n", "file:1: expected keys and values (value), the file is empty"),
        ("- a\n- b\n", "file:1: expected keys and values (value), found a list at the top"),
        ("just words\n", "file:1: expected keys and values (value), found the text 'just words' at the top"),
        ("value: [1,\n2\n", "file:3: not valid YAML: expected ',' or ']', but got '<stream end>'"),
        ("value: a: b\n", "file:1: not valid YAML: mapping values are not allowed here"),
        ("value:\n\t3\n", "file:2: not valid YAML: found character '\\t' that cannot start any token"),
        ("value: 1\n---\nvalue: 2\n", "file:2: not valid YAML: but found another document"),
        ("value:\n  a\0b\n", "file:2: not valid YAML: the character U+0000 is not allowed"),
        ("value: 1\nother: \x07\n", "file:2: not valid YAML: the character U+0007 is not allowed"),
        ("value:\n  a: &a [x]\n  b: *a\n", "file:3: not valid YAML: aliases are not allowed"),
        ("value: *gone\n", "file:1: not valid YAML: aliases are not allowed"),
        ("value:\n  {[1, 2]: 3}\n", "file:2: a key must be a word, not a list or a section"),
        ("value:\n  a: 1\n  a: 2\n", "file:3: value.a: given twice; first at file:2"),
        ("value: !!python/name:os.system ''\n", "file:1: value: the tag tag:yaml.org,2002:python/name:os.system"),
        ("value: !!int abc\n", "file:1: value: 'abc' is not a valid int; remove the tag !!int"),
        ("value: !!timestamp 2001-01-01\n", "file:1: value: the tag tag:yaml.org,2002:timestamp is not allowed"),
        ("value: " + "[" * 5000, "file:1: not valid YAML: nested too deeply"),
        ("value: " + "9" * 5000, "file:1: value: a number of 5,000 characters; give at most 100"),
    ],
)  # fmt: skip
def test_text_that_is_no_section(text: str, expected: str) -> None:
    with pytest.raises(InputError) as caught:
        load_section(Anything, text, "file")
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(expected)


def test_a_byte_order_mark_and_windows_lines_are_no_matter() -> None:
    assert load_section(Anything, "\ufeffvalue: 3\r\n", "file").value == 3


def test_paths_are_written_as_people_write_them() -> None:
    assert dotted(("data", "train", 1, "x")) == "data.train[1].x"


def test_walk_lists_every_key_in_order() -> None:
    class Outer(BaseModel):
        first: int = 1
        inner: Anything | None = None
        last: str = ""

    assert [key for key, _, _ in walk(Outer)] == ["first", "inner", "inner.value", "last"]


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4GiB", 4 * 2**30),
        ("512 MiB", 2**29),
        ("2GB", 2 * 10**9),
        ("1.5kB", 1500),
        ("3 TB", 3 * 10**12),
        ("7", 7),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size
    assert parse_size(f" {text.lower()} ") == size


@pytest.mark.parametrize("text", ["", "GiB", "4 Gi", "4GiBs", "0", "0.5", "-4GiB", "4,5GB", "inf"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="4GiB"):
        parse_size(text)
