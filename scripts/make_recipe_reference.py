"""Writes docs/recipes.md and docs/recipes/, the reference of every key of a recipe, from the schema.

Example: python -m scripts.make_recipe_reference
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from econmt.config.conditions import RULES
from econmt.config.recipe import OPS, Ops, Recipe, implementation_names
from econmt.config.yaml_reader import dump_yaml, members, section_kinds

DOCS = Path(__file__).resolve().parent.parent / "docs"
INTRODUCTION = """\
# Recipe keys

A recipe is one YAML file that describes a training run completely. This page and those of its sections are made
from the schema of recipes by `make reference`; a test keeps them up to date.

```console
econmt recipes list                                  # the shipped recipes
econmt recipes copy multi30k mine.yaml               # copies one, comments included
econmt recipes show mine.yaml                        # every key, with defaults
econmt recipes show mine.yaml --changed-only         # only what differs from the defaults
econmt recipes validate mine.yaml                    # errors, with file, line and key
econmt train mine.yaml training.batch.size=128       # changes a key for one run
```

- Unknown keys, wrong types, values out of range and keys given twice are errors. The message names the file, the line,
  the key and the nearest valid one; `econmt` then leaves with exit code 2.
- A value that has no effect beside the other keys gets a warning on standard error. It is an error if it would switch
  something on that the run then would not have.
- `key.sub=value` on the command line changes a key after the file is read. The value is YAML:
  `data.train=[a/one, a/two]`, `model.attention={type: dot}`, `training.max_updates=null`. The last one counts.
- YAML is read by the rules of version 1.2: only `true` and `false` are booleans (`no` is Norwegian), and `3e-4` is a
  number. Anchors, aliases and tags are not allowed.
- A recipe is named by its file or, if it is shipped, by its name alone.
- *required* keys have no default.
"""


def pages() -> dict[Path, str]:
    """Returns the overview and a page for each section of a recipe, by their paths."""
    texts: dict[str, str] = {}
    for kind, path in sections(Recipe):
        name = path.partition(".")[0]
        texts[name] = texts.get(name, f"# Recipe keys: `{name}`\n") + section_text(kind, path)
    overview = INTRODUCTION + texts.pop("").partition("\n")[2] + contents("recipes")
    return {DOCS / "recipes.md": overview} | {
        DOCS / "recipes" / f"{name}.md": text for name, text in texts.items()
    }


def contents(folder: str) -> str:
    """Returns the lines that put the pages of a folder below an overview in the site's menu."""
    return f"\n```{{toctree}}\n:hidden:\n:glob:\n\n{folder}/*\n```\n"


def write(texts: dict[Path, str]) -> None:
    """Writes pages."""
    for page, text in texts.items():
        page.parent.mkdir(exist_ok=True)
        page.write_text(text, encoding="utf-8")


def sections(kind: type[BaseModel], path: str = "") -> Iterator[tuple[type[BaseModel], str]]:
    """Yields every section of the schema with its dotted key, outermost first."""
    yield kind, path
    for name, field in kind.model_fields.items():
        for inner in section_kinds(field.annotation):
            yield from sections(inner, f"{path}.{name}" if path else name)


def section_text(kind: type[BaseModel], path: str) -> str:
    """Returns the part of a section: a heading, its description, and a table of its keys."""
    lines = ["", f"## {heading(kind, path)}", "", summary(kind), ""]
    lines += ["| key | value | default | meaning |", "|---|---|---|---|"]
    for name, field in kind.model_fields.items():
        meaning, key = plain(str(field.description)), f"{path}.{name}" if path else name
        if section_kinds(field.annotation):
            meaning = f"{meaning}: [its keys]({f'#{anchor(key)}' if path else f'recipes/{key}.md'})"
        rule = RULES.get(key)
        if rule is not None:
            meaning += f" (no effect without {rule.needs.text})"
        value = word_list(implementation_names(name)) if kind is Ops and name in OPS else value_text(field)
        cells = (f"`{name}`", value, default_text(field), meaning)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def heading(kind: type[BaseModel], path: str) -> str:
    """Returns a section's dotted key, with its types where the key may hold several kinds of sections."""
    if not path:
        return "The recipe"
    field = kind.model_fields.get("type")
    owner = siblings(path)
    types = f" with type {' or '.join(literals(field))}" if field is not None and len(owner) > 1 else ""
    return f"`{path}`{types}"


def siblings(path: str) -> list[type[BaseModel]]:
    """Returns the sections that a dotted key may hold."""
    return [kind for kind, its_path in sections(Recipe) if its_path == path]


def anchor(path: str) -> str:
    """Returns the link target that Markdown readers give to the heading of a section."""
    kind = siblings(path)[0]
    return "".join(c for c in heading(kind, path).lower().replace(" ", "-") if c.isalnum() or c in "-_")


def literals(field: FieldInfo) -> list[str]:
    """Returns the words that a field allows; none if it is no choice of words."""
    is_choice = get_origin(field.annotation) is Literal
    return [str(word) for word in get_args(field.annotation)] if is_choice else []


def summary(kind: type[BaseModel]) -> str:
    """Returns the first paragraph of a section's docstring."""
    return " ".join((kind.__doc__ or "").strip().split("\n\n")[0].split()).replace("``", "`")


def plain(text: str) -> str:
    """Returns text that Markdown shows as it is."""
    return text.replace("<", "&lt;").replace("*", "\\*")


NAMES = {int: "whole number", float: "number", str: "text", bool: "true or false"}
BOUNDS = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}


def value_text(field: FieldInfo) -> str:
    """Describes the values that a field may hold."""
    bounds = bounds_text(field.metadata)
    choices = [type_text(choice) for choice in members(field.annotation)]
    if NoneType in get_args(field.annotation):
        choices.append("null")
    return " or ".join(dict.fromkeys(choices)) + (f", {bounds}" if bounds else "")


def word_list(words: Iterable[str]) -> str:
    """Formats the words that a key may hold."""
    return ", ".join(f"`{word}`" for word in words)


def type_text(annotation: Any) -> str:
    """Describes a type in words."""
    if get_origin(annotation) is Annotated:
        inner, *metadata = get_args(annotation)
        bounds = bounds_text(part for item in metadata for part in getattr(item, "metadata", [item]))
        return type_text(inner) + (f", {bounds}" if bounds else "")
    if get_origin(annotation) is Literal:
        return word_list(get_args(annotation))
    if get_origin(annotation) is list:
        return f"list of {type_text(get_args(annotation)[0])}"
    if get_origin(annotation) is tuple:
        return f"list of {len(get_args(annotation))} {type_text(get_args(annotation)[0])}s"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "section"
    return NAMES[annotation]


def bounds_text(metadata: Any) -> str:
    """Describes the bounds of a number in words."""
    bounds = ((words, getattr(item, name, None)) for item in metadata for name, words in BOUNDS.items())
    given = ((words, bound) for words, bound in bounds if bound is not None)
    return " and ".join(
        f"{words} {bound:g}" if bound < 2**20 else f"{words} {bound}" for words, bound in given
    )


def default_text(field: FieldInfo) -> str:
    """Returns a key's default as YAML."""
    if field.is_required():
        return "*required*"
    if isinstance(field.default, BaseModel):
        return "its defaults"
    value = list(field.default) if isinstance(field.default, tuple) else field.default
    text = dump_yaml({"key": value}).removeprefix("key:").strip()
    return f"`[{', '.join(map(str, value))}]`" if isinstance(value, list) else f"`{text}`"


if __name__ == "__main__":
    write(pages())
