"""Words that may follow a beginning, against the model's probabilities and searches from each of them."""

from __future__ import annotations

import pytest
import torch

from econmt.api import Request, TrainedModel
from econmt.data.text.vocabulary import BOS
from econmt.decoding.batches import pad_sources
from econmt.errors import InputError
from econmt_serve.next_words import NextWords
from tests.unit.serving.conftest import folder as folder
from tests.unit.serving.conftest import model as model


@pytest.fixture
def words(model: TrainedModel) -> NextWords:
    return NextWords(model.translator({"attention": False}))


def test_they_are_the_most_probable_and_the_search_goes_on_from_each(
    model: TrainedModel, words: NextWords
) -> None:
    source, target = model.vocabularies.source, model.vocabularies.target
    given = torch.tensor([[BOS, *target.encode("D F")]])
    batch = pad_sources([source.encode("a b c")], "cpu")
    with torch.no_grad():
        hidden = model.models[0](*batch, given)[0, -1]
        expected = torch.softmax(model.models[0].output(hidden), dim=0)
    pieces = target.tokens(range(target.size))
    begins = {
        piece[1:] or "D": float(expected[at]) for at, piece in enumerate(pieces) if piece.startswith("▁")
    }
    best = sorted((word for word in begins if word.isupper()), key=lambda word: -begins[word])
    found = words.of(Request("a b c", target_prefix="D F"), 4, "here")
    capitals = [each for each in found if each.word.isupper() and f"▁{each.word}" in pieces]
    assert len(found) == 4
    assert capitals
    assert [each.word for each in capitals if each.word != "D"] == [
        word for word in best if word in {each.word for each in capitals} and word != "D"
    ]
    for each in capitals:
        assert each.probability == pytest.approx(begins[each.word], abs=1e-4)
        whole = model.translate([Request("a b c", target_prefix=f"D F {each.word}")])[0]
        assert (each.text, pytest.approx(each.score, abs=1e-4)) == (whole.text, whole.score)


def test_what_is_wished_holds_in_all_of_them(words: NextWords) -> None:
    request = Request("a b c", constraints=["G G"], avoid=["H"], target_prefix="D")
    found = words.of(request, 3, "here")
    assert found
    for each in found:
        assert "G G" in each.text
        assert "H" not in each.text.split()


def test_nothing_follows_a_blank_and_what_cannot_be_written_is_named(words: NextWords) -> None:
    assert words.of(Request("  "), 3, "here") == []
    with pytest.raises(
        InputError, match="here: target_prefix 'ß' has characters or words that the target vocabulary lacks"
    ):
        words.of(Request("a b", target_prefix="ß"), 3, "here")
