"""Division of a text into sentences and what lies between them: blanks, line ends and tags.

The sentences are translated one by one, and their translations take their places; everything else stays. URLs and
e-mail addresses are tags. A paragraph without words is one sentence as it is written, which the translator copies; in a
page or with markup it is no sentence.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from econmt.api.text import BLANKS, EMPTY, NBestEntry, Translation, addresses, has_words
from econmt_serve.text.markup import MARKUP, Marked, Tag, marked, put_back
from econmt_serve.text.sentences import SPACELESS, Splitter, base_language

_BLANK = re.compile(f"[{BLANKS}\r\n\f\v]")


def whole_line(text: str) -> list[tuple[int, int]]:
    """Returns the span of the whole text as the only sentence: the splitter of texts with one sentence a line."""
    return [(len(text) - len(text.lstrip()), len(text.rstrip()))] if text.strip() else []


Hypothesis = tuple[str, Sequence[tuple[int, int]]]
"""Text of a sentence's translation, and its alignment."""


class TextDivision(NamedTuple):
    """Way to divide a text.

    Attributes:
        split: splitter of a paragraph. spaced: True if the target language has blanks between sentences.
    """

    split: Splitter = whole_line
    spaced: bool = True


def division(split: Splitter, target: str) -> TextDivision:
    """Returns the division of texts that are translated into a language."""
    return TextDivision(split, base_language(target) not in SPACELESS)


class Passage(NamedTuple):
    """Sentences of a text, none of them blank, and what lies between them.

    Attributes:
        sentences: the sentences.
        gaps: text before the first sentence, between sentences, and after the last one; one more than ``sentences``.
        lines: for each sentence the index of its line, which also ends at a block tag.
        line_count: number of lines.
    """

    sentences: list[Marked]
    gaps: list[str]
    lines: list[int]
    line_count: int

    def written(self, translations: Sequence[Translation], rank: int = 0) -> str:
        """Returns the text with the hypotheses of a rank, or the last ones, in place of its sentences."""
        return self.filled([hypothesis_of(each, rank) for each in translations])

    def filled(self, hypotheses: Sequence[Hypothesis]) -> str:
        """Returns the text with hypotheses in place of its sentences."""
        texts = [
            put_back(sentence, *each)[0] for sentence, each in zip(self.sentences, hypotheses, strict=True)
        ]
        return self.gaps[0] + "".join(text + gap for text, gap in zip(texts, self.gaps[1:], strict=True))

    def joined(self, translations: Sequence[Translation]) -> Translation:
        """Returns the translation of the whole text: the scores are sums, and several sentences have no attention."""
        ranks = max((len(each.hypotheses) for each in translations), default=0)
        entries = [self._entry(translations, rank) for rank in range(ranks)]
        if not entries:
            return EMPTY._replace(text=self.written(translations).strip())
        best = entries[0]
        source_tokens = [token for each in translations for token in each.source_tokens]
        return Translation(
            best.text, best.score, best.log_probability, best.tokens, best.attention, entries, source_tokens
        )

    def _entry(self, translations: Sequence[Translation], rank: int) -> NBestEntry:
        """Returns the hypotheses of a rank as one, with its alignment to the words of the text."""
        text = self.gaps[0].lstrip()
        alignment: list[tuple[int, int]] = []
        for sentence, gap, each in zip(self.sentences, self.gaps[1:], translations, strict=True):
            written, pairs = put_back(sentence, *hypothesis_of(each, rank))
            glued = text != "" and not text[-1].isspace() and not written[:1].isspace()
            before = len(text.split()) - glued
            alignment += [
                (word, made + before) for word, made in pairs if (word, made + before) not in alignment[-1:]
            ]
            text += written + gap
        entries = [
            each.hypotheses[min(rank, len(each.hypotheses) - 1)] for each in translations if each.hypotheses
        ]
        if len(entries) == 1:
            return entries[0]._replace(text=text.rstrip(), alignment=alignment)
        return NBestEntry(
            text.rstrip(),
            [token for entry in entries for token in entry.tokens],
            [number for entry in entries for number in entry.ids],
            math.fsum(entry.score for entry in entries),
            math.fsum(entry.log_probability for entry in entries),
            None,
            any(entry.cut for entry in entries),
            alignment,
        )


