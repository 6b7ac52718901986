"""Splitting of a paragraph into sentences.

A splitter returns the spans of the sentences in the text, between which there are only blanks, so that nothing gets
lost. Sentences end at characters with Unicode's property Sentence_Terminal.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from functools import partial

Span = tuple[int, int]
Splitter = Callable[[str], list[Span]]

SPACELESS = frozenset(("zh", "ja", "yue", "cmn"))
"""Languages without blanks between sentences."""

_SENTENCE_TERMINAL = """
0021 002E 003F 0589 061D-061F 06D4 0700-0702 07F9 0837 0839 083D-083E 0964-0965 0F08 0F0D-0F12 104B 1362 1367-1368
166E 1735-1736 17D4-17D5 1803 1809 1944-1945 1AA8-1AAB 1B4E-1B4F 1B5A-1B5B 1B5E-1B5F 1B7D-1B7F 1C3B-1C3C 1C7E-1C7F
2024 2026 203C-203D 2047-2049 2CF9-2CFB 2E2E 2E3C 2E53-2E54 2E60-2E61 3002 A4FF A60E-A60F A6F3 A6F7 A876-A877
A8CE-A8CF A92F A9C8-A9C9 AA5D-AA5F AAF0-AAF1 ABEB FE52 FE56-FE57 FF0E 10A56-10A57 10F55-10F59 10F86-10F89
11047-11048 110BE-110C1 11141-11143 111C5-111C6 111CD 111DE-111DF 11238-11239 1123B-1123C 112A9 113D4-113D5
1144B-1144C 115C2-115C3 115C9-115D7 11641-11642 1173C-1173E 11944 11946 11A42-11A43 11A9B-11A9C 11C41-11C42
11EF7-11EF8 11F43-11F44 16A6E-16A6F 16AF5 16B37-16B38 16B44 16D6E-16D6F 16E98 1BC9F 1DA88
"""
"""Characters with the property Sentence_Terminal of Unicode 17, dots of omission (U+2026), and the shads of Tibetan.

U+104A is left out, which Burmese writes as a comma, and the wide marks that end a sentence without a blank.
"""
_TERMINALS = re.sub(
    "([0-9A-F]+)(-?) ?", lambda code: chr(int(code[1], 16)) + code[2], " ".join(_SENTENCE_TERMINAL.split())
)
"""Sentence terminals as the inside of a regular expression's brackets."""
_FORMAT = "\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff"
"""Characters without a shape, such as the marks of writing direction."""
_CLOSING = f"\"'”’“‘»›)\\]}}」』】）〉》*_{_FORMAT}"
_WIDE_CLOSING = "”’」』】）〉》"
_OPENING = f"\"'“‘«‹„‚([{{¿¡「『【（〈《*_{_FORMAT}"
_END = re.compile(
    f"(?=[{_TERMINALS}])(?<![{_TERMINALS}])(?:(?P<stop>[.])|[{_TERMINALS}]+)"
    f"(?P<closing>(?:[{_CLOSING}]|\\s»(?=\\s)|[ ]?[\u2600-\u27bf\U0001f300-\U0001faff\ufe0f])*)(?=\\s)"
    f"|(?P<wide>[。｡︒][！？。｡︒︕︖]*[{_WIDE_CLOSING}]*|[။។៕]+[{_WIDE_CLOSING}]*"
    f"|(?<![！？︕︖])[！？︕︖]+(?![{_WIDE_CLOSING}！？。｡︒︕︖]))"
    "|(?P<greek>;)(?=\\s)"
)
"""End of a sentence with the quotes, emphasis and pictures that belong to it.

``stop`` is a single full stop, ``wide`` a mark that needs no blank after it, ``greek`` the Greek question mark.
"""
_NEXT = re.compile(rf"\s+(?:[-–—]\s*)?[{_OPENING}\s]*")
_BEGINNING = re.compile("[•‣⁃∙·◦▪▫■□●○◆◇►▶➤→⇒\U0001f1e6-\U0001f1ff]|[#@]\\w")
"""Bullets, flags, numbers such as ``#2``, and names such as ``@tom``, with which a sentence may begin."""
_WORD_BEFORE = re.compile(rf"[^\s{_OPENING}]*\Z")
_LONGEST_WORD = 40
_ACRONYM = re.compile(r"(?:[^\W\d_]\.)+[^\W\d_]|[^\W\d_]")
_ORDINAL = re.compile(r"\d{1,2}|[IVX]{1,5}")
_ITEM = re.compile(r"\s*\d{1,3}\Z")

