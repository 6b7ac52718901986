"""The catalog's entries, the text that we make ourselves, and where files are found and how they are read."""

from __future__ import annotations

import gzip
import hashlib
import random
import re
import urllib.error
import zipfile
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from num2words import num2words

from econmt.config.recipe import Recipe
from econmt.data.batching.store import prepare
from econmt.data.text.catalog import CATALOG, RemoteFile
from econmt.data.text.corpus import (
    Corpus,
    count_lines,
    find_corpus,
    find_text,
    read_lines,
    read_pairs,
    search_path,
)
from econmt.data.text.number_words import SPLIT_SIZES, english, generate, german, numbers
from econmt.errors import InputError
from tests.conftest import fails_with
from tests.unit.data.conftest import made_up_pairs, write_pairs


@pytest.mark.parametrize("name", sorted(CATALOG))
def test_entries_are_well_formed(name: str) -> None:
    entry = CATALOG[name]
    assert entry.description
    assert entry.licence
    assert (entry.make is None) == (entry.made == ())
    digits = {"sha256": 64, "sha1": 40, "git": 40}
    for remote in entry.files.values():
        assert remote.url.startswith("https://")
        if remote.checksum is None:
            assert "no fixed checksum" in entry.origin
        else:
            kind, _, value = remote.checksum.partition(":")
            assert re.fullmatch(rf"[0-9a-f]{{{digits[kind]}}}", value)
    checksums = [remote.checksum for remote in entry.files.values()]
    assert len(set(checksums)) == len(checksums)


def test_number_words_are_made_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("econmt.data.text.number_words.SPLIT_SIZES", {"train": 40, "valid": 5, "test": 5})
    found = find_corpus("number-words/valid", "de", "en", [], progress=False)
    assert found.source == tmp_path / "cache" / "data" / "number-words" / "valid.de"
    pairs = list(read_pairs(found))
    assert len(pairs) == 5
    assert all("und" not in english.split() for _, english in pairs)
    assert capfd.readouterr().err.count("\n") == 1
    find_corpus("number-words/train", "en", "de", [], progress=False)
    assert capfd.readouterr().err == ""


@pytest.mark.sampled(2)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("place", ["cache/data", "mine"])
def test_text_put_in_place_by_hand_is_compared_once(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    make_recipe: Callable[..., Recipe],
    place: str,
    packed: bool,
) -> None:
    """The cache holds the catalog's texts and no others; another folder may have what it likes, and it is told."""
    write_pairs(tmp_path / place / "multi30k", "train", made_up_pairs(30))
    write_pairs(tmp_path / place / "multi30k", "valid", made_up_pairs(5))
    folder, entry = tmp_path / place / "multi30k", CATALOG["multi30k"]
    right = {
        f"{path.name}.gz": RemoteFile("https://x", f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}")
        for path in folder.iterdir()
    }
    monkeypatch.setitem(CATALOG, "multi30k", replace(entry, files={**entry.files, **right}))
    other = folder / "train.de"
    lines = other.read_text().splitlines(keepends=True)
    other.write_text("".join(lines[1:] + lines[:1]))
    for path in list(folder.iterdir()) if packed else ():
        path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    recipe = make_recipe(train=["multi30k/train"], valid="multi30k/valid", test=None)
    name = f"{other}.gz" if packed else f"{other}"
    says = f"{name}: not the catalog's text of multi30k: it has 30 lines and the sha256 checksum "
    search = [tmp_path / place]
    if place == "mine":
        for said in (1, 0):
            prepare(recipe, tmp_path / "store", search, show_progress=False)
            assert capfd.readouterr().err.count(says) == said
    else:
        with pytest.raises(InputError, match=re.escape(says)) as raised:
            prepare(recipe, tmp_path / "store", search, show_progress=False)
        assert "name that with --data-dir" in raised.value.lines[0]


def test_all_missing_files_are_named_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_recipe: Callable[..., Recipe]
) -> None:
    monkeypatch.setattr("urllib.request.urlopen", fails_with(urllib.error.URLError("unreachable")))
    write_pairs(tmp_path / "multi30k", "valid", made_up_pairs(5))
    recipe = make_recipe(train=["multi30k/train", "iwslt15-en-vi/train"], valid="multi30k/valid", test=None)
    with pytest.raises(InputError, match="no network") as raised:
        prepare(recipe, tmp_path / "store", [tmp_path], show_progress=False)
    _, missing, instead = raised.value.lines
    # The other text is English and Vietnamese.
    assert (
        missing == "missing are multi30k/train.en, multi30k/train.de, iwslt15-en-vi/train.en (plain or .gz)"
    )
    assert "econmt train quickstart" in instead
    assert "econmt profile RECIPE --estimate" in instead