def hypothesis_of(translation: Translation, rank: int = 0) -> Hypothesis:
    """Returns text and alignment of a hypothesis, the last one if there are fewer."""
    if not translation.hypotheses:
        return "", ()
    entry = translation.hypotheses[min(rank, len(translation.hypotheses) - 1)]
    return entry.text, entry.alignment


class PassageBuilder:
    """Builder of a passage from pieces of text and tags in order.

    Args:
        how: division of paragraphs. html: True for a page, whose special characters are escaped in translations; its
            words are not counted.
    """

    def __init__(self, how: TextDivision, *, html: bool = False) -> None:
        self._how, self._html = how, html
        self._sentences, self._lines = list[Marked](), list[int]()
        self._gaps: list[list[str]] = [[]]
        self._line = 0
        self._in_word, self._word = False, -1
        self._begin_paragraph()

    def _begin_paragraph(self) -> None:
        self._raw, self._text = list[str](), list[str]()
        self._length = 0
        self._tags: list[Tag] = []
        self._words: list[int] = []
        self._first_word, self._has_markup = self._word + 1, self._html

    def text(self, raw: str, meaning: Callable[[str], str] = str) -> None:
        """Adds text as it is written; ``meaning`` returns the text that it stands for."""
        done = 0
        for address in addresses(raw):
            start = address.start()
            self._add(raw[done:start], meaning)
            done = address.end()
            before, behind = raw[max(start - 1, 0) : start] or MARKUP, raw[done : done + 1] or MARKUP
            beside = before.strip(), behind.strip()
            parts_words = before.isalnum() and behind.isalnum()
            self._add_tag(Tag(address[0], beside=beside), parts_words=parts_words)
        self._add(raw[done:], meaning)

    def _add(self, raw: str, meaning: Callable[[str], str]) -> None:
        text = unicodedata.normalize("NFC", meaning(raw))
        self._raw.append(raw)
        self._text.append(text)
        self._length += len(text)
        self._words += self._count_words(text)

    def tag(self, tag: Tag, *, parts_words: bool = False) -> None:
        """Adds a tag inside a paragraph; with ``parts_words`` the text around it is not one word."""
        self._has_markup = True
        self._add_tag(tag, parts_words=parts_words)

    def _add_tag(self, tag: Tag, *, parts_words: bool) -> None:
        if parts_words:
            self._text.append(" ")
            self._length += 1
            self._words.append(self._word)
        self._raw.append(tag.text)
        self._tags.append(tag._replace(at=self._length))
        self._count_words(tag.text)

    def separator(self, text: str) -> None:
        """Ends a paragraph by text that is kept: a line end or a block tag."""
        self._end_paragraph()
        self._gaps[-1].append(text)
        self._count_words(text)
        self._line += 1

    def passage(self) -> Passage:
        """Returns the passage after the last piece."""
        self._end_paragraph()
        return Passage(self._sentences, list(map("".join, self._gaps)), self._lines, self._line + 1)

    def _count_words(self, text: str) -> list[int]:
        """Returns for each character the number of its word in the whole text, tags included."""
        numbers: list[int] = []
        for character in "" if self._html else text:
            in_word = not character.isspace()
            self._word += in_word and not self._in_word
            self._in_word = in_word
            numbers.append(self._word)
        return numbers

    def _end_paragraph(self) -> None:
        written, tags = "".join(self._text), self._tags
        text = _BLANK.sub(" ", written)
        spans = self._how.split(text) if has_words(text) else []
        if not spans:
            self._keep()
        done = first = 0
        for number, (start, stop) in enumerate(spans):
            between = written[done:start]
            if number and not between.strip():
                between = (between or " ") if self._how.spaced else ""
            last = first
            while last < len(tags) and tags[last].at < start:
                last += 1
            self._gap(between, done, tags[first:last])
            first = last
            while last < len(tags) and (
                tags[last].at < stop or (tags[last].at == stop and tags[last].kind == "close")
            ):
                last += 1
            behind = last
            while behind < len(tags) and tags[behind].at == stop:
                behind += 1
            self._sentence(text, (start, stop), tags[first:last], tags[last:behind])
            done, first = stop, last
        if spans:
            self._gap(written[done:], done, tags[first:])
        self._begin_paragraph()

    def _keep(self) -> None:
        """Adds a paragraph without words; without markup it is a sentence, since answers have one for each line."""
        raw, first, words = "".join(self._raw), self._first_word, list[list[int]]()
        if self._has_markup or not raw.strip():
            self._gaps[-1].append(raw)
            return
        spans = self._how.split(raw)  # which may count the characters of all sentences
        start, stop = spans[0][0], spans[-1][1]
        for word in raw[start:stop].split(" "):
            if count := len(word.split()):
                words.append(list(range(first, first + count)))
                first += count
        self._gaps[-1].append(raw[:start])
        self._sentences.append(Marked(raw[start:stop], words=words))
        self._lines.append(self._line)
        self._gaps.append([raw[stop:]])

    def _gap(self, text: str, start: int, tags: Sequence[Tag]) -> None:
        """Adds text, whose first character has the index ``start``, with tags to the current gap."""
        done = 0
        for tag in tags:
            self._gaps[-1] += text[done : max(tag.at - start, done)], tag.text
            done = max(tag.at - start, done)
        self._gaps[-1].append(text[done:])

    def _sentence(
        self, text: str, span: tuple[int, int], tags: Sequence[Tag], following: Sequence[Tag]
    ) -> None:
        """Adds a sentence; tags that need no alignment, at its ends and around the whole of it, go to the gaps.

        ``following`` are the tags right after it.
        """
        start, stop = span
        first, last = _inner(tags, span)
        self._gaps[-1] += (tag.text for tag in tags[:first])
        words: list[dict[int, None]] = []
        for at in range(start, start if self._html else stop):
            if text[at] != " ":
                if at == start or text[at - 1] == " ":
                    words.append({})
                words[-1][self._words[at]] = None
        inner = [tag._replace(at=tag.at - start) for tag in tags[first:last]]
        beside = (
            text[start] if any(tag.at == start and tag.kind == "alone" for tag in tags[:first]) else "",
            text[stop - 1] if any(tag.kind == "alone" for tag in following) else "",
        )
        self._sentences.append(
            marked(text[start:stop], inner, list(map(list, words)), escaped=self._html, beside=beside)
        )
        self._lines.append(self._line)
        self._gaps.append([tag.text for tag in tags[last:]])