_TITLES = {
    "": "Dr Prof Mr Mrs Ms St Ph.D Inc Ltd Co Jr Sr vs cf ca al",
    "en": "Messrs Drs Bros Rev Hon Gen Col Lt Sgt Capt Cmdr Gov Sen Rep Pres Mt Ft Ave Blvd Rd Jan Feb Mar Apr Jun Jul "
    "Aug Sep Sept Oct Nov Dec approx dept est e.g i.e",
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
    "tr": "Sn Av Doç Yrd örn vb",
    **dict.fromkeys(("da", "nb", "no"), "f.eks bl.a dvs osv kl"),
    "fi": "esim ns mm ks tri Bros",
    "hu": "pl ún ill kb dr stb",
    "ro": "dl dna nr str ex",
    "sk": "napr tzn tzv ul Ing Mgr MUDr JUDr",
    "sl": "npr tj oz ul g ga",
    "hr": "npr tj tzv ul",
    "el": "π.χ κ κκ δηλ αρ",
    "lt": "pvz vad g",
    "lv": "piem t.i",
    "is": "t.d þ.e",
    "ca": "Sr Sra Dra av",
    "uk": "м вул т.зв ім проф",
    "vi": "TP Tp TS ThS GS PGS BS KS",
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


def sentence_spans(text: str, language: str = "") -> list[Span]:
    """Returns the spans of the sentences of a text, by rules; ``language`` is the code's first part.

    A sentence ends at a full stop, a question or exclamation mark, or dots of omission, if the next word begins with
    no small letter. A full stop does not end it after an abbreviation, an initial, the number of a list's item, or an
    ordinal number. The full stops of Chinese, Japanese, Burmese and Khmer end it even without a blank.
    """
    spans: list[Span] = []
    begin = 0
    for end in _END.finditer(text):
        if end["greek"] and language != "el":
            continue
        if end["wide"] or _begins_sentence(text, begin, end, language):
            spans += _trimmed(text, begin, end.end())
            begin = end.end()
    return spans + _trimmed(text, begin, len(text))


def _trimmed(text: str, begin: int, end: int) -> list[Span]:
    """Returns the span without the blanks at its ends, or nothing if there is nothing else."""
    piece = text[begin:end]
    start = begin + len(piece) - len(piece.lstrip())
    return [(start, begin + len(piece.rstrip()))] if piece.strip() else []


def _begins_sentence(text: str, begin: int, end: re.Match[str], language: str) -> bool:
    """Returns True if a sentence, which begins at ``begin``, ends here and another one follows."""
    following = _NEXT.match(text, end.end())
    assert following is not None
    first = text[following.end() : following.end() + 1]
    if not _can_begin(first) and not _BEGINNING.match(text, following.end()):
        return False
    if not end["stop"]:
        return True
    before = _WORD_BEFORE.search(text, max(begin, end.start() - _LONGEST_WORD), end.start())
    word = before[0] if before else ""
    titles = f"{_TITLES['']} {_TITLES.get(language, '')}".split()
    if (
        word in titles
        or word[:1].lower() + word[1:] in titles
        or (word in _NUMBERED.split() and (first.isdigit() or first == "#"))
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


def _can_begin(first: str) -> bool:
    """Returns True for digits, signs of currencies, and letters unless their script has capitals and they are small.

    Georgian letters have capitals for whole lines only, so that they are their own title case.
    """
    is_small = first.islower() and first.title() != first
    return (first.isalnum() and not is_small) or (first != "" and unicodedata.category(first) == "Sc")


def splitter_for(language: str) -> Splitter:
    """Returns the splitter of texts in a language."""
    return partial(sentence_spans, language=base_language(language))
