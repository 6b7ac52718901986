"""Text becomes a store once; it is reused while nothing has changed, and a failure leaves the old one whole."""

from __future__ import annotations

import errno
import gzip
import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from econmt.config.recipe import Recipe, load_recipe
from econmt.data.batching.store import (
    PreparedData,
    _changed_setting,
    _data_settings,
    open_prepared,
    prepare,
    store_folder,
)
from econmt.data.batching.token_store import length_quantiles
from econmt.data.text.filters import left_out
from econmt.errors import InputError

MakeRecipe = Callable[..., Recipe]
Prepare = Callable[..., PreparedData]


def put(corpus: Path, name: str, source: str, target: str) -> None:
    (corpus / f"{name}.en").write_bytes(source.encode())
    (corpus / f"{name}.de").write_bytes(target.encode())


@pytest.fixture
def run(corpus: Path, tmp_path: Path, make_recipe: MakeRecipe) -> Prepare:
    def run(**changes: object) -> PreparedData:
        return prepare(make_recipe(**changes), tmp_path / "store", [corpus], show_progress=False)

    return run


def lines(file: Path) -> list[str]:
    return file.read_text(encoding="utf-8").split("\n")[:-1]


@pytest.mark.parametrize("block", [7, 1000])
def test_every_pair_is_its_line(
    run: Prepare, corpus: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    monkeypatch.setattr("econmt.data.batching.split_writer._BLOCK_PAIRS", block)
    prepared = run()
    assert len(prepared.train) == 200
    texts = lines(corpus / "train.en"), lines(corpus / "train.de")
    for index in (0, 1, 6, 7, 13, 99, 199):
        for vocabulary, ids, text in zip(
            prepared.vocabularies.sides, prepared.train.pair(index), texts, strict=True
        ):
            assert vocabulary.decode(ids.tolist()) == text[index]
        assert prepared.train.location(index) == f"{corpus / 'train.en'}:{index + 1}"
    assert prepared.valid_text.source == lines(corpus / "valid.en")


def test_valid_and_test_keep_their_raw_lines(run: Prepare, corpus: Path) -> None:
    put(corpus, "valid", "  a\u2028b  c\t\n\nfull\x85\n", "x\r y\nz\n\n")
    prepared = run(max_length=40)
    assert prepared.valid_text.source == ["  a\u2028b  c\t", "", "full\x85"]
    assert prepared.valid_text.target == ["x\r y", "z", ""]
    assert prepared.valid.source_lengths.tolist()[1] == prepared.valid.target_lengths.tolist()[2] == 0
    assert prepared.test_text.source == lines(corpus / "test.en")
    assert prepared.test is not None
    assert len(prepared.test) == 7


@pytest.mark.parametrize("train", [["short", "train"], ["train", "short"]])
def test_filters_may_leave_out_all_of_one_text_but_not_of_all(
    run: Prepare, corpus: Path, train: list[str]
) -> None:
    put(corpus, "short", "a\nb\n", "a\nb\n")
    prepared = run(train=train, filters={"min_words": 2})
    assert prepared.statistics["train"]["few_words"] == 2 + 200 - len(prepared.train)
    assert len(prepared.train) > 100
    with pytest.raises(InputError, match=r"short\.en"):
        run(train=["short"], filters={"min_words": 2})


def test_several_training_files(run: Prepare, corpus: Path) -> None:
    (corpus / "more.tsv.gz").write_bytes(gzip.compress(b"ba de\tli mo\nnu\tra\n"))
    prepared = run(train=["train", "more"])
    assert len(prepared.train) == 202
    assert prepared.vocabularies.target.decode(prepared.train.pair(200)[1].tolist()) == "li mo"
    assert prepared.train.location(199) == f"{corpus / 'train.en'}:200"
    assert prepared.train.location(201) == f"{corpus / 'more.tsv.gz'}:2"


def test_long_and_empty_pairs_are_left_out_and_counted(run: Prepare, corpus: Path) -> None:
    subwords = {"type": "words", "source": 50, "target": 50}
    put(corpus, "train", "a b\na b c d\na\n\na b c\nb\n", "x\ny\nx y z w v\nx\nx y z\n  \n")
    put(corpus, "test", "a q b\n", "x q r\n")
    prepared = run(max_length=3, empty_lines="skip", subwords=subwords)
    assert [prepared.train.location(i).rpartition(":")[2] for i in range(len(prepared.train))] == ["1", "5"]
    counts = prepared.statistics["train"]
    assert (counts["lines"], counts["pairs"], counts["too_long"], counts["empty"]) == (6, 2, 2, 2)
    assert (counts["source_tokens"], counts["target_tokens"]) == (5, 4)
    assert [prepared.statistics["test"][f"{side}_unknown"] for side in ("source", "target")] == [1, 2]


def add_a_pair(corpus: Path) -> None:
    for side in ("en", "de"):
        with (corpus / f"train.{side}").open("ab") as stream:
            stream.write(b"ba\n")


class TestReuse:
    @pytest.fixture
    def made(self, run: Prepare, capfd: pytest.CaptureFixture[str]) -> Callable[..., str]:
        """Prepare once; then prepare again with changes and return what was said ("" if it was reused)."""
        run()
        store = Path("store")

        def again(**changes: object) -> str:
            before = store.stat().st_ino
            capfd.readouterr()
            run(**changes)
            said = capfd.readouterr().err
            assert (store.stat().st_ino == before) == (said == "" or "was not found" in said)
            return said

        return again

    def test_what_changes_no_store(self, made: Callable[..., str], corpus: Path) -> None:
        assert made() == ""
        assert made(subwords={"type": "bpe", "size": 60, "dropout": 0.1}) == ""
        os.utime(corpus / "train.en", (1, 1))
        assert made() == ""

    @pytest.mark.parametrize("changes", [{}, {"min_words": 2}, {"max_words": 3}])
    def test_settings_that_a_store_lacks_had_their_defaults(
        self, make_recipe: MakeRecipe, changes: dict[str, int]
    ) -> None:
        """A whole section and a key of one, which are newer than the store."""
        data = make_recipe(filters=changes).data
        for lacking in ("filters", "min_words"):
            settings = _data_settings(data)
            del (settings if lacking == "filters" else settings["filters"])[lacking]
            said = _changed_setting({"data": settings}, data)
            assert (said or "").startswith("data.filters changed from") == (
                bool(changes) if lacking == "filters" else "min_words" in changes
            )

    def test_text_in_another_folder(self, made: Callable[..., str], corpus: Path) -> None:
        for file in list(corpus.iterdir()):
            file.rename(corpus.parent / file.name)
        assert "was not found" in made()

    def test_changed_text(self, made: Callable[..., str], corpus: Path) -> None:
        add_a_pair(corpus)
        again = f"econmt: preparing the data in {Path.cwd() / 'store'} again"
        assert made() == f"{again}: {corpus / 'train.en'} has changed\n"

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            ({"max_length": 50}, "data.max_length changed from 100 to 50"),
            ({"subwords": {"type": "bpe", "size": 61}}, "data.subwords changed from"),
            ({"test": None}, "data.test changed from 'test' to None"),
        ],
    )
    def test_changed_recipe(self, made: Callable[..., str], change: dict[str, object], said: str) -> None:
        assert said in made(**change)

    def test_another_folder_gets_the_store_that_changed_text_needs(
        self, run: Prepare, corpus: Path, make_recipe: MakeRecipe
    ) -> None:
        kept, elsewhere = run().folder, Path.cwd() / "elsewhere"
        add_a_pair(corpus)
        found = prepare(make_recipe(), kept, [corpus], show_progress=False, instead=elsewhere)
        assert (found.folder, len(found.train)) == (elsewhere, 201)
        assert len(open_prepared(kept).train) == 200

    def test_damaged_store(self, made: Callable[..., str]) -> None:
        file = Path("store") / "train.tokens"
        file.write_bytes(file.read_bytes()[:-2])
        assert "bytes instead of" in made()
        assert made() == ""

    @pytest.mark.sampled(4)
    @pytest.mark.parametrize("name", ["train.tokens", "train.index", "train.lines", "valid.target.txt"])
    @pytest.mark.parametrize("hidden", [False, True])
    def test_other_content_of_the_same_size(self, made: Callable[..., str], name: str, hidden: bool) -> None:
        file = Path("store") / name
        before, status = file.read_bytes(), file.stat()
        file.write_bytes(bytes([before[0] ^ 1]) + before[1:])
        if hidden:
            os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
        assert f"again: {Path.cwd() / file}: has changed since it was written" in made()
        assert file.read_bytes() == before
        assert made() == ""

    def test_what_a_sample_does_not_see_verify_does(
        self, run: Prepare, monkeypatch: pytest.MonkeyPatch, make_recipe: MakeRecipe, corpus: Path
    ) -> None:
        monkeypatch.setattr("econmt.data.files._BLOCK", 16)
        monkeypatch.setattr("econmt.data.files._BLOCKS", 2)  # the first and the last
        run()
        file = Path("store") / "train.tokens"
        before, status = file.read_bytes(), file.stat()
        file.write_bytes(before[:100] + before[200:300] + before[200:])
        os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
        assert len(run().train) == 200
        assert file.read_bytes() != before
        again = partial(prepare, make_recipe(), Path.cwd() / "store", [corpus], show_progress=False)
        away = partial(prepare, make_recipe(), Path.cwd() / "store", [], show_progress=False)
        assert len(away().train) == 200
        with pytest.raises(InputError, match=r"train\.tokens: has changed since it was written"):
            away(verify=True)
        again(verify=True)
        assert file.read_bytes() == before
        text = corpus / "train.de"
        lines, status = text.read_bytes().splitlines(keepends=True), text.stat()
        text.write_bytes(b"".join([*lines[:90], *reversed(lines[90:110]), *lines[110:]]))
        os.utime(text, ns=(status.st_atime_ns, status.st_mtime_ns))
        again()
        assert file.read_bytes() == before
        again(verify=True)
        assert file.read_bytes() != before

    def test_a_key_that_either_lacks_had_its_default(self, made: Callable[..., str]) -> None:
        file = Path("store") / "meta.json"
        meta = json.loads(file.read_text(encoding="utf-8"))
        del meta["data"]["max_length"]
        meta["data"]["subwords"]["copies"] = 0
        file.write_text(json.dumps(meta), encoding="utf-8")
        assert made() == ""
        assert "data.max_length changed from None to 50" in made(max_length=50)

    def test_files_of_others_in_the_store_stay(self, run: Prepare) -> None:
        run()
        (Path("store") / "notes.txt").write_text("mine")
        with pytest.raises(InputError, match=r"store: the folder contains other files \(notes\.txt\); move"):
            run(max_length=50)
        assert (Path("store") / "notes.txt").read_text() == "mine"
        run()

    def test_vocabulary_of_another_store(self, made: Callable[..., str]) -> None:
        file = Path("store") / "subwords.model"
        file.write_bytes(file.read_bytes() + b"\n")
        with pytest.raises(InputError, match="vocabulary files do not belong to the token store"):
            open_prepared(Path("store"))
        assert "vocabulary files do not belong" in made()

    def test_text_is_gone_and_the_recipe_has_changed(self, run: Prepare, corpus: Path) -> None:
        run()
        (corpus / "valid.de").unlink()
        run()
        with pytest.raises(InputError, match="text valid not found") as caught:
            run(max_length=50)
        assert caught.value.lines[1].endswith(
            "store cannot be used without the text: since it was prepared, data.max_length changed from 100 to 50"
        )