def _inner(tags: Sequence[Tag], span: tuple[int, int]) -> tuple[int, int]:
    """Returns the range of a sentence's tags that stand among its words or around some of them."""
    partner: dict[int, int] = {}
    stack: list[int] = []
    opened: Counter[str] = Counter()
    for number, tag in enumerate(tags):
        if tag.kind == "open":
            stack.append(number)
            opened[tag.name] += 1
        elif tag.kind == "close" and opened[tag.name]:
            while (opener := stack.pop()) >= 0:
                opened[tags[opener].name] -= 1
                if tags[opener].name == tag.name:
                    break
            partner[number], partner[opener] = opener, number

    def is_outside(number: int, end: int) -> bool:
        other = partner.get(number)
        return tags[number].at == end and (other is None or tags[other].at == end)

    first, last = 0, len(tags)
    while first < last:
        if is_outside(first, span[0]):
            first += 1
        elif is_outside(last - 1, span[1]):
            last -= 1
        elif partner.get(first) == last - 1 and (tags[first].at, tags[last - 1].at) == span:
            first, last = first + 1, last - 1
        else:
            break
    return first, last


def plain_passage(text: str, how: TextDivision) -> Passage:
    """Divides plain text, in which each line is a paragraph."""
    builder = PassageBuilder(how)
    for number, line in enumerate(text.split("\n")):
        if number:
            builder.separator("\n")
        builder.text(line)
    return builder.passage()
