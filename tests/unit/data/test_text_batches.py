"""Windows over a text: every token once, in order, each after the one before it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from econmt.config.recipe import parse_recipe
from econmt.data.batching import text_batches
from econmt.data.batching.store import open_prepared, prepare
from econmt.data.batching.text_batches import TextBatch, TextBatches, whole_text
from econmt.data.batching.token_store import TokenStore
from econmt.data.text.subwords import vocabulary_files
from econmt.data.text.vocabulary import EOS, PAD, UNK
from econmt.errors import InputError

# As in Mikolov's files: a blank at both ends of a line, numbers as N, rare words as <unk>.
TRAIN = " aer banknote berlitz \n pierre <unk> N years old \n\n mr. <unk> is chairman \n no it was n't black monday \n"
RECIPE = """
name: ptb
task: language_model
output: run
data: {text: txt, train: [ptb.train], valid: ptb.valid, test: ptb.test, subwords: {type: words}}
model: {size: 8}
training: {max_updates: 1}
"""


@pytest.fixture
def store(tmp_path: Path) -> TokenStore:
    for split, text in (("train", TRAIN), ("valid", " mr. N \n"), ("test", " is old unheard \n")):
        (tmp_path / f"ptb.{split}.txt").write_text(text)
    prepare(parse_recipe(RECIPE, "recipe"), tmp_path / "prepared", [tmp_path], show_progress=False)
    return open_prepared(tmp_path / "prepared").train


def test_positions_belong_to_the_pairs_that_hold_them(store: TokenStore) -> None:
    owners = [index for index in range(len(store)) for side in store.pair(index) for _ in side]
    assert store.pairs_at(np.arange(store.total_tokens)).tolist() == owners


def flat(store: TokenStore) -> list[int]:
    return store.tokens(0, store.total_tokens).tolist()


def whole_of(windows: list[TextBatch]) -> tuple[Tensor, Tensor]:
    """Inputs and targets of windows beside each other."""
    return torch.cat([each.inputs for each in windows], 1), torch.cat([each.targets for each in windows], 1)


def test_the_format_of_the_penn_treebank(store: TokenStore, tmp_path: Path) -> None:
    prepared = open_prepared(tmp_path / "prepared")
    vocabulary = prepared.vocabularies.target
    assert vocabulary_files(prepared.folder) == [tmp_path / "prepared" / "vocab.txt"]
    words = TRAIN.split()
    # <unk> is the special symbol that there is anyway; what holds no word has only its end.
    assert vocabulary.size == 4 + len(set(words) - {"<unk>"})
    ids = flat(store)
    assert ids.count(EOS) == 5
    assert ids.count(UNK) == 2
    assert len(ids) == len(words) + 5 == prepared.statistics["train"]["words"]
    assert vocabulary.decode([each for each in ids if each != EOS]) == " ".join(words)
    assert prepared.test is not None
    assert flat(prepared.test)[2:] == [UNK, EOS]


@pytest.mark.parametrize(("rows", "bptt"), [(1, 4), (2, 3), (3, 100), (4, 1)])
def test_an_epoch_reads_each_row_in_order(store: TokenStore, rows: int, bptt: int) -> None:
    batches = TextBatches(store, rows, bptt)
    epoch = [next(batches) for _ in range(batches.batches_per_epoch)]
    ids, length = [EOS, *flat(store)], store.total_tokens // rows
    inputs, targets = (part.tolist() for part in whole_of(epoch))
    for row in range(rows):
        assert inputs[row] == ids[row * length : (row + 1) * length]
        assert targets[row] == ids[row * length + 1 : (row + 1) * length + 1]
    assert [int(batch.carries.max()) for batch in epoch] == [0] + [1] * (len(epoch) - 1)
    assert {batch.rate for batch in epoch} == {1.0}, "without jitter also that of a last, shorter window"
    assert all(batch.rows.tolist() == list(range(1, rows + 1)) for batch in epoch)
    assert sum(batch.target_tokens for batch in epoch) == rows * length
    assert batches.epoch == 1
    assert int(next(batches).carries.max()) == 0


@pytest.mark.parametrize(("rows", "context"), [(1, 5), (2, 0), (2, 3), (3, 5), (3, 10_000), (7, 0), (7, 1)])
def test_rows_first_read_what_stands_before_them(store: TokenStore, rows: int, context: int) -> None:
    found = list(whole_text(store, rows, 4, context))
    length, ids = -(-store.total_tokens // rows), [EOS, *flat(store)]
    before = min(context, length) if rows > 1 else 0
    assert sum(batch.target_tokens for batch in found) == store.total_tokens
    inputs, targets = whole_of(found)
    assert inputs.shape == (rows, before + length)
    for row in range(rows):
        first = row * length
        assert targets[row, :before].tolist() == [PAD] * before
        own = ids[first + 1 : first + 1 + length]
        assert targets[row, before : before + len(own)].tolist() == own
        if row:
            assert inputs[row, :before].tolist() == ids[first - before : first]
        assert inputs[row, before : before + len(own)].tolist() == ids[first : first + len(own)]
    # Every row begins without a state; the first one does so where the text begins.
    carries = torch.stack([batch.carries for batch in found], 1)
    windows = -(-before // 4)
    assert not carries[0, : windows + 1].any()
    assert carries[0, windows + 1 :].all()
    assert not carries[1:, 0].any()
    assert carries[1:, 1:].all()


def test_streams_go_on_and_jittered_windows_differ(store: TokenStore, tmp_path: Path) -> None:
    whole = TextBatches(store, 2, 5, jitter=True, seed=3)
    for _ in range(40):
        batch = next(whole)
        assert batch.inputs.shape[1] <= 25
        assert batch.rate == batch.inputs.shape[1] / 5
        resumed = TextBatches(store, 2, 5, jitter=True, seed=3)
        resumed.load_state_dict(whole.state_dict())
        assert resumed.state_dict() == whole.state_dict()
        assert torch.equal(next(resumed).targets, next(whole).targets)
    (tmp_path / "ptb.train.txt").write_text("a b c d e f g h\n" * 400)
    for split in ("valid", "test"):
        (tmp_path / f"ptb.{split}.txt").write_text("a b\n")
    prepare(parse_recipe(RECIPE, "recipe"), tmp_path / "prepared", [tmp_path], show_progress=False)
    batches = TextBatches(open_prepared(tmp_path / "prepared").train, 4, 20, jitter=True)
    epochs = []
    for _ in range(2):
        lengths = [next(batches).inputs.shape[1] for _ in range(batches.batches_per_epoch)]
        assert sum(lengths) == 900
        assert all(length % 5 == 0 and 5 <= length <= 40 for length in lengths[:-1])
        epochs.append(lengths)
    assert epochs[0] != epochs[1]
    assert 15 < sum(epochs[0][:-1]) / (len(epochs[0]) - 1) < 24
    assert batches.worst_batch().inputs.shape[1] == 40
    assert {shape.target for shape in batches.shapes()} >= {40}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_batches, "JITTER", 100)
        wide = TextBatches(batches._text.store, 4, 20, jitter=True)
        assert max(next(wide).inputs.shape[1] for _ in range(9)) == 40


def test_rows_stay_in_parts_and_shares_and_know_their_line(store: TokenStore, tmp_path: Path) -> None:
    whole = next(TextBatches(store, 3, 4))
    shares = [whole.share(rank, 2) for rank in range(2)]
    assert torch.equal(shares[0].targets, whole.targets[:2])
    assert (shares[0].rows.tolist(), shares[1].rows.tolist()) == ([1, 2], [3, 0])
    assert (shares[1].targets[1] == PAD).all()
    assert sum(share.target_tokens for share in shares) == whole.target_tokens
    first, second = whole.split(2)
    assert (first.rows.tolist(), second.rows.tolist()) == ([1, 2], [3])
    assert (first.target_tokens, second.target_tokens) == (8, 4)


def test_more_rows_than_tokens_are_refused(store: TokenStore) -> None:
    with pytest.raises(InputError, match=r"23 tokens, fewer than training\.batch\.size 24"):
        TextBatches(store, 24, 4)
    assert TextBatches(store, 23, 4).batches_per_epoch == 1


def test_a_row_knows_its_line(store: TokenStore, tmp_path: Path) -> None:
    batch = next(TextBatches(store, 2, 4))
    assert store.location(int(batch.indices[0])) == f"{tmp_path / 'ptb.train.txt'}:1"
    assert store.location(int(batch.indices[1])) == f"{tmp_path / 'ptb.train.txt'}:4"
