"""JSON lines of translations."""

from __future__ import annotations

import json

import torch

from econmt.decoding.formats import format_translation
from econmt.decoding.translation import EMPTY, NBestEntry, Translation

ATTENTION = torch.tensor([[0.25, 0.75], [1 / 3, 2 / 3]])
CANDIDATES = [
    NBestEntry("Größe", ["▁Größe"], [9], -0.5, -1.0, ATTENTION, False),
    NBestEntry("Maß", ["▁Maß"], [8], -0.75, -1.5, None, True),
]
TRANSLATION = Translation("Größe", -0.5, -1.0, ["▁Größe"], ATTENTION, CANDIDATES, ["▁size"])


def test_json_has_everything_but_attention() -> None:
    line = format_translation(TRANSLATION, "json")
    assert "\n" not in line
    assert "Größe" in line
    assert json.loads(line) == {
        "translation": "Größe",
        "score": -0.5,
        "log_probability": -1.0,
        "tokens": ["▁Größe"],
        "source_tokens": ["▁size"],
        "nbest": [
            {
                "translation": "Größe",
                "score": -0.5,
                "log_probability": -1.0,
                "tokens": ["▁Größe"],
                "cut": False,
            },
            {"translation": "Maß", "score": -0.75, "log_probability": -1.5, "tokens": ["▁Maß"], "cut": True},
        ],
    }


def test_attention_adds_the_matrix() -> None:
    found = json.loads(format_translation(TRANSLATION, "attention"))
    assert found["attention"] == [[0.25, 0.75], [0.33333, 0.66667]]
    assert found["nbest"][0]["attention"] == found["attention"]
    assert found["nbest"][1]["attention"] == []


def test_a_blank_line_is_an_object_too() -> None:
    assert json.loads(format_translation(EMPTY, "attention")) == {
        "translation": "",
        "score": 0.0,
        "log_probability": 0.0,
        "tokens": [],
        "source_tokens": [],
        "nbest": [],
        "attention": [],
    }
