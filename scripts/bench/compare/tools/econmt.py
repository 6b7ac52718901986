"""econmt itself, as it is by default and held to float32."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import ClassVar

import yaml

from ..make_data import RECIPE
from ..toolkit import (
    ATTENTION,
    BATCH,
    BEAM,
    CLIP_NORM,
    EMBEDDING,
    HIDDEN,
    LAUNCHERS,
    LEARNING_RATE,
    LOG_EVERY,
    ROOT,
    SOURCE,
    Command,
    Places,
    Toolkit,
)

_TRANSLATED = re.compile(r"\d+ lines, \d+ target tokens in ([\d.]+) s")


class Econmt(Toolkit):
    """Runs this checkout."""

    name = "econmt"
    package = "econmt"
    differs = "as it is by default"
    precision: ClassVar[str | None] = None

    @property
    def requirements(self) -> Path | None:
        """None: it runs in this process's environment."""
        return None

    def version(self) -> str:
        """The commit; a plus sign says that files of the packages differ from it."""
        describe = ["git", "rev-parse", "--short=7", "HEAD"]
        changes = ["git", "status", "--porcelain", "--", "econmt", "ops"]
        texts = [
            subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
            for words in (describe, changes)
        ]
        return (texts[0] or "unknown") + ("+" if texts[1] else "")

    def variables(self) -> dict[str, str]:
        """The packages of this checkout, installed or not."""
        return {"PYTHONPATH": f"{ROOT / 'ops'}:{ROOT}"}

    def prepare(self, places: Places) -> list[Command]:
        """The recipe. The store that the token files were written from is used as it is."""
        recipe = yaml.safe_load(RECIPE)
        recipe["data"]["prepared"] = str(places.data / "store")
        recipe["model"] = {
            "embedding": EMBEDDING,
            "encoder": {"layers": 1, "size": HIDDEN, "bidirectional": "bottom"},
            "decoder": {"layers": 1, "size": HIDDEN, "input_feeding": True},
            "attention": {"type": "additive", "size": ATTENTION},
        }
        recipe["training"] = {
            "batch": {"type": "sentence", "size": BATCH},
            "optimizer": {"name": "adam", "learning_rate": LEARNING_RATE},
            "gradient_clipping": {"type": "norm", "threshold": CLIP_NORM},
            "decode_and_evaluate": 0,
            "log_interval": LOG_EVERY,
            "max_updates": 1,
        }
        if self.precision is not None:
            recipe["training"]["precision"] = self.precision
        text = yaml.safe_dump(recipe, sort_keys=False)
        (places.work / "recipe.yaml").write_text(text, encoding="utf-8")
        return []

    def train(self, places: Places, model: Path, updates: int) -> Command:
        """Validates and saves at the last update; through a launcher that tells the tokens, see there."""
        launcher = str(LAUNCHERS / "start_econmt.py")
        words = [str(places.interpreter), launcher, "train", str(places.work / "recipe.yaml")]
        changes = {"output": model, "training.max_updates": updates, "training.checkpoint_interval": updates}
        return Command([*words, *(f"{key}={value}" for key, value in changes.items())])

    def translate(self, places: Places, model: Path, output: Path) -> Command:
        """From raw text, which it cuts into subwords itself."""
        options: dict[str, object] = {
            "--model": model,
            "--input": places.data / f"test.raw.{SOURCE}",
            "--output": output,
            "--beam-size": BEAM,
            "--batch-size": BATCH,
        }
        if self.precision is not None:
            options["--precision"] = self.precision
        words = [str(word) for pair in options.items() for word in pair]
        return Command([str(places.interpreter), "-m", "econmt", "translate", *words])

    def translation_seconds(self, line: str) -> float | None:
        """Segmentation, search and writing, without loading the model."""
        found = _TRANSLATED.search(line)
        return float(found[1]) if found else None


class EconmtFloat32(Econmt):
    """Held to the precision of the others."""

    name = "econmt, float32"
    differs = "training.precision=float32"
    precision = "float32"
