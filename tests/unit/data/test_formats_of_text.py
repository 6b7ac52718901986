"""Translation memories and Parquet files are read as training data, and what is wrong with them is told."""

from __future__ import annotations

import gzip
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from econmt.config.recipe import Recipe
from econmt.data.batching.store import prepare
from econmt.data.text.corpus import Corpus, find_corpus, read_pairs
from econmt.errors import InputError

HEAD = '<?xml version="1.0" encoding="{}"?>\n<!DOCTYPE tmx SYSTEM "tmx14.dtd">\n<tmx version="1.4"><header/><body>\n'


@pytest.fixture(autouse=True)
def _two_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("econmt.data.text.parquet._ROWS", 2)


def unit(**sides: str) -> str:
    variants = "".join(
        f'<tuv xml:lang="{language.replace("_", "-")}"><prop type="x">no text</prop><seg>{text}</seg></tuv>'
        for language, text in sides.items()
    )
    return f"<tu>{variants}</tu>\n"


def memory(path: Path, *units: str, encoding: str = "utf-8", head: str = HEAD) -> Corpus:
    text = head.format(encoding) + "".join(units) + "</body></tmx>\n"
    data = text.encode(encoding)
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return Corpus(path, None, ("en", "de"))


@pytest.mark.parametrize("block", [3, 1 << 16])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "iso-8859-1"])
def test_units_become_pairs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoding: str, block: int
) -> None:
    monkeypatch.setattr("econmt.data.text.tmx._BLOCK", block)
    units = (
        unit(en="A dog\n   runs &amp; barks.", fr="Un chien", de="Ein Hund läuft &#38; bellt."),
        unit(en="no translation", fr="non"),
        unit(
            de_AT="<bpt i='1'>&lt;b></bpt>Zwei<ept i='1'>{/<sub><hi>x</hi><ph>y</ph></sub>b}</ept>",
            EN_US="<hi>Two</hi>",
        ),
        unit(en_GB="colour", en="color", de="Farbe", de_CH="Color"),
        unit(en="one", de="eins").replace("</tu>", unit(de="ein").removeprefix("<tu>").rstrip()),
    )
    corpus = memory(tmp_path / "m.tmx", *units, encoding=encoding)
    first = "A dog runs & barks.", "Ein Hund läuft & bellt."
    assert list(read_pairs(corpus)) == [first, ("Two", "Zwei"), ("color", "Farbe"), ("one", "eins")]


def test_long_memories_are_streamed(tmp_path: Path) -> None:
    corpus = memory(tmp_path / "m.tmx.gz", *(unit(en=f"line {i}", de=f"Zeile {i}") for i in range(5000)))
    pairs = read_pairs(corpus)
    assert next(pairs) == ("line 0", "Zeile 0")
    assert len(list(pairs)) == 4999


def test_bad_memories_are_told(tmp_path: Path) -> None:
    head = HEAD.format("utf-8")
    for text, message in (
        (head.replace('"tmx14.dtd">', '"d" [<!ENTITY a "aaaa">]>'), "m.tmx:2: declares the entity 'a'"),
        (
            head.replace('"tmx14.dtd">', '"d" [<!ENTITY % p SYSTEM "file:///etc/passwd"> %p;]>'),
            "m.tmx:2: declares the entity 'p'",
        ),
        (head + "<tu><seg>", "m.tmx:4: not valid XML: no element found"),
        ("no XML\n", "m.tmx:1: not valid XML: syntax error"),
        (head + unit(fr="a", it="b") + "</body></tmx>", "no unit has both en and de; its languages: fr, it"),
        ("", "m.tmx:1: not valid XML"),
        (HEAD.format("utf-8c"), "m.tmx:1: cannot be decoded: unknown encoding: utf-8c"),
        (HEAD.format("gb2312"), "m.tmx:1: cannot be decoded: multi-byte encodings are not supported"),
    ):
        (tmp_path / "m.tmx").write_text(text, encoding="utf-8")
        with pytest.raises(InputError, match=re.escape(message)):
            list(read_pairs(Corpus(tmp_path / "m.tmx", None, ("en", "de"))))


