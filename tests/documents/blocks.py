"""Code blocks of the Markdown pages, and which of their commands are only parsed."""

from __future__ import annotations

import re
from typing import NamedTuple

from tests.conftest import ROOT

PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    *sorted(str(page.relative_to(ROOT)) for page in ROOT.glob("docs/**/*.md")),
]
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SHELL = ("bash", "console", "sh")

ONLY_PARSED = {
    "a GPU": ["--device cuda", "device=cuda"],
    "the network": ["pip install", "hf auth", "hf upload", "hf://"],
    "several hosts": ["torchrun ", "srun ", "#SBATCH", "scontrol "],
    "minutes or hours": [
        "bench layout --recurrent",
        "bench select --grid",
        "bench select --summary",
        "scripts.soak",
        "scripts.bench ",
        "make ",
        "en-vi",
        "-m RUN ",
        "python3 -m venv",
    ],
    "text that is not public": ["train ptb"],
}
"""Why some commands are not executed, and what they contain."""


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
        Block(match[1], match[2], text.count("\n", 0, match.start()) + 2) for match in _BLOCK.finditer(text)
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


def why_only_parsed(command: str) -> str | None:
    """What a command needs that a test does not have, or None if it is executed."""
    for reason, parts in ONLY_PARSED.items():
        if any(part in f"{command} " for part in parts):
            return reason
    return None
