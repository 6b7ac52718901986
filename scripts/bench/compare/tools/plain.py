"""Plain PyTorch, written for this comparison; see ``launchers/plain.py``."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

from .. import toolkit as matched
from ..toolkit import Command, Places, Toolkit


class Plain(Toolkit):
    """Plain PyTorch loop in econmt's environment, with the same torch."""

    name = "plain PyTorch loop"
    package = "torch"
    translated = re.compile(r"translated in ([\d.]+) s")

    @property
    def requirements(self) -> Path | None:
        """None: it needs only econmt's packages."""
        return None

    def version(self) -> str:
        """Returns torch's version."""
        return f"torch {importlib.metadata.version('torch')}"

    def _command(self, places: Places, verb: str, *arguments: object) -> Command:
        program = matched.LAUNCHER.with_name("plain.py")
        return Command.python(places, program, "--precision", self.precision, verb, places.data, *arguments)

    def train(self, places: Places, model: Path, updates: int) -> Command:
        """Returns a command that saves the model at the end."""
        return self._command(places, "train", model, updates, matched.LOG_EVERY)

    def translate(self, places: Places, model: Path, output: Path) -> Command:
        """Returns a command that translates batches of 64, sorted by length."""
        return self._command(places, "translate", model, output)
