"""Splitting of a paragraph into sentences.

A splitter returns the spans of the sentences in the text, between which there are only blanks, so that nothing gets
lost. It is sentence-splitter (the extra ``sentences``), the splitter of Moses and Europarl with lists of abbreviations
for some twenty languages, where it is installed and knows the language, and :func:`sentence_spans` elsewhere.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial

Span = tuple[int, int]
Splitter = Callable[[str], list[Span]]

SPACELESS = frozenset(("zh", "ja", "th", "lo", "km", "my", "bo", "yue", "cmn"))
"""Languages without blanks between sentences."""

_CLOSING = "\"'”’“‘»›)\\]}」』】）〉》"
_WIDE_CLOSING = "”’」』】）〉》"
_OPENING = "\"'“‘«‹„‚([{¿¡「『【（〈《"
_END = re.compile(
    "(?<![.!?…؟۔।॥։።])(?:(?P<stop>[.])|[.!?…؟۔।॥։።]+)"
    f"(?P<closing>(?:[{_CLOSING}]|\\s»(?=\\s)|[ ]?[\u2600-\u27bf\U0001f300-\U0001faff\ufe0f])*)(?=\\s)"
    f"|(?P<wide>[。｡][！？。｡]*[{_WIDE_CLOSING}]*|(?<![！？])[！？]+(?![{_WIDE_CLOSING}！？。｡]))"
)
"""End of a sentence with the quotes and pictures that belong to it; ``stop`` if it is a single full stop."""
_NEXT = re.compile(rf"\s+(?:[-–—]\s*)?[{_OPENING}\s]*")
_WORD_BEFORE = re.compile(rf"[^\s{_OPENING}]*\Z")
_LONGEST_WORD = 40
_LONG_WORD = 1000
_LONG_TEXT = 20_000
"""Characters of a text above which the library, whose time grows with the square, is not used."""
_BLANKS = re.compile(r"\s*")
_ACRONYM = re.compile(r"(?:[^\W\d_]\.)+[^\W\d_]|[^\W\d_]")
_ORDINAL = re.compile(r"\d{1,2}|[IVX]{1,5}")
_ITEM = re.compile(r"\d{1,3}\Z")

_TITLES = {
    "": "Dr Prof Mr Mrs Ms St Ph.D Inc Ltd Co Jr Sr vs cf ca al",
    "en": "Messrs Rev Hon Gen Col Lt Sgt Capt Cmdr Gov Sen Rep Pres Mt Ft Ave Blvd Rd Jan Feb Mar Apr Jun Jul Aug "
    "Sep Sept Oct Nov Dec approx dept est e.g i.e",
    "de": "Hr Fr Frl Dipl Ing Hrsg bzw evtl ggf inkl exkl zzgl bspw vgl sog geb gest verh Str Tel Jan Feb Apr Aug "
    "Sept Okt Nov Dez z.B d.h u.a o.ä i.d.R St Mag Hl",
    "fr": "M MM Mme Mmes Mlle Mlles Me Mgr Pr Ste apr av bd env p.ex c.-à-d janv févr avr juil sept oct nov déc",
    "es": "Sr Sra Srta Sres D Da Dña Dra Ud Uds Vd Vds Avda p.ej EE.UU aprox",
    "it": "Sig Sigg Sig.ra Sig.na Dott Dott.ssa Avv Ing Geom Arch On Mons S p.es ecc pag",
    "pt": "Sr Sra Dra Srta Exmo Exma Eng Av aprox p.ex",
    "nl": "Dhr Mevr Mw Drs Ir Mr Ing bijv bv o.a m.a.w d.w.z",
    "ru": "г гг ул д т.е т.к т.н им проф акад см",
    "pl": "np tj tzw ul al inż mgr hab św im",
    "cs": "např tzn tzv ul Ing Mgr MUDr JUDr sv",
    "sv": "t.ex bl.a d.v.s dvs osv kl",
    "da": "f.eks bl.a dvs osv kl",
    "tr": "Sn Av Doç Yrd örn vb",
}
"""Abbreviations after which a sentence goes on, by language; those of "" belong to every language."""
_NUMBERED = "No no Nr nr Nos Art Abs Abb Bd Fig fig Vol vol p pp S s Sec sec Eq eq Ch ch Tab N n num Núm č"
"""Abbreviations after which a sentence goes on with a number."""
_WITH_ORDINALS = "de da no nb nn fi is et lv hr sr bs sl sk cs pl hu tr lb"
"""Languages that write a full stop after ordinal numbers."""
_BEGINNERS = {
    "en": "The He She It They We You I In A An This That These Those But And However There Then His Her My When If",
    "de": "Der Die Das Er Sie Es Wir Ihr Ich Ein Eine Im In Am Aber Und Doch Dann Danach Dort Hier Wenn Sein Mein",
}
"""Words with which a sentence begins after an acronym such as "U.S.", which often stands before names."""


def base_language(language: str) -> str:
    """Returns the first part of a language code: ``en`` for ``en-US``."""
    return language.lower().replace("_", "-").partition("-")[0]


def sentence_spans(text: str, language: str = "", *, stops: bool = True) -> list[Span]:
    """Returns the spans of the sentences of a text, by rules; ``language`` is the code's first part.

    A sentence ends at a full stop, a question or exclamation mark, or dots of omission, if the next word begins with
    no small letter. A full stop does not end it after an abbreviation, an initial, the number of a list's item, or an
    ordinal number. The full stops of Chinese and Japanese end it even without a blank. Without ``stops`` a full stop
    between words does not end it at all.
    """
    spans: list[Span] = []
    begin = _after_blanks(text, 0)
    for end in _END.finditer(text):
        if not stops and end["stop"] and not end["closing"]:
            continue
        if end["wide"] or _begins_sentence(text, begin, end, language):
            spans += _trimmed(text, begin, end.end())
            begin = _after_blanks(text, end.end())
    return spans + _trimmed(text, begin, len(text))


def _trimmed(text: str, begin: int, end: int) -> list[Span]:
    """Returns the span without the blanks at its ends, or nothing if there is nothing else."""
    piece = text[begin:end]
    start = begin + len(piece) - len(piece.lstrip())
    return [(start, begin + len(piece.rstrip()))] if piece.strip() else []


def _after_blanks(text: str, at: int) -> int:
    """Returns the index of the first character from ``at`` on that is not blank."""
    blanks = _BLANKS.match(text, at)
    assert blanks is not None
    return blanks.end()


def _begins_sentence(text: str, begin: int, end: re.Match[str], language: str) -> bool:
    """Returns True if a sentence, which begins at ``begin``, ends here and another one follows."""
    following = _NEXT.match(text, end.end())
    assert following is not None
    first = text[following.end() : following.end() + 1]
    if not first.isalnum() or first.islower():
        return False
    if not end["stop"]:
        return True
    before = _WORD_BEFORE.search(text, max(begin, end.start() - _LONGEST_WORD), end.start())
    word = before[0] if before else ""
    titles = f"{_TITLES['']} {_TITLES.get(language, '')}".split()
    if (
        word in titles
        or word[:1].lower() + word[1:] in titles
        or (word in _NUMBERED.split() and first.isdigit())
    ):
        return False
    if _ITEM.match(text, begin, end.start()) or (
        language in _WITH_ORDINALS.split() and _ORDINAL.fullmatch(word)
    ):
        return False
    if _ACRONYM.fullmatch(word) and not word.isdigit():
        rest = text[following.end() : following.end() + _LONGEST_WORD]
        next_word = re.match(r"\w*", rest)
        assert next_word is not None
        return "." in word and next_word[0] in _BEGINNERS.get(language, "").split()
    return True


def splitter_for(language: str) -> Splitter:
    """Returns the best splitter that is installed for a language."""
    base = base_language(language)
    own = partial(sentence_spans, language=base)
    try:
        from sentence_splitter import SentenceSplitter, SentenceSplitterException
    except ImportError:
        return own
    try:
        library = SentenceSplitter(language=base)
    except SentenceSplitterException:
        return own

    def split(text: str) -> list[Span]:
        # The library takes the square of a word's length, and of a text's.
        if len(text) > _LONG_TEXT or max(map(len, text.split()), default=0) >= _LONG_WORD:
            return own(text)
        spans: list[Span] = []
        for begin, last in _found(text, library.split(" ".join(text.split()))):
            if spans and _ITEM.match(text[spans[-1][0] : spans[-1][1] - 1]):  # a number alone is no sentence
                begin = spans.pop()[0]
            # The library knows abbreviations, but not the quotes and question marks of all languages.
            spans += [(begin + start, begin + end) for start, end in own(text[begin:last], stops=False)]
        return spans or own(text)

    return split


def _found(text: str, pieces: Sequence[str]) -> list[Span]:
    """Returns the spans of pieces, in which only blanks have changed; none if other characters have."""
    written = [at for at, character in enumerate(text) if not character.isspace()]
    spans: list[Span] = []
    done = 0
    for piece in pieces:
        size = len("".join(piece.split()))
        if size and done + size <= len(written):
            spans.append((written[done], written[done + size - 1] + 1))
        done += size
    return spans if done == len(written) else []