class TestRefused:
    def test_all_missing_files_at_once(self, run: Prepare, corpus: Path) -> None:
        for name in ("train.en", "valid.de"):
            (corpus / name).unlink()
        with pytest.raises(InputError, match=r"(?s)text train not.*\ntext valid not.*\ntext none not found"):
            run(test="none")

    def test_an_empty_side(self, run: Prepare, corpus: Path) -> None:
        put(corpus, "train", "a\nb\n", "x\n \n")
        told = r"train\.de:2: the target side of this training pair is empty.*data\.empty_lines"
        with pytest.raises(InputError, match=told):
            run(subwords={"type": "words"})

    def test_only_long_pairs(self, run: Prepare) -> None:
        left = r"train\.en: no training pair is left of 200"
        with pytest.raises(
            InputError, match=rf"{left}: 200 longer than data\.max_length 1 tokens on a side; raise"
        ):
            run(max_length=1)

    def test_a_description_that_is_not_ours(self, run: Prepare, tmp_path: Path) -> None:
        meta = tmp_path / "store" / "meta.json"
        meta.parent.mkdir()
        for content in ('{"name": "something else"}', "[]", "{"):
            meta.write_text(content)
            with pytest.raises(InputError, match=r"meta\.json: "):
                run()
            assert meta.read_text() == content

    def test_a_file_in_the_way(self, run: Prepare, tmp_path: Path) -> None:
        (tmp_path / "store").write_text("x")
        with pytest.raises(InputError, match="store: "):
            run()

    def test_nothing_to_open(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match="no prepared data here; run econmt prepare"):
            open_prepared(tmp_path)


