"""The generated number words are right, always the same, and split without overlap."""

from __future__ import annotations

import hashlib
import random
from collections import Counter

import pytest
from num2words import num2words

from econmt.data.text.number_words import SPLIT_SIZES, english, generate, german, numbers


@pytest.mark.parametrize(
    ("number", "source", "target"),
    [
        (0, "zero", "null"),
        (1, "one", "eins"),
        (16, "sixteen", "sechzehn"),
        (17, "seventeen", "siebzehn"),
        (21, "twenty one", "ein und zwanzig"),
        (67, "sixty seven", "sieben und sechzig"),
        (100, "one hundred", "ein hundert"),
        (1234, "one thousand two hundred and thirty four", "ein tausend zwei hundert vier und dreißig"),
        (71_000, "seventy one thousand", "ein und siebzig tausend"),
        (1_000_001, "one million and one", "eine Million eins"),
        (
            12_011_102,
            "twelve million eleven thousand one hundred and two",
            "zwölf Millionen elf tausend ein hundert zwei",
        ),
    ],
)
def test_words(number: int, source: str, target: str) -> None:
    assert english(number) == source
    assert german(number) == target


def test_the_parts_of_a_number_make_what_the_library_says_of_it_whole() -> None:
    draw = random.Random(3)
    for number in [draw.randrange(10 ** draw.randint(1, 9)) for _ in range(150)]:
        assert german(number).replace(" ", "") == num2words(number, lang="de").replace(" ", "")


def test_splits_have_their_sizes_and_share_no_number() -> None:
    splits = {split: numbers(split) for split in SPLIT_SIZES}
    assert {split: len(found) for split, found in splits.items()} == SPLIT_SIZES
    assert len(set().union(*splits.values())) == sum(SPLIT_SIZES.values())


def test_always_the_same() -> None:
    text = "\n".join(f"{source}\t{target}" for source, target in generate("test"))
    assert (
        hashlib.sha256(text.encode()).hexdigest()
        == "f21d3d449fdc92b6f1c7b28f0b8ffbbda20944eb65a201bd471582b3baefcdb6"
    )


def test_all_magnitudes_occur() -> None:
    digits = Counter(len(str(number)) for number in numbers("train"))
    assert set(digits) == set(range(1, 10))
    assert min(digits[length] for length in range(4, 10)) > 1000


def test_no_such_split() -> None:
    with pytest.raises(KeyError):
        numbers("dev")
