"""econmt itself, with its defaults, in float32 and in bfloat16."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from functools import partial
from pathlib import Path

import yaml

from scripts.bench.frame import SOURCES

from .. import toolkit as matched
from ..make_data import RECIPE
from ..toolkit import Command, Places, Toolkit

MODEL = f"""
model:
  embedding: {matched.EMBEDDING}
  encoder: {{layers: 1, size: {matched.HIDDEN}, bidirectional: bottom}}
  decoder: {{layers: 1, size: {matched.HIDDEN}, input_feeding: true}}
  attention: {{type: additive, size: {matched.ATTENTION}}}
training:
  batch: {{type: sentence, size: {matched.BATCH}}}
  optimizer: {{name: adam, learning_rate: {matched.LEARNING_RATE}}}
  gradient_clipping: {{type: norm, threshold: {matched.CLIP_NORM}}}
  decode_and_evaluate: 0
  log_interval: {matched.LOG_EVERY}
  max_updates: 1
"""


class Econmt(Toolkit):
    """This checkout in this process's environment."""

    name = "econmt"
    package = "econmt"
    translated = re.compile(r"\d+ lines, \d+ target tokens in ([\d.]+) s")
    precision = "auto"

    @property
    def requirements(self) -> Path | None:
        """None: it uses this process's environment."""
        return None

    def version(self) -> str:
        """Returns the commit, with a plus sign if files of the packages differ from it; "unknown" without git."""
        if shutil.which("git") is None:
            return "unknown"
        git = partial(subprocess.run, cwd=matched.ROOT, capture_output=True, text=True, check=False)
        commit = git(["git", "rev-parse", "--short=7", "HEAD"]).stdout.strip() or "unknown"
        changes = git(["git", "status", "--porcelain", "--", "econmt", "ops", "memory"]).stdout
        return commit + ("+" if changes else "")

    def variables(self) -> dict[str, str]:
        """Returns the path of this checkout's packages, installed or not, before those that are on it."""
        return {"PYTHONPATH": os.pathsep.join([SOURCES, os.environ.get("PYTHONPATH", "")])}

    def prepare(self, places: Places) -> list[Command]:
        """Writes the recipe, which reads the token store that the token files were written from."""
        recipe = yaml.safe_load(RECIPE + MODEL)
        recipe["data"]["prepared"] = str(places.data / "store")
        if self.precision != "auto":
            recipe["training"]["precision"] = self.precision
        text = yaml.safe_dump(recipe, sort_keys=False)
        (places.work / "recipe.yaml").write_text(text, encoding="utf-8")
        return []

    def train(self, places: Places, model: Path, updates: int) -> Command:
        """Returns a command that validates and saves at the last update; the launcher prints numbers of tokens."""
        changes = f"training.max_updates={updates}", f"training.checkpoint_interval={updates}"
        recipe = places.work / "recipe.yaml"
        return Command.python(
            places, matched.LAUNCHER, "econmt", "train", recipe, f"output={model}", *changes
        )

    def translate(self, places: Places, model: Path, output: Path) -> Command:
        """Returns a command that translates raw text, which econmt segments itself."""
        files = "--model", model, "--input", places.data / f"test.raw.{matched.SOURCE}", "--output", output
        options = f"--beam-size {matched.BEAM} --batch-size {matched.BATCH}"
        if self.precision != "auto":
            options += f" --precision {self.precision}"
        return Command.python(places, "-m", "econmt", "translate", *files, *options.split())
