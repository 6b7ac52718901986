"""The runtime's lines of text and its batches, with small limits."""

from __future__ import annotations

import gzip
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from econmt_runtime import launcher
from econmt_runtime import lines as lines_module
from econmt_runtime import translator as translator_module
from econmt_runtime.errors import RuntimeInputError
from econmt_runtime.lines import file_chunks
from econmt_runtime.search import Options
from econmt_runtime.text import RuntimeWords
from econmt_runtime.translator import RuntimeTranslator


def reader(content: bytes, sizes: list[int]) -> Callable[[], bytes]:
    """Reads a content in blocks of these sizes, the last one again and again."""
    left, sizes = [content], [*sizes]

    def read() -> bytes:
        size = sizes.pop(0) if len(sizes) > 1 else sizes[0]
        block, left[0] = left[0][:size], left[0][size:]
        return block

    return read


@given(
    st.lists(st.sampled_from(["", "a", "ä b", "\r", "狗\r", "\ufeff", " "])),
    st.booleans(),
    st.lists(st.integers(1, 9), min_size=1, max_size=9),
)
def test_lines_are_the_same_in_blocks_of_any_size(texts: list[str], ends: bool, sizes: list[int]) -> None:
    content = "\n".join(texts) + "\n" * (ends and bool(texts))
    expected = [text.removesuffix("\r") for text in content.split("\n")]
    expected[0] = expected[0].removeprefix("\ufeff")
    if content.endswith("\n") or not content:
        expected.pop()
    found = list(lines_module._chunks(reader(content.encode(), sizes), "here"))
    assert [line for chunk in found for line in chunk] == expected
    assert all(found)


def test_files_without_text_or_an_end_are_refused(tmp_path: Path) -> None:
    (tmp_path / "cut.gz").write_bytes(gzip.compress(b"one\ntwo three\n\nfour")[:-9])
    (tmp_path / "empty").write_bytes(b"")
    wrong = {"cut.gz": "corrupt gzip file", "empty": "the file is empty", ".": "cannot be read"}
    for name, message in wrong.items():
        with pytest.raises(RuntimeInputError, match=message):
            list(file_chunks(tmp_path / name))


@pytest.mark.parametrize("beam_size", [1, 3, 20])
def test_batches_hold_as_many_rows_as_fit(monkeypatch: pytest.MonkeyPatch, beam_size: int) -> None:
    for name, number in (("_MOST_ROWS", 12), ("_FEWEST_ROWS", 4), ("_POSITIONS", 60)):
        monkeypatch.setattr(translator_module, name, number)
    sources = [
        [7] * length for length in (30, 16, 15, 15, 15, 10, 10, 9, 6, 6, 6, 5, 5, 5, 5, 2, 1, 1, 1, 1, 1, 1)
    ]
    order = [*range(len(sources))]
    translator = object.__new__(RuntimeTranslator)
    translator.options = Options(beam_size, 1.0, 0.0, 2.0)
    batches = list(translator._batches(order, sources))
    assert [at for batch in batches for at in batch] == order
    for batch in batches[:-1]:
        rows = {30: 4, 16: 4, 15: 4, 10: 6, 9: 6, 6: 10}.get(len(sources[batch[0]]), 12)
        assert len(batch) == max(1, rows // beam_size)
    assert len(batches[-1]) <= max(1, 12 // beam_size)


@pytest.mark.parametrize("words", ["a\nb\na\n", "a\nb", "a\n\nb\n\n", "a\n<unk>\n"])
def test_a_list_of_words_has_each_once_on_a_line(tmp_path: Path, words: str) -> None:
    path = tmp_path / "words"
    for text in (f"<pad>\n<unk>\n<s>\n</s>\n{words}", "<unk>\n<pad>\n<s>\n</s>\na\n"):
        path.write_text(text)
        with pytest.raises(RuntimeInputError, match="not a list of distinct words"):
            RuntimeWords(path)


def test_nothing_else_is_imported_from_a_folder_that_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        sys, "path", [str(tmp_path), "before", f"{tmp_path}/", str(tmp_path / "inside"), "after"]
    )
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.setattr("econmt_runtime.__main__.main", lambda folder: [folder, *sys.path])
    found: object = launcher.run(tmp_path)
    assert found == [str(tmp_path), "before", str(tmp_path / "inside"), "after"]
