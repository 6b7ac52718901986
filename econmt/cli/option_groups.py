"""Commands whose parameters may be groups of options, and options that follow the recipe's schema.

typer makes an option of each parameter of a function. A function decorated with :func:`with_option_groups` may also
have parameters whose type is a dataclass: each field becomes an option, and the function gets the object. The types of
options may contain ``Literal``, whose words become the choices, and bounds of pydantic's ``Field``.
:func:`recipe_option` and :class:`RecipeKeys` take bounds and help of options from the keys of a recipe.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum, EnumMeta
from types import NoneType
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import typer
from pydantic.fields import FieldInfo
from typer.models import OptionInfo

from econmt.config.recipe import Recipe
from econmt.config.yaml_reader import walk

Numbers = TypeVar("Numbers", bound=Union[float, Sequence[float], None])
RECIPE_FIELDS = {key: field for key, _, field in walk(Recipe)}
"""Fields of the recipe's schema by dotted key."""


class RecipeKeys(NamedTuple):
    """Mark of a dictionary parameter: it stands for an option for each of some keys, and holds those that are given.

    Attributes:
        section: dotted key of the section.
        names: keys in it.
        short: short names of options by key.
    """

    section: str
    names: Sequence[str]
    short: Mapping[str, str] = {}


def recipe_option(key: str, *names: str, help: str | None = None) -> Any:  # noqa: A002  typer's word
    """Returns a typer option that replaces a key of a recipe and has its bounds.

    Args:
        key: dotted key.
        names: names of the option, such as ``--beam-size`` and ``-b``; none: the name of the parameter.
        help: help text; None: the description of the key.
    """
    field = RECIPE_FIELDS[key]
    text = help or _sentence(key, str(field.description))
    option = typer.Option(*names, help=text, show_default="the recipe's")
    return _bounded(option, field.annotation, field.metadata)


def _sentence(key: str, description: str) -> str:
    """Returns the description of a key as a sentence in which other keys of its section are named as options."""
    section = key.rpartition(".")[0]

    def as_option(word: re.Match[str]) -> str:
        return f"--{word[0].replace('_', '-')}" if f"{section}.{word[0]}" in RECIPE_FIELDS else word[0]

    text = re.sub(r"(?<![\w.])[a-z]+(_[a-z]+)+", as_option, description)
    return f"{text[0].upper()}{text[1:]}."


def _within(least: float, most: float, *, above: bool = False) -> Callable[[Numbers], Numbers]:
    """Returns a typer callback that checks one or several floating-point numbers.

    typer's own bounds let infinity and not-a-number pass.

    Args:
        least: the smallest number allowed or, if ``above``, the largest that is too small.
        most: the largest number allowed.
        above: see ``least``.
    """

    def check(given: Numbers) -> Numbers:
        for value in given if isinstance(given, Sequence) else [given]:
            fits = value is None or (math.isfinite(value) and least <= value <= most)
            if not fits or (above and value == least):
                raise typer.BadParameter(
                    f"must be {'more than' if above else 'at least'} {least:g} and at most {most:g}, found {value}"
                )
        return given

    return check


def with_option_groups(function: Callable[..., Any]) -> Callable[..., None]:
    """Decorates a command; see the module's docstring."""
    parameters: list[inspect.Parameter] = []
    groups: dict[str, tuple[Callable[..., Any], list[str]]] = {}
    for name, parameter in inspect.signature(function, eval_str=True).parameters.items():
        hint = parameter.annotation
        keys = next((mark for mark in get_args(hint) if isinstance(mark, RecipeKeys)), None)
        if keys is None and not is_dataclass(hint):
            parameters.append(_parameter(name, hint, parameter.default))
            continue
        made = _of_dataclass(hint) if keys is None else _of_keys(keys)
        groups[name] = _given if keys else hint, [each.name for each in made]
        parameters += made

    def command(**values: Any) -> None:
        for name, value in values.items():
            values[name] = _without_enums(value)
        for name, (make, names) in groups.items():
            values[name] = make(**{each: values.pop(each) for each in names})
        function(**values)

    command.__name__, command.__doc__ = function.__name__, function.__doc__
    command.__annotations__ = {each.name: each.annotation for each in parameters}
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return command


def _of_dataclass(kind: Any) -> list[inspect.Parameter]:
    """Returns a parameter for each field that the constructor of a dataclass takes."""
    hints = get_type_hints(kind, include_extras=True)
    defaults = {each.name: each.default for each in fields(kind) if each.init}
    empty = inspect.Parameter.empty
    return [
        _parameter(name, hints[name], empty if value is MISSING else value)
        for name, value in defaults.items()
    ]


def _of_keys(keys: RecipeKeys) -> list[inspect.Parameter]:
    """Returns a parameter for each key, None where it is not given."""
    made = []
    for name in keys.names:
        key = f"{keys.section}.{name}"
        names = [f"--{name.replace('_', '-')}", keys.short[name]] if name in keys.short else []
        kind: Any = RECIPE_FIELDS[key].annotation
        made.append(_parameter(name, Annotated[kind | None, recipe_option(key, *names)], None))
    return made


def _given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _parameter(name: str, hint: Any, default: Any) -> inspect.Parameter:
    """Returns a parameter for typer, with an enumeration in place of ``Literal`` and bounds as typer has them."""
    kind, *marks = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    option = next((mark for mark in marks if isinstance(mark, OptionInfo)), None)
    if option is not None:
        marks = [_bounded(option, kind, marks)]
    kind = _with_enums(name, kind)
    if isinstance(kind, EnumMeta) and isinstance(default, str):
        default = kind(default)
    annotation = Annotated[(kind, *marks)] if marks else kind
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _bounded(option: Any, kind: Any, marks: Iterable[Any]) -> Any:
    """Returns a copy of a typer option with the bounds that are among the marks of an annotation."""
    option, bounds = copy(option), dict[str, Any]()
    for mark in marks:
        for each in mark.metadata if isinstance(mark, FieldInfo) else [mark]:
            bounds |= {name: getattr(each, name) for name in ("ge", "gt", "le") if hasattr(each, name)}
    if bounds and float in (kind, *get_args(kind)):
        above = "gt" in bounds
        option.callback = _within(bounds["gt" if above else "ge"], bounds["le"], above=above)
    elif bounds:
        option.min, option.max = bounds["ge"], bounds["le"]
    return option


def _with_enums(name: str, kind: Any) -> Any:
    """Returns a type with an enumeration in place of ``Literal``, which typer understands only since version 0.20."""
    if get_origin(kind) is Literal:
        return Enum(name, {str(word): word for word in get_args(kind)}, type=str)
    inner = [_with_enums(name, each) for each in get_args(kind)]
    if get_origin(kind) is list:
        return list[inner[0]]  # type: ignore[valid-type]
    return (inner[0] | None) if NoneType in inner else kind


def _without_enums(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_without_enums(each) for each in value]
    return value.value if isinstance(value, Enum) else value
