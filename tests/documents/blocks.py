"""Code blocks of the Markdown pages, and which of their commands tests execute."""

from __future__ import annotations

import re
from typing import NamedTuple

from tests.conftest import ROOT

PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    "runtime/README.md",
    *sorted(str(page.relative_to(ROOT)) for page in ROOT.glob("docs/**/*.md")),
]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SHELL = ("bash", "console", "sh")

ONLY_PARSED = {
    "a GPU": [
        "scripts.bench gpu.",
        "scripts.bench cells --device cuda",
        "scripts.bench account --device cuda",
        "scripts.bench re",  # recurrent, resets
        "scripts.bench drop-in --device cuda",
        "scripts.bench options --device cuda",
    ],
    "the network": ["pip install", "hf auth", "hf upload", "hf://", "make ", "git clone"],
    "a text or a program of the reader's": [
        "scripts.bench make-",
        "train docs-ten",
        "scripts.libretranslate_tests",
        "paste all.",
        "--validation-hook",
        "distill --command",
        "runs/laws-student",
        "distill runs/multi30k -s multi30k/",
    ],
    "several hosts": ["torchrun ", "srun ", "#SBATCH", "scontrol "],
    "packages that tests do not install": ["scripts.bench compare.", "bench transformer"],
}
"""Why some commands are not executed, and what they contain."""

SLOW = re.compile(
    r"econmt train .*--processes|scripts\.bench parallel |scripts\.kill_campaign |scripts\.bench choices"
)
"""Commands that only slow tests execute: they start processes that import PyTorch, or have no small sizes.

The others read their arguments, and train what would be trained as a dry run.
"""


class Block(NamedTuple):
    """A code block of a page."""

    language: str
    text: str
    line: int
    """Line of the page on which the block's text begins, from 1."""


def blocks(page: str) -> list[Block]:
    """The code blocks of a page, in its order."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return [
        Block(match[1], match[2], text.count("\n", 0, match.start()) + 2) for match in BLOCK.finditer(text)
    ]


def console_blocks(page: str) -> list[Block]:
    """The blocks of a page whose lines are shell commands."""
    return [block for block in blocks(page) if block.language in _SHELL]


def commands(block: Block) -> list[str]:
    """The commands of a console block: its lines, without prompts and comments, continuation lines joined."""
    joined = re.sub(r"\\\n\s*", " ", block.text)
    lines = [
        re.sub(r"(^|\s)#(?!SBATCH).*", "", line.removeprefix("$ ")).strip() for line in joined.splitlines()
    ]
    return [line for line in lines if line]


def quoted_scripts(page: str) -> list[str]:
    """The commands ``python -m scripts.*`` that stand in the text of a page, outside of its blocks."""
    text = BLOCK.sub("", (ROOT / page).read_text(encoding="utf-8"))
    spans = [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", text)]
    return [
        span.removeprefix("ECONMT_DATA=FOLDER ")
        for span in spans
        if re.match(r"(\w+=\S+ )*python -m scripts\.\w+ [\w-]", span)
    ]


def why_only_parsed(command: str) -> str | None:
    """What a command needs that a test does not have, or None if it is executed."""
    for reason, parts in ONLY_PARSED.items():
        if any(part in f"{command} " for part in parts):
            return reason
    return None
