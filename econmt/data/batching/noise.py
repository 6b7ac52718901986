"""Noise on training pairs, drawn anew every epoch: capitals, typing errors, emoji, markup.

What it makes of a pair follows from (seed, epoch, place in the epoch) alone, so that a resumed run, and each of
several processes, see what an uninterrupted one sees. The store holds ids: a pair is written as text, changed, and cut
anew. One that holds unknown tokens, which no text stands for, is left as it is.

Capitals make sentences longer, to twice their tokens and more. Which pairs get them is therefore drawn before an
epoch's pairs are put into buckets, by the length that nine of ten come to have; one that comes out longer than its
bucket is left as it is.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from econmt.config.recipe import Noise
from econmt.data.batching.token_store import IntArray, PairIds, TokenStore, rectangle
from econmt.data.text.subwords import UNK, Vocabularies

UPPER, TITLE, TYPOS, EMOJI, MARKUP = (1 << bit for bit in range(5))
"""Bits of what a pair gets."""

_DRAWS = 0x6E6F6973
"""Ends the seeds of these draws, so that no others have them."""
_SAMPLE = 400
_QUANTILE = 0.9

_EMOJI = "😀😂🤣😊😍😎😢😭😡👍👎👏🙏💪🔥🎉🎂❤💔⭐✨☀🌧🌍🚀🚗🏠📷📱💻📚⚽🍕🍺☕🐶🐱🌹✅❌"
_TAGS = ("<b>", "<i>", "<u>", "<p>", "<h1>", "<li>", "<span>", "<em>", '<a href="#">', '<g id="1">', "<1>")

Kinds = npt.NDArray[np.uint8]


class NoiseMaker:
    """Changes pairs of one store.

    Args:
        noise: how often. vocabularies: of the store.
        tags: with which sources may begin, which stay as they are.
        store: by which the lengths of changed pairs are measured.
    """

    def __init__(
        self, noise: Noise, vocabularies: Vocabularies, tags: Sequence[str], store: TokenStore
    ) -> None:
        self._noise, self._vocabularies = noise, vocabularies
        self._tags = {tag for tag in tags if tag}
        self._growth = {
            kind: self._measure(store, kind)
            for kind, probability in zip(
                (UPPER, TITLE, TYPOS, EMOJI, MARKUP),
                (noise.upper, noise.title, noise.typos, noise.emoji, noise.markup),
                strict=True,
            )
            if probability
        }

    def _measure(self, store: TokenStore, kind: int) -> npt.NDArray[np.float64]:
        """(2,) of both sides: of capitals the quotient of lengths, of others their difference."""
        indices = np.unique(np.linspace(0, len(store) - 1, _SAMPLE).astype(np.int64))
        before = store.gather(indices)
        rows = zip(*_sides(before), strict=True)
        after = [self._changed(kind, *row, [0, 0, place]) for place, row in enumerate(rows)]
        lengths = np.array([[len(source), len(target)] for source, target in after], dtype=np.float64)
        old = np.stack([before.source_lengths, before.target_lengths], axis=1)
        growth = lengths / old if kind in (UPPER, TITLE) else lengths - old
        found: npt.NDArray[np.float64] = np.quantile(growth, _QUANTILE, axis=0)
        return np.maximum(found, 1.0 if kind in (UPPER, TITLE) else 0.0)

    def draw(self, count: int, seed: tuple[int, int]) -> Kinds:
        """(count,) bits of what each of an epoch's pairs gets; ``seed``: run's seed and epoch."""
        draw = np.random.Generator(np.random.PCG64([*seed, 0, _DRAWS]))
        noise, kinds = self._noise, np.zeros(count, dtype=np.uint8)
        case = draw.random(count)
        kinds[case < noise.upper] = UPPER
        kinds[(case >= noise.upper) & (case < noise.upper + noise.title)] = TITLE
        for kind, probability in ((TYPOS, noise.typos), (EMOJI, noise.emoji), (MARKUP, noise.markup)):
            kinds[draw.random(count) < probability] |= kind
        return kinds

    def lengths(
        self, kinds: Kinds, source: IntArray, target: IntArray, most: int
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """The lengths (M,) for which pairs need room; none over ``most``."""
        found = []
        for column, lengths in enumerate((source, target)):
            wanted = lengths.astype(np.float64)
            for kind, growth in self._growth.items():
                chosen = (kinds & kind) != 0
                wanted[chosen] = (
                    wanted[chosen] * growth[column]
                    if kind in (UPPER, TITLE)
                    else wanted[chosen] + growth[column]
                )
            found.append(np.minimum(np.ceil(wanted), most).astype(np.int32))
        return found[0], found[1]

    def apply(
        self, kinds: Kinds, places: IntArray, pairs: PairIds, room: tuple[int, int], seed: tuple[int, int]
    ) -> PairIds:
        """The pairs of a batch, changed.

        Args:
            kinds, places: (B,) what each gets, and its place in the epoch, of which each has a generator of its own.
            pairs: as :meth:`TokenStore.gather` gives them.
            room: most source and target tokens; the pairs themselves have no more.
            seed: run's seed and epoch.
        """
        sources, targets = _sides(pairs)
        for row, (kind, place) in enumerate(zip(kinds.tolist(), places.tolist(), strict=True)):
            if kind:
                source, target = self._changed(kind, sources[row], targets[row], [*seed, place])
                if len(source) <= room[0] and len(target) <= room[1]:
                    sources[row], targets[row] = source, target
        return PairIds(*rectangle(sources), *rectangle(targets))

    def _changed(
        self, kind: int, source: list[int], target: list[int], seed: Sequence[int]
    ) -> tuple[list[int], list[int]]:
        if UNK in source or UNK in target:
            return source, target
        draw = np.random.Generator(np.random.PCG64([*seed, _DRAWS]))
        text = self._vocabularies.source.decode(source)
        tag, _, rest = text.partition(" ")
        tag, text = (f"{tag} ", rest) if tag in self._tags else ("", text)
        first, second = changed_text(kind, text, self._vocabularies.target.decode(target), draw)
        found = self._vocabularies.source.encode(tag + first), self._vocabularies.target.encode(second)
        return found if all(found) else (source, target)


def _sides(pairs: PairIds) -> tuple[list[list[int]], list[list[int]]]:
    """Both sides of pairs as lists."""
    sources = [row[:end].tolist() for row, end in zip(pairs.source, pairs.source_lengths, strict=True)]
    targets = [row[:end].tolist() for row, end in zip(pairs.target, pairs.target_lengths, strict=True)]
    return sources, targets


def changed_text(kind: int, source: str, target: str, draw: np.random.Generator) -> tuple[str, str]:
    """A pair as text with all that the bits of ``kind`` ask for."""
    if kind & UPPER:
        source, target = source.upper(), target.upper()
    if kind & TITLE:
        source, target = _titled(source), _titled(target)
    if kind & TYPOS:
        source = mistyped(source, draw)
    if kind & EMOJI:
        sign = _EMOJI[int(draw.integers(len(_EMOJI)))]
        ends = draw.random() < 0.75
        source, target = (f"{text} {sign}" if ends else f"{sign} {text}" for text in (source, target))
    if kind & MARKUP:
        tag = _TAGS[int(draw.integers(len(_TAGS)))]
        end = f"</{tag[1:-1].partition(' ')[0]}>"
        source, target = f"{tag}{source}{end}", f"{tag}{target}{end}"
    return source, target


def _titled(text: str) -> str:
    return " ".join(word[:1].upper() + word[1:] for word in text.split(" "))


def mistyped(text: str, draw: np.random.Generator) -> str:
    """A text with an error in one of ten words, at least in one, if it has a word of three letters or more."""
    words = text.split(" ")
    open_to = [place for place, word in enumerate(words) if sum(map(str.isalpha, word)) >= 3]
    if not open_to:
        return text
    wanted = min(len(open_to), max(1, round(len(words) / 10)))
    letters = [letter for letter in text if letter.isalpha()]
    for place in draw.permutation(open_to)[:wanted].tolist():
        word = words[place]
        at = int(draw.choice([at for at, letter in enumerate(word) if letter.isalpha()]))
        other = letters[int(draw.integers(len(letters)))]
        following = word[at + 1 : at + 2]
        ends = (
            following + word[at] + word[at + 2 :],
            word[at] + word[at:],
            word[at + 1 :],
            other + word[at + 1 :],
        )
        # Letters that are swapped or replaced may be the same ones.
        made = [word[:at] + end for end in ends if end != word[at:]]
        words[place] = made[int(draw.integers(len(made)))]
    return " ".join(words)
