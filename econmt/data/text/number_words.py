"""Generated data set of English and German number words, which differ in word order.

German puts the units before the tens ("einundzwanzig", one-and-twenty), so that the attention of a trained model shows
crossings. German compounds are split into words ("ein und zwanzig tausend"), because BLEU needs 4-grams.
"""

from __future__ import annotations

import functools
import random
import re
from itertools import islice

SPLIT_SIZES = {"train": 12000, "valid": 300, "test": 300}
MAX_DIGITS = 9
_SEED = 20240229

_GERMAN_WORDS = re.compile(
    r"null|Millionen|Million|(?:drei|vier|fünf|sech|sieb|acht|neun)(?:zehn|zig)|dreißig|zwanzig|hundert|tausend|und|"
    r"eins|eine|ein|zwei|drei|vier|fünf|sechs|sieben|acht|neun|zehn|elf|zwölf"
)


def english(number: int) -> str:
    """Returns a number in English words without hyphens and commas: "one thousand two hundred and thirty four"."""
    from num2words import num2words

    return str(num2words(number, lang="en")).replace("-", " ").replace(",", "")


def german(number: int) -> str:
    """Returns a number in German words, compounds split: "ein tausend zwei hundert vier und dreißig"."""
    millions, thousands = number // 1_000_000 * 1_000_000, number % 1_000_000 // 1000 * 1000
    parts = [_german_part(part) for part in (millions, thousands, number % 1000) if part]
    return " ".join(parts) if parts else _german_part(0)


@functools.cache
def _german_part(number: int) -> str:
    """Returns the German words of a part of a number; cached, because num2words is slow in German."""
    from num2words import num2words

    compound = str(num2words(number, lang="de"))
    words = _GERMAN_WORDS.findall(compound)
    assert "".join(words) == compound.replace(" ", ""), f"cannot cut {compound} into words"
    return " ".join(words)


def numbers(split: str) -> list[int]:
    """Returns the numbers of one split, with 1 to 9 digits; deterministic, and no number is in two splits."""
    draw = random.Random(_SEED)
    chosen: dict[int, None] = {}
    while len(chosen) < sum(SPLIT_SIZES.values()):
        # The number of digits is drawn first so that all magnitudes occur.
        digits = draw.randint(1, MAX_DIGITS)
        chosen.setdefault(draw.randrange(10 ** (digits - 1), 10**digits))
    shuffled = list(chosen)
    draw.shuffle(shuffled)
    remaining = iter(shuffled)
    return {name: list(islice(remaining, size)) for name, size in SPLIT_SIZES.items()}[split]


def generate(split: str) -> list[tuple[str, str]]:
    """Returns the numbers of one split in English and German words."""
    return [(english(number), german(number)) for number in numbers(split)]
