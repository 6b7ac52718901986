"""Files are found in the order of the search path and read strictly."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from econmt.data.text.corpus import (
    Corpus,
    count_lines,
    find_corpus,
    find_text,
    read_lines,
    read_pairs,
    search_path,
)
from econmt.errors import InputError


def put(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def test_search_path_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, data, env = tmp_path / "up" / "recipes", tmp_path / "data", tmp_path / "env"
    for folder in (recipe, data, env):
        folder.mkdir(parents=True)
    monkeypatch.setenv("ECONMT_DATA", str(env))
    expected = [recipe, recipe.parent, data, env, tmp_path, tmp_path / "cache" / "data"]
    assert search_path(recipe, data) == [folder.resolve() for folder in expected]


def test_data_dir_that_is_no_folder() -> None:
    with pytest.raises(InputError, match="--data-dir nowhere: no such folder"):
        search_path(None, Path("nowhere"))


@pytest.mark.parametrize("endings", [(".en", ".de"), (".en.gz", ".de"), (".en.gz", ".de.gz")])
def test_finds_both_sides(tmp_path: Path, endings: tuple[str, str]) -> None:
    files = [put(tmp_path / "b" / "set" / f"train{ending}", b"x\n") for ending in endings]
    found = find_corpus("set/train", "en", "de", [tmp_path / "a", tmp_path / "b"], progress=False)
    assert found == Corpus(files[0], files[1])


def test_first_folder_wins_and_a_half_does_not_count(tmp_path: Path) -> None:
    for name in ("a/train.en", "b/train.en", "b/train.de", "c/train.en", "c/train.de"):
        put(tmp_path / name, b"x\n")
    found = find_corpus("train", "en", "de", [tmp_path / name for name in "abc"], progress=False)
    assert found.source == tmp_path / "b" / "train.en"


@pytest.mark.parametrize("name", ["train.tsv", "train.tsv.gz"])
def test_table_of_both_sides(tmp_path: Path, name: str) -> None:
    file = put(tmp_path / name, b"ein Haus\ta house\nein Ei\tan egg\n")
    found = find_corpus("train", "de", "en", [tmp_path], progress=False)
    assert found == Corpus(file, None)
    assert list(read_pairs(found)) == [("ein Haus", "a house"), ("ein Ei", "an egg")]


def test_prefixes_with_a_dot_and_absolute_ones(tmp_path: Path) -> None:
    for name in ("v1.2", "t"):
        source, target = put(tmp_path / f"{name}.en", b"x\n"), put(tmp_path / f"{name}.de", b"y\n")
        for prefix, folders in ((name, [tmp_path]), (str(tmp_path / name), [])):
            assert find_corpus(prefix, "en", "de", folders, progress=False) == Corpus(source, target)


def test_not_found_names_every_place(tmp_path: Path) -> None:
    put(tmp_path / "a" / "set" / "train.en", b"x\n")
    with pytest.raises(InputError) as caught:
        find_corpus("set/train", "en", "de", [tmp_path / "a", tmp_path / "b"], progress=False)
    message = str(caught.value)
    assert f"{tmp_path / 'a' / 'set'}, {tmp_path / 'b' / 'set'} (no such folder)" in message
    assert "set/train.en(.gz) with set/train.de(.gz), or set/train.tsv(.gz)" in message
    assert f"{tmp_path / 'a' / 'set' / 'train.en'} exists but train.de(.gz) does not" in message
    assert "multi30k" in message
    assert "\n" not in message


def test_the_catalog_has_no_such_split_or_is_not_asked_without_leave(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"the catalog's multi30k has train\.en, train\.de, valid\.en"):
        find_corpus("multi30k/dev", "en", "de", [], progress=False)
    with pytest.raises(InputError, match="not found"):
        find_corpus("number-words/valid", "en", "de", [tmp_path], progress=False, fetch=False)


def test_one_file(tmp_path: Path) -> None:
    file = put(tmp_path / "lm" / "train.txt.gz", b"x\n")
    assert find_text("lm/train.txt", [tmp_path], progress=False) == file
    with pytest.raises(InputError, match=r"lm/valid\.txt\(\.gz\)"):
        find_text("lm/valid.txt", [tmp_path], progress=False)


@pytest.mark.parametrize("name", ["t.txt", "t.txt.gz"])
def test_only_newlines_end_lines(tmp_path: Path, name: str) -> None:
    for content, lines in (
        (b"a\nb\n", ["a", "b"]),
        (b"a\nb", ["a", "b"]),
        (b"a\r\nb\r\n", ["a", "b"]),
        (b"\n \n", ["", " "]),
        ("\ufeffa\n\ufeffb\n".encode(), ["a", "\ufeffb"]),
        ("a\u2028b\x0bc\x85d\x1ce\n".encode(), ["a\u2028b\x0bc\x85d\x1ce"]),
        (b"a\rb\n", ["a\rb"]),
        (b"a\r\r\n", ["a\r"]),
    ):
        assert list(read_lines(put(tmp_path / name, content))) == lines


def test_bad_content(tmp_path: Path) -> None:
    packed = r"t\.txt: is compressed with gzip; unpack it, or give a file's name the ending \.gz"
    for content, message in (
        (b"ok\nB\xe4r\n", r"t\.txt:2: not valid UTF-8 \(byte 0xe4 at column 2\)"),
        (b"\xed\xa0\x80\n", r"t\.txt:1: not valid UTF-8"),
        (gzip.compress(b"ok\n", mtime=0), packed),
        (b"ok\n\x1f\x8b\n", r"t\.txt:2: not valid UTF-8"),
        (b"ok\nok\na\0b\n", r"t\.txt:3: NUL byte at column 2"),
        (b"", r"t\.txt: the file is empty"),
    ):
        with pytest.raises(InputError, match=message):
            list(read_lines(put(tmp_path / "t.txt", content)))


def test_missing_file_and_folder(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"t\.txt: no such file"):
        list(read_lines(tmp_path / "t.txt"))
    with pytest.raises(InputError, match="is a folder"):
        list(read_lines(tmp_path))


def test_corrupt_gzip(tmp_path: Path) -> None:
    whole, file = gzip.compress(b"".join(b"line %d\n" % (i * i) for i in range(20_000))), tmp_path / "t.gz"
    flipped, middle = bytearray(whole), len(whole) // 2
    flipped[middle] ^= 0xFF
    for content in (whole[:-9], bytes(flipped), b"just text\n"):
        file.write_bytes(content)
        with pytest.raises(InputError, match=r"t\.gz: corrupt gzip file after line \d+"):
            list(read_lines(file))


@pytest.mark.parametrize(("first", "second"), [(3, 5), (5, 3), (2, 1)])
def test_different_line_counts(tmp_path: Path, first: int, second: int) -> None:
    source, target = put(tmp_path / "t.en", b"x\n" * first), put(tmp_path / "t.de", b"y\n" * second)
    with pytest.raises(InputError) as caught:
        list(read_pairs(Corpus(source, target)))
    assert f"{source} has {first} lines but {target} has {second};" in str(caught.value)


def test_table_with_a_wrong_number_of_columns(tmp_path: Path) -> None:
    file = put(tmp_path / "t.tsv", b"a\tb\na\tb\tc\n")
    with pytest.raises(InputError, match=r"t\.tsv:2: 3 tab-separated columns; expected two"):
        list(read_pairs(Corpus(file, None)))


def test_pairs_are_streamed(tmp_path: Path) -> None:
    source, target = put(tmp_path / "t.en", b"a\nb\xff\n"), put(tmp_path / "t.de", b"c\nd\n")
    pairs = read_pairs(Corpus(source, target))
    assert next(pairs) == ("a", "c")
    with pytest.raises(InputError, match=r"t\.en:2"):
        next(pairs)


def test_lines_are_counted_as_they_are_read(tmp_path: Path) -> None:
    plain, packed = tmp_path / "a.en", tmp_path / "a.en.gz"
    for content in (b"one\ntwo\n", b"one\ntwo", b"\n", b"one\r\n\xe2\x80\xa8two\n"):
        plain.write_bytes(content)
        packed.write_bytes(gzip.compress(content))
        assert count_lines(plain) == count_lines(packed) == len(list(read_lines(plain)))
    packed.write_bytes(packed.read_bytes()[:-9])
    assert count_lines(packed) is None
    assert count_lines(tmp_path) is None
