"""``econmt lexicon`` and ``translate --restrict-lexicon``."""

from __future__ import annotations

from pathlib import Path

import torch

from econmt.data.text.subwords import fingerprint, load_vocabularies
from econmt.export.lexicon import read_lexicon, write_lexicon
from tests.unit.cli.conftest import Call
from tests.unit.cli.test_refusals import refused


def test_a_lexicon_is_learnt_and_restricts(call: Call, word_model: Path, text: Path, tmp_path: Path) -> None:
    made = tmp_path / "lexicon"
    ended = call("lexicon", "-m", word_model, "-o", made, "--data-dir", text, "-k", 4)
    assert (ended.code, ended.lines) == (0, [str(made)]), ended.err
    vocabularies = load_vocabularies(word_model)
    table = read_lexicon(made, fingerprint(word_model), vocabularies)
    assert table.shape == (vocabularies.source.size, 4)
    assert not table[3].any()
    lines = "a b c\nh g\n"
    options = "--restrict-lexicon", made, "--restrict-lexicon-topk", 1, "--beam-size", 3
    found = call("translate", "-m", word_model, *options, text=lines).succeeded()
    for line, translation in zip(lines.split("\n"), found.lines, strict=False):
        ids = [*vocabularies.source.encode(line), 2, 3]
        assert {*vocabularies.target.encode(translation)} <= {*table[ids, :1].flatten().tolist(), 1}


def test_a_lexicon_of_another_model_or_none_is_refused(
    call: Call, word_model: Path, subword_model: Path, tmp_path: Path
) -> None:
    vocabularies = load_vocabularies(word_model)
    wrong = tmp_path / "wrong"
    for rows, value, model, message in (
        (vocabularies.source.size, 0, subword_model, "belongs to another vocabulary"),
        (3, 0, word_model, "a damaged lexicon (shape (3, 2))"),
        (vocabularies.source.size, 9999, word_model, "a damaged lexicon"),
    ):
        write_lexicon(wrong, torch.full((rows, 2), value).int(), fingerprint(model))
        refused(call("translate -m", word_model, "--restrict-lexicon", wrong), message)
    other = word_model / "params.best.safetensors"
    ended = call("translate -m", word_model, "--restrict-lexicon", other)
    refused(ended, "not a lexicon; use a file written by econmt lexicon")


def test_a_text_is_not_written_over(call: Call, word_model: Path, tmp_path: Path) -> None:
    for name, line in (("t.src", "a b"), ("t.trg", "A B"), ("u.src", "a"), ("u.trg", "A")):
        (tmp_path / name).write_text(f"{line}\n")
    (tmp_path / "link").hardlink_to(tmp_path / "u.trg")
    corpora = "--corpus", tmp_path / "t", "--corpus", tmp_path / "u"
    for name, read in (("t.src", "t.src"), ("t.trg", "t.trg"), ("link", "u.trg")):
        content = (tmp_path / name).read_bytes()
        ended = call("lexicon -m", word_model, *corpora, "-o", tmp_path / name)
        refused(ended, f"is also an input ({tmp_path / read})")
        assert (tmp_path / name).read_bytes() == content


def test_where_all_pairs_are_long_nothing_is_written(call: Call, word_model: Path, tmp_path: Path) -> None:
    for side in ("src", "trg"):
        (tmp_path / f"t.{side}").write_text("a " * 500 + "\n")
    ended = call("lexicon", "-m", word_model, "--corpus", tmp_path / "t", "-o", tmp_path / "made")
    refused(ended, "(data.max_length); give text with shorter sentences")
    assert not (tmp_path / "made").exists()