def test_external_entities_are_not_fetched(tmp_path: Path) -> None:
    (tmp_path / "d.dtd").write_text('<!ENTITY secret "read">', encoding="utf-8")
    head = HEAD.replace("tmx14.dtd", str(tmp_path / "d.dtd"))
    corpus = memory(tmp_path / "m.tmx", unit(en="a&secret;b", de="c"), head=head)
    assert list(read_pairs(corpus)) == [("a b", "c")]


def write_table(path: Path, pairs: list[tuple[str, str]], nested: bool) -> None:
    sides = [pa.array([pair[side] for pair in pairs], pa.string()) for side in (0, 1)]
    columns = dict(zip(("en", "de"), sides, strict=True))
    if nested:
        translation = pa.StructArray.from_arrays(sides, list(columns))
        columns = {"id": pa.array(range(len(pairs))), "translation": translation}
    parquet.write_table(pa.table(columns), path)


@pytest.mark.parametrize("nested", [False, True])
def test_tables_become_pairs(tmp_path: Path, nested: bool) -> None:
    many = ((str(i), f"-{i}") for i in range(2000))
    pairs = [("A\ndog", "Ein\r\nHund"), ("x\u2028y", "z"), (None, "q"), *many]
    write_table(tmp_path / "t.parquet", pairs, nested)  # type: ignore[arg-type]
    found = list(read_pairs(find_corpus("t", "en", "de", [tmp_path], progress=False)))
    assert found[:3] == [("A dog", "Ein Hund"), ("x\u2028y", "z"), ("", "q")]
    assert found[3:] == pairs[3:]
    back = find_corpus("t", "de", "en", [tmp_path], progress=False)
    assert next(read_pairs(back)) == ("Ein Hund", "A dog")


def test_shards_are_one_corpus(tmp_path: Path, corpus: Path, make_recipe: Callable[..., Recipe]) -> None:
    for number in range(3):
        pairs = [("ba de li", f"nu ra {'vi ' * number}zo")] * (number + 1)
        write_table(corpus / f"big-0000{number}-of-00003.parquet", pairs, True)
    write_table(corpus / "bigger-00000-of-00001.parquet", [("ba", "nu")], True)
    recipe = make_recipe(train=["train", "big"], subwords={"type": "words"})
    found = prepare(recipe, tmp_path / "store", [corpus], show_progress=False)
    assert found.train.corpora == [0, 200]
    assert len(found.train) == 206
    assert found.train.location(205).endswith("big-00002-of-00003.parquet:3")
    assert len(list(read_pairs(find_corpus("big", "en", "de", [corpus], progress=False)))) == 6
    (corpus / "big-00001-of-00003.parquet").unlink()
    assert len(prepare(recipe, tmp_path / "store", [corpus], show_progress=False).train) == 204


def test_bad_tables_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(name: str, languages: tuple[str, str] = ("en", "de")) -> str:
        with pytest.raises(InputError) as refused:
            list(read_pairs(Corpus(tmp_path / name, None, languages)))
        return str(refused.value)

    write_table(tmp_path / "t.parquet", [("a", "b\0")], True)
    assert (
        "no text columns en and fr, nor translation.en and translation.fr; it has id (int64), translation.en (string)"
        in read("t.parquet", ("en", "fr"))
    )
    assert "t.parquet:1: NUL byte at column 2" in read("t.parquet")
    (tmp_path / "no.parquet").write_bytes(b"PAR1 is not enough")
    assert "no.parquet: not a Parquet file, or damaged after row 0" in read("no.parquet")
    broken = (tmp_path / "t.parquet").read_bytes().replace(b"translation", b"tran\xeblation")
    (tmp_path / "broken.parquet").write_bytes(broken)
    assert "broken.parquet: not a Parquet file, or damaged after row 0" in read("broken.parquet")
    write_table(tmp_path / "empty.parquet", [], False)
    assert "empty.parquet: the file has no rows" in read("empty.parquet")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert "which is not installed; run pip install pyarrow" in read("t.parquet")
