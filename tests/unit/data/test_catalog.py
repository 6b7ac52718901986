"""The catalog's entries are well formed, and what we make ourselves comes out right."""

from __future__ import annotations

import gzip
import hashlib
import re
import urllib.error
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from econmt.config.recipe import Recipe
from econmt.data.batching.store import prepare
from econmt.data.text.catalog import CATALOG, RemoteFile
from econmt.data.text.corpus import find_corpus, read_pairs
from econmt.errors import InputError
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
    def refuse(*_: object, **__: object) -> None:
        raise urllib.error.URLError("unreachable")

    monkeypatch.setattr("urllib.request.urlopen", refuse)
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
        rows += ["Sentence 0.\tSatz 0.\tagain", "\tleer\t", "alone"]
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
        assert 30 <= len(splits["valid"]) <= 100
        assert 30 <= len(splits["test"]) <= 100
        for share, name in ((0, "valid"), (1, "test")):
            for source, _ in splits[name]:
                assert int.from_bytes(hashlib.sha256(source.encode()).digest()[:4], "big") % 100 == share
        for column in range(2):
            train = {pair[column] for pair in splits["train"]}
            assert not train & {pair[column] for name in ("valid", "test") for pair in splits[name]}
        assert {("Sentence 7.", "Satz 14."), ("Sentence 7.", "Satz 15.")} <= set(splits["train"])

    def test_the_same_archive_gives_the_same_splits(self, archive: Path) -> None:
        first = self.splits()
        for file in archive.parent.glob("*.en"):
            file.unlink()
        assert self.splits() == first

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
