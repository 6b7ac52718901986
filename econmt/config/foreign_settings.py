"""Configurations of other toolkits, read setting by setting, and the recipe that is made of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath
from typing import Any, NamedTuple

from econmt.config.yaml_reader import dotted
from econmt.errors import InputError

_NEUTRAL: tuple[Any, ...] = (None, False, "", "none", "None", -1, [], {})
"""Values by which other toolkits switch a setting off; such settings need no counterpart."""


class Remark(NamedTuple):
    """Setting of another toolkit that a recipe cannot hold as it is: its key, and what became of it."""

    key: str
    text: str


class ForeignSettings:
    """Settings of another toolkit's configuration, by dotted key, and the keys of the recipe that is made of them.

    Attributes:
        recipe: values of the recipe by dotted key. remarks: settings that the recipe cannot hold as they are.
    """

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.where = where
        self._values: dict[str, Any] = dict(_leaves(values, ()))
        self.recipe: dict[str, Any] = {}
        self.remarks: list[Remark] = []

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def take(self, *keys: str, default: Any = None) -> Any:
        """Returns the value of the first of several names of a setting that has one, and marks all as read."""
        found = [self._values.pop(key) for key in keys if key in self._values]
        return next((value for value in found if value is not None), default)

    def text(self, *keys: str, default: str | None = None) -> str | None:
        """Returns a setting as text; None if it is switched off."""
        value = self.take(*keys, default=default)
        return None if value in _NEUTRAL else str(value)

    def number(self, *keys: str, default: Any = None) -> Any:
        """Returns a setting that is a number, or the first of a list of numbers; raises InputError for others."""
        value = self.take(*keys, default=default)
        first = value[0] if isinstance(value, list) and value else value
        if isinstance(value, list) and len(value) > 1 and len(set(map(str, value))) > 1:
            self.remark(keys[0], f"{value}: only the first value is used; a recipe has one for the whole run")
        return None if first is None else self.checked(keys[0], first)

    def pair(self, key: str, default: float) -> list[Any]:
        """Returns a setting of source and target, or of encoder and decoder: two numbers, or one for both."""
        value = self.take(key, default=default)
        values = value if isinstance(value, list) and len(value) == 2 else [value, value]
        return [self.checked(key, default if each is None else each) for each in values]

    def checked(self, key: str, value: Any) -> Any:
        """Returns the value of a setting that is a number; raises InputError for others."""
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise InputError(f"{self.where}: {key}: expected a number, found {value!r}")
        return value

    def choose(self, key: str, known: Mapping[str, Any], default: str) -> Any:
        """Returns what the value of a setting is called here; a value without counterpart is remarked."""
        value = str(self.take(key, default=default))
        if value not in known:
            self.remark(key, f"{value} has no counterpart; {default} is used instead")
        return known.get(value, known[default])

    def share_words(self) -> bool:
        """Makes vocabularies of words one for both languages; returns False if lists or widths of embeddings differ."""
        lists = self.recipe.get("data.subwords.lists", [])
        widths = {self.recipe.get(f"model.{side}_embedding") for side in ("source", "target")}
        if len(set(lists)) > 1 or len(widths) > 1:
            return False
        self.keep("data.subwords.joint", True)
        self.keep("data.subwords.lists", lists[:1] or None)
        sizes = [self.recipe.pop(f"data.subwords.{side}", None) for side in ("source", "target")]
        self.keep("data.subwords.source", max(filter(None, sizes), default=None))
        return True

    def keep(self, key: str, value: Any) -> None:
        """Sets a key of the recipe, unless the value is None."""
        if value is not None:
            self.recipe[key] = value

    def remark(self, key: str, text: str) -> None:
        """Adds a remark about a setting."""
        self.remarks.append(Remark(key, text))

    def finish(self, irrelevant: frozenset[str]) -> None:
        """Remarks all settings that were not read, except ``irrelevant`` ones and those that are switched off."""
        for key, value in self._values.items():
            if key not in irrelevant and not any(value is off or value == off for off in _NEUTRAL):
                self.remark(key, f"{value} has no counterpart")

    def nested(self) -> dict[str, Any]:
        """Returns the recipe as sections."""
        sections: dict[str, Any] = {}
        for key, value in self.recipe.items():
            *path, name = key.split(".")
            inner = sections
            for part in path:
                inner = inner.setdefault(part, {})
            inner[name] = value
        return sections


def _leaves(values: Mapping[str, Any], path: tuple[str, ...]) -> list[tuple[str, Any]]:
    found = []
    for name, value in values.items():
        inner = (*path, name)
        found += _leaves(value, inner) if isinstance(value, dict) and value else [(dotted(inner), value)]
    return found


def common_prefix(source: str, target: str) -> tuple[str, str, str] | None:
    """Returns prefix and suffixes of two files PREFIX.SOURCE and PREFIX.TARGET; None if they are not named so."""
    paths = [PurePath(name.removesuffix(".gz")) for name in (source, target)]
    prefixes, suffixes = [str(path.with_suffix("")) for path in paths], [path.suffix[1:] for path in paths]
    if prefixes[0] != prefixes[1] or not all(suffixes) or suffixes[0] == suffixes[1]:
        return None
    return prefixes[0], suffixes[0], suffixes[1]


def tying(embeddings: bool, output: bool) -> str:
    """Returns the value of ``model.weight_tying`` for shared embeddings, and a shared output layer."""
    return {(False, False): "none", (True, False): "src_trg", (False, True): "trg_softmax"}.get(
        (embeddings, output), "src_trg_softmax"
    )
