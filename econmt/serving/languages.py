"""Names of languages by their codes of ISO 639-1, as recipes name the suffixes of files."""

from __future__ import annotations

_NAMES = """
ar Arabic, bg Bulgarian, bn Bengali, ca Catalan, cs Czech, cy Welsh, da Danish, de German, el Greek, en English,
eo Esperanto, es Spanish, et Estonian, eu Basque, fa Persian, fi Finnish, fr French, ga Irish, gl Galician, he Hebrew,
hi Hindi, hr Croatian, hu Hungarian, id Indonesian, is Icelandic, it Italian, ja Japanese, ko Korean, lt Lithuanian,
lv Latvian, mk Macedonian, ms Malay, nb Norwegian Bokmål, nl Dutch, nn Norwegian Nynorsk, no Norwegian, pl Polish,
pt Portuguese, ro Romanian, ru Russian, sk Slovak, sl Slovenian, sq Albanian, sr Serbian, sv Swedish, sw Swahili,
ta Tamil, te Telugu, th Thai, tl Tagalog, tr Turkish, uk Ukrainian, ur Urdu, vi Vietnamese, zh Chinese
"""
_BY_CODE = dict(each.strip().split(" ", 1) for each in _NAMES.split(","))


def language_name(code: str) -> str:
    """The English name of a language; of one that is not known, its code."""
    return _BY_CODE.get(code, code)