class TestFailureInTheMiddle:
    def test_full_disk_keeps_the_old_store(
        self, run: Prepare, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        def refuse(descriptor: int) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        run()
        monkeypatch.setattr(os, "fsync", refuse)
        with pytest.raises(InputError, match="the disk is full; free some space and run the same command"):
            run(max_length=50)
        assert len(open_prepared(tmp_path / "store").train) == 200
        assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus", "store"]

    def test_bad_text_leaves_nothing_behind(self, run: Prepare, corpus: Path, tmp_path: Path) -> None:
        (corpus / "test.de").write_bytes(b"ok\n\xff\n")
        with pytest.raises(InputError, match=r"test\.de:2: not valid UTF-8"):
            run()
        assert [path.name for path in tmp_path.iterdir()] == ["corpus"]


def test_the_store_lies_with_the_model_or_where_the_recipe_says(make_recipe: MakeRecipe) -> None:
    assert store_folder(make_recipe()) == Path("model/prepared")
    assert store_folder(make_recipe(prepared="/big/disk")) == Path("/big/disk")


def test_quantiles_are_lengths_that_occur() -> None:
    assert length_quantiles(np.array([1, 2, 3, 4, 5, 6, 7, 8, 9, 20])) == [1, 4, 6, 8, 20, 20, 20]


def test_pairs_that_are_left_out_are_counted_with_the_reason() -> None:
    recipe = load_recipe("quickstart", ["data.max_length=60"])
    counts = {"lines": 12_000, "too_long": 1_500, "empty": 2}
    prepared = cast(PreparedData, SimpleNamespace(statistics={"train": counts}))
    assert left_out(recipe, prepared.statistics) == (
        "1,502 of 12,000 pairs are left out: 1,500 longer than data.max_length 60 tokens on a side, 2 with an empty side"
    )
    counts |= {"too_long": 0, "empty": 0}
    assert left_out(recipe, prepared.statistics) == ""