class TestTatoeba:
    @pytest.fixture
    def archive(self, tmp_path: Path) -> Path:
        file = tmp_path / "cache" / "data" / "tatoeba-en-de" / "deu-eng.zip"
        file.parent.mkdir(parents=True)
        rows = [f"Sentence {i // 2}.\tSatz {i}.\tCC-BY 2.0 #{i}" for i in range(4000)]
        rows += [f"Another way to say {i}.\tSatz {i}.\tCC-BY" for i in range(0, 4000, 2)]
        rows += ["Sentence 7.\tSatz 14.\tagain", "\tleer\t", "alone"]
        with zipfile.ZipFile(file, "w") as opened:
            opened.writestr("_about.txt", "licence")
            opened.writestr("deu.txt", "\n".join(rows) + "\n")
        return file

    def splits(self) -> dict[str, list[tuple[str, str]]]:
        return {
            split: list(read_pairs(find_corpus(f"tatoeba-en-de/{split}", "en", "de", [], progress=False)))
            for split in ("train", "valid", "test")
        }

    def test_split_by_sentence(self, archive: Path) -> None:
        """Nothing that is held out is trained on, and every translation of a sentence is kept."""
        splits = self.splits()
        assert 5800 < sum(map(len, splits.values())) < 6000
        assert all(len({*pairs}) == len(pairs) for pairs in splits.values()), "none comes again"
        assert 30 <= len(splits["valid"]) <= 100
        assert 30 <= len(splits["test"]) <= 100
        for share, name in ((0, "valid"), (1, "test")):
            for source, _ in splits[name]:
                assert int.from_bytes(hashlib.sha256(source.encode()).digest()[:4], "big") % 100 == share
        for column in range(2):
            train = {pair[column] for pair in splits["train"]}
            assert not train & {pair[column] for name in ("valid", "test") for pair in splits[name]}
        assert {("Sentence 7.", "Satz 14."), ("Sentence 7.", "Satz 15.")} <= set(splits["train"])

    def test_an_archive_that_cannot_be_unpacked(self, archive: Path) -> None:
        with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as opened:
            opened.writestr("deu.txt", "a\tb\n" * 100)
        whole = archive.read_bytes()
        entry = whole.index(b"PK\x01\x02")
        damages = {
            "content": {40: whole[40] ^ 0xFF},  # the deflated text
            "method": {8: 99, entry + 10: 99},
            "encrypted": {6: whole[6] | 1, entry + 8: whole[entry + 8] | 1},
        }
        contents = [b"<html>sorry</html>"]
        for changes in damages.values():
            content = bytearray(whole)
            for place, value in changes.items():
                content[place] = value
            contents.append(bytes(content))
        for content in contents:
            archive.write_bytes(content)
            with pytest.raises(InputError, match=r"deu-eng\.zip: not a valid archive .* removed"):
                find_corpus("tatoeba-en-de/train", "en", "de", [], progress=False)
            assert not archive.exists()


def test_words_of_a_number_are_what_the_library_says_written_apart() -> None:
    draw = random.Random(3)
    drawn = [draw.randrange(10 ** draw.randint(1, 9)) for _ in range(150)]
    for number in [*range(25), 100, 1_000_001, *drawn]:
        assert english(number) == num2words(number).replace("-", " ").replace(",", "")
        assert german(number).replace(" ", "") == num2words(number, lang="de").replace(" ", "")
    for number, words in (
        (67, "sieben und sechzig"),
        (1234, "ein tausend zwei hundert vier und dreißig"),
        (71_000, "ein und siebzig tausend"),
        (1_000_001, "eine Million eins"),
        (12_011_102, "zwölf Millionen elf tausend ein hundert zwei"),
    ):
        assert german(number) == words


def test_splits_share_no_number_are_always_the_same_and_have_all_magnitudes() -> None:
    splits = {split: numbers(split) for split in SPLIT_SIZES}
    assert {split: len(found) for split, found in splits.items()} == SPLIT_SIZES
    assert len(set().union(*splits.values())) == sum(SPLIT_SIZES.values())
    text = "\n".join(f"{source}\t{target}" for source, target in generate("test"))
    assert (
        hashlib.sha256(text.encode()).hexdigest()
        == "f21d3d449fdc92b6f1c7b28f0b8ffbbda20944eb65a201bd471582b3baefcdb6"
    )
    digits = Counter(len(str(number)) for number in numbers("train"))
    assert set(digits) == set(range(1, 10))
    assert min(digits[length] for length in range(4, 10)) > 1000


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
    monkeypatch.setenv("ECONMT_DATA", str(data))
    expected = [recipe, recipe.parent, tmp_path, data, tmp_path / "cache" / "data"]
    assert search_path(recipe, tmp_path) == expected, "each folder once"
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


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"t\.txt: no such file"):
        list(read_lines(tmp_path / "t.txt"))
    with pytest.raises(InputError, match="is a folder"):
        list(read_lines(tmp_path))


def test_corrupt_gzip_is_told_with_its_line(tmp_path: Path) -> None:
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


def test_a_wrong_number_of_columns_is_told(tmp_path: Path) -> None:
    file = put(tmp_path / "t.tsv", b"a\tb\na\tb\tc\n")
    with pytest.raises(InputError, match=r"t\.tsv:2: 2 tabs; expected one"):
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
