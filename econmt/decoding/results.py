"""Results of searches: hypotheses of two searches together, and translations made of hypotheses or as copies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from econmt.data.text.vocabulary import UNK, Vocabularies, split_words
from econmt.decoding.alignment import copied, hard_alignment
from econmt.decoding.search.beam import Hypothesis
from econmt.decoding.translation import EMPTY, NBestEntry, Translation, one_line


def copy_of(text: str, vocabularies: Vocabularies) -> Translation:
    """Returns the translation of a line that is copied, see :class:`Translation`."""
    written = one_line(text)
    if not written:
        return EMPTY
    tokens, ids = vocabularies.target.written(written), vocabularies.target.encode(written)
    alignment = [(word, word) for word in range(len(split_words(written)))]
    entry = NBestEntry(written, tokens, ids, 0.0, 0.0, None, False, alignment)
    return Translation(written, 0.0, 0.0, tokens, None, [entry], vocabularies.source.written(written))


def translation_of(
    text: str,
    source: Sequence[int],
    hypotheses: Sequence[Hypothesis],
    written: Iterator[str],
    vocabularies: Vocabularies,
    *,
    replace_unk: bool,
) -> Translation:
    """Makes the translation of a line's ``text`` and ids; ``written`` yields the hypotheses' texts in turn.

    With ``replace_unk`` the source text that an unknown token attends to most takes its place.
    """
    source_tokens = vocabularies.source_tokens(source)
    entries = []
    for hypothesis, made in zip(hypotheses, written, strict=False):
        attention = hypothesis.attention
        ids, tokens = hypothesis.ids, vocabularies.target.tokens(hypothesis.ids)
        alignment: list[tuple[int, int]] = []
        if attention is not None:
            alignment = hard_alignment(attention, source_tokens, tokens, vocabularies)
            if replace_unk and UNK in ids:
                tokens = copied(attention, ids, tokens, text, vocabularies)
                made = vocabularies.target.joined(tokens)
        entries.append(NBestEntry(one_line(made), tokens, *hypothesis, alignment))
    best = entries[0]
    return Translation(
        best.text, best.score, best.log_probability, best.tokens, best.attention, entries, source_tokens
    )


def merged(kept: list[Hypothesis], found: list[Hypothesis], most: int) -> list[Hypothesis]:
    """Returns hypotheses of a search and as many of the next one as are missing, the best of the first search first."""
    known = [each.ids for each in kept]
    new = [each for each in found if each.ids not in known][: most - len(kept)]
    return [*kept[:1], *sorted([*kept[1:], *new], key=lambda each: -each.score)]
