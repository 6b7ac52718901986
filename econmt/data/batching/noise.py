"""Noise on training pairs, drawn again in every epoch: capitals, typing errors, emoji, markup.

The noise of a pair depends on (seed, epoch, position in the epoch) only, so that resumed runs and all ranks get the
same. Pairs are stored as ids: a pair is decoded to text, changed and segmented again. Pairs with unknown tokens, which
cannot be decoded, stay unchanged, as do pairs with annotated terms.

Capitals can double the number of tokens of a sentence and more. The noise is therefore drawn before an epoch's pairs
are assigned to buckets, with space for the 90 % quantile of the new length; a pair that does not fit stays unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from econmt.config.recipe import Noise
from econmt.data.batching.token_store import IntArray, PairIds, TokenStore, rectangle
from econmt.data.text.annotation import term_tag_ids
from econmt.data.text.case import upper
from econmt.data.text.vocabulary import UNK, Vocabularies

UPPER, TITLE, TYPOS, EMOJI, MARKUP = (1 << bit for bit in range(5))
"""Bits of the kinds of noise that a pair gets."""
_KEYS = {UPPER: "upper", TITLE: "title", TYPOS: "typos", EMOJI: "emoji", MARKUP: "markup"}

_DRAWS = 0x6E6F6973
"""Last element of the seeds used here, which makes them differ from other seeds."""
_SAMPLE = 400
_QUANTILE = 0.9

_EMOJI = "😀😂🤣😊😍😎😢😭😡👍👎👏🙏💪🔥🎉🎂❤💔⭐✨☀🌧🌍🚀🚗🏠📷📱💻📚⚽🍕🍺☕🐶🐱🌹✅❌"
_TAGS = ("<b>", "<i>", "<u>", "<p>", "<h1>", "<li>", "<span>", "<em>", '<a href="#">', '<g id="1">', "<1>")

Kinds = npt.NDArray[np.uint8]


class NoiseMaker:
    """Noise generator for the pairs of one store.

    Args:
        noise: probabilities. vocabularies: vocabularies of the store.
        tags: tags with which sources can begin; they stay unchanged.
        store: token store, on a sample of which the growth of lengths is measured.
        languages: codes of the source and target languages, by which case changes.
    """

    def __init__(
        self,
        noise: Noise,
        vocabularies: Vocabularies,
        tags: Sequence[str],
        store: TokenStore,
        languages: tuple[str, str] = ("", ""),
    ) -> None:
        self._noise, self._vocabularies, self._languages = noise, vocabularies, languages
        self._tags = {tag for tag in tags if tag}
        self._unchanged = {UNK, *term_tag_ids(vocabularies.source)}
        self._growth = {
            kind: self._measure(store, kind) for kind, name in _KEYS.items() if getattr(noise, name)
        }

    def _measure(self, store: TokenStore, kind: int) -> npt.NDArray[np.float64]:
        """Measures the growth of both sides, (2,): a factor for capitals, a difference in tokens for other noise."""
        indices = np.unique(np.linspace(0, len(store) - 1, _SAMPLE).astype(np.int64))
        before = store.gather(indices)
        rows = zip(*before.lists(), strict=True)
        after = [self._changed(kind, *row, [0, 0, position]) for position, row in enumerate(rows)]
        lengths = np.array([[len(source), len(target)] for source, target in after], dtype=np.float64)
        old = np.stack([before.source_lengths, before.target_lengths], axis=1)
        growth = lengths / old if kind in (UPPER, TITLE) else lengths - old
        quantiles: npt.NDArray[np.float64] = np.quantile(growth, _QUANTILE, axis=0)
        return np.maximum(quantiles, 1.0 if kind in (UPPER, TITLE) else 0.0)

    def draw(self, count: int, seed: tuple[int, int]) -> Kinds:
        """Draws the noise bits of the pairs of an epoch, (count,); ``seed`` is the seed of the run and the epoch."""
        draw = np.random.Generator(np.random.PCG64([*seed, 0, _DRAWS]))
        noise, kinds = self._noise, np.zeros(count, dtype=np.uint8)
        case = draw.random(count)
        kinds[case < noise.upper] = UPPER
        kinds[(case >= noise.upper) & (case < noise.upper + noise.title)] = TITLE
        for kind in (TYPOS, EMOJI, MARKUP):
            kinds[draw.random(count) < getattr(noise, _KEYS[kind])] |= kind
        return kinds

    def lengths(
        self, kinds: Kinds, source: IntArray, target: IntArray, most: int
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """Returns the lengths to reserve for pairs with noise, (M,), at most ``most``."""
        sides = []
        for column, lengths in enumerate((source, target)):
            new_lengths = lengths.astype(np.float64)
            for kind, growth in self._growth.items():
                chosen = (kinds & kind) != 0
                grown = np.multiply if kind in (UPPER, TITLE) else np.add
                new_lengths[chosen] = grown(new_lengths[chosen], growth[column])
            sides.append(np.minimum(np.ceil(new_lengths), most).astype(np.int32))
        return sides[0], sides[1]

    def apply(
        self,
        kinds: Kinds,
        positions: IntArray,
        pairs: PairIds,
        max_lengths: tuple[int, int],
        seed: tuple[int, int],
    ) -> PairIds:
        """Returns the pairs of a batch with noise.

        Args:
            kinds, positions: noise bits and positions in the epoch, (B,); the position seeds the generator of a pair.
            pairs: token ids. seed: seed of the run and epoch.
            max_lengths: maximum numbers of source and target tokens; the pairs themselves fit.
        """
        sources, targets = pairs.lists()
        for row, (kind, position) in enumerate(zip(kinds.tolist(), positions.tolist(), strict=True)):
            if kind:
                source, target = self._changed(kind, sources[row], targets[row], [*seed, position])
                if len(source) <= max_lengths[0] and len(target) <= max_lengths[1]:
                    sources[row], targets[row] = source, target
        return PairIds(*rectangle(sources), *rectangle(targets))

    def _changed(
        self, kind: int, source: list[int], target: list[int], seed: Sequence[int]
    ) -> tuple[list[int], list[int]]:
        if not self._unchanged.isdisjoint(source) or UNK in target:
            return source, target
        draw = np.random.Generator(np.random.PCG64([*seed, _DRAWS]))
        text = self._vocabularies.source.decode(source)
        tag, _, rest = text.partition(" ")
        tag, text = (f"{tag} ", rest) if tag in self._tags else ("", text)
        pair = text, self._vocabularies.target.decode(target)
        first, second = changed_text(kind, *pair, draw, self._languages)
        ids = self._vocabularies.source.encode(tag + first), self._vocabularies.target.encode(second)
        return ids if all(ids) else (source, target)


def changed_text(
    kind: int, source: str, target: str, draw: np.random.Generator, languages: tuple[str, str] = ("", "")
) -> tuple[str, str]:
    """Applies all kinds of noise in the bits ``kind`` to a pair of texts in ``languages``."""
    if kind & UPPER:
        source, target = upper(source, languages[0]), upper(target, languages[1])
    if kind & TITLE:
        source, target = _titled(source, languages[0]), _titled(target, languages[1])
    if kind & TYPOS:
        source = mistyped(source, draw)
    if kind & EMOJI:
        sign = _EMOJI[int(draw.integers(len(_EMOJI)))]
        at_end = draw.random() < 0.75
        source, target = (f"{text} {sign}" if at_end else f"{sign} {text}" for text in (source, target))
    if kind & MARKUP:
        tag = _TAGS[int(draw.integers(len(_TAGS)))]
        end = f"</{tag[1:-1].partition(' ')[0]}>"
        source, target = f"{tag}{source}{end}", f"{tag}{target}{end}"
    return source, target


def _titled(text: str, language: str) -> str:
    return " ".join(upper(word[:1], language) + word[1:] for word in text.split(" "))


def mistyped(text: str, draw: np.random.Generator) -> str:
    """Returns a text with a typing error in one of ten words, at least one; words of under three letters are spared."""
    words = text.split(" ")
    candidates = [position for position, word in enumerate(words) if sum(map(str.isalpha, word)) >= 3]
    if not candidates:
        return text
    errors = min(len(candidates), max(1, round(len(words) / 10)))
    letters = [letter for letter in text if letter.isalpha()]
    for position in draw.permutation(candidates)[:errors].tolist():
        word = words[position]
        at = int(draw.choice([at for at, letter in enumerate(word) if letter.isalpha()]))
        other = letters[int(draw.integers(len(letters)))]
        rest = word[at + 1 :]
        ends = (rest[:1] + word[at] + rest[1:], word[at] + word[at:], rest, other + rest)
        # Swapping or replacing equal letters changes nothing; such results are discarded.
        variants = [word[:at] + end for end in ends if end != word[at:]]
        words[position] = variants[int(draw.integers(len(variants)))]
    return " ".join(words)
