"""Plain PyTorch, written for this comparison; see ``launchers/plain.py``."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

from ..toolkit import LAUNCHERS, LOG_EVERY, Command, Places, Toolkit

_TRANSLATED = re.compile(r"translated in ([\d.]+) s")


class Plain(Toolkit):
    """Runs in econmt's own environment: the same torch."""

    name = "plain PyTorch loop"
    devices = ("cpu",)
    package = "torch"
    differs = "our own 200 lines, with buckets, packed encoder, combined gates, fused Adam"
    options: tuple[str, ...] = ()

    @property
    def requirements(self) -> Path | None:
        """None: it needs nothing that econmt does not need."""
        return None

    def version(self) -> str:
        """torch's."""
        return f"torch {importlib.metadata.version('torch')}"

    def prepare(self, places: Places) -> list[Command]:  # noqa: ARG002
        """Nothing: it reads the token files."""
        return []

    def _command(self, places: Places, verb: str, *arguments: object) -> Command:
        words = [str(places.interpreter), str(LAUNCHERS / "plain.py"), *self.options, verb, str(places.data)]
        return Command([*words, *map(str, arguments)])

    def train(self, places: Places, model: Path, updates: int) -> Command:
        """The model is saved at the end."""
        return self._command(places, "train", model, updates, LOG_EVERY)

    def translate(self, places: Places, model: Path, output: Path) -> Command:
        """Batches of 64, sorted by length."""
        return self._command(places, "translate", model, output)

    def translation_seconds(self, line: str) -> float | None:
        """Search and writing, without start-up."""
        found = _TRANSLATED.search(line)
        return float(found[1]) if found else None


class PlainBfloat16(Plain):
    """The plain loop with products in bfloat16, which takes one line of ``torch.autocast``."""

    name = "plain PyTorch loop, bfloat16"
    differs = 'torch.autocast("cpu", dtype=torch.bfloat16)'
    options = ("--bfloat16",)
