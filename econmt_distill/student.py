"""Recipe of a student, completed by what is known of its teacher and its text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from econmt.api import InputError, limits
from econmt.api.recipes import Recipe, find_recipe, load_recipe, read_recipe, shipped_recipes

LONGEST_RATIO = 3.0
"""Factor by which a pair's ratio of lengths may differ from that of the whole text."""
_FILTERS = {"identical": "drop", "duplicates": "pairs", "max_repeats": 3}


@dataclass(frozen=True)
class StudentChoice:
    """Recipe of a student, and changes to it.

    Attributes:
        recipe: YAML file or shipped name. overrides: Changes to its keys, as ``key=value``.
        valid, test: Prefixes of validation and test text; None: the teacher's or the recipe's.
        also: Prefixes of parallel text that the student learns from beside the teacher's translations.
        device, threads: Device and CPU threads of training; None: the recipe's.
    """

    recipe: str
    overrides: Sequence[str] = ()
    valid: str | None = None
    test: str | None = None
    also: Sequence[str] = ()
    device: str | None = None
    threads: int | None = None

    def load(
        self, output: Path, text: str, teacher: Recipe | None, suffixes: Mapping[str, str], ratio: float = 1.0
    ) -> Recipe:
        """Returns the student's recipe.

        Languages, validation and test text are those of the teacher's recipe, if it has one. Filters that the recipe
        leaves at their defaults leave out translations that failed: copies, repetitions, and those that are much longer
        or shorter than the others. Changes given by the user come last.

        Args:
            output: Folder of the student. text: Prefix of the distilled text.
            teacher: Recipe of the teacher; None if it is not a model folder of econmt.
            suffixes: Languages of the given text files, by the key of the data section.
            ratio: Characters of the translations divided by those of the sources.

        Raises:
            InputError: The recipe or a change is wrong, or languages or validation text are unknown.
        """
        plain = read_recipe(find_recipe(self.recipe))
        if plain.task != "translation":
            raise InputError(
                f"{self.recipe}: trains a language model; give the recipe of a translation model"
            )
        given = {change.partition("=")[0] for change in self.overrides}
        fixed: dict[str, object] = {"output": str(output), "data.train": [text, *self.also]}
        options = {
            "data.valid": self.valid,
            "data.test": self.test,
            "training.device": self.device,
            "training.threads": self.threads,
        }
        fixed |= {key: value for key, value in options.items() if value is not None}
        for key in fixed:
            if key in given:
                name = {"output": "--output", "data.train": "--also"}.get(key, f"--{key.partition('.')[2]}")
                raise InputError(f"{key} cannot be changed; use {name}")
        known: dict[str, object]
        if teacher is not None:
            data = teacher.pairs
            known = {"source": data.source, "target": data.target, "valid": data.valid, "test": data.test}
        else:
            known = {**suffixes}
            self._check_known({*given, *fixed, *(f"data.{key}" for key in known)})
            if self.recipe in shipped_recipes():
                known["test"] = None  # another text of other languages
        longest = min(round(LONGEST_RATIO * max(ratio, 1 / max(ratio, 1e-3)), 1), limits.OUTPUT_FACTOR)
        chosen = plain.pairs.model_dump(exclude_defaults=True)
        if "empty_lines" not in chosen:
            known["empty_lines"] = "skip"
        for key, value in {**_FILTERS, "max_length_ratio": longest}.items():
            if key not in chosen.get("filters", {}):
                known[f"filters.{key}"] = value
        defaults = {f"data.{key}": value for key, value in known.items()}
        changes = {key: value for key, value in defaults.items() if key not in given} | fixed
        written = [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in changes.items()]
        return load_recipe(self.recipe, [*written, *self.overrides])

    def _check_known(self, keys: set[str]) -> None:
        """Raises InputError if a shipped recipe would be used with its own languages or validation text."""
        if self.recipe not in shipped_recipes():
            return
        advice = {
            "data.source": "data.source=LANGUAGE",
            "data.target": "data.target=LANGUAGE",
            "data.valid": "--valid PREFIX",
        }
        missing = [words for key, words in advice.items() if key not in keys]
        if missing:
            raise InputError(
                f"the teacher does not say which text and languages it is for; give {' and '.join(missing)}"
            )
