"""Declaration of a command's arguments and options, alone and in groups.

A command is a function whose parameters have :func:`option`, :func:`argument` or :func:`recipe_option` as default. The
type of a parameter may also be a dataclass with such fields: each field becomes an option, and the function gets the
object. A class variable ``heading`` of the dataclass is the heading of its options in the command's help. Types may
contain ``Literal``, whose words become the choices, and pydantic's ``Field`` with bounds. :func:`with_option_groups`
makes a function for typer of a command.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from enum import Enum, EnumMeta
from types import NoneType
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

import typer
import typer.core
from pydantic.fields import FieldInfo
from typer.models import ParameterInfo

from econmt.config.recipe import Recipe
from econmt.config.yaml_reader import walk
from econmt.decoding.search.options import SearchOptions
from econmt.options.option_rules import refuse_options

Numbers = TypeVar("Numbers", bound=Union[float, Sequence[float], None])
RECIPE_FIELDS = {key: field for key, _, field in walk(Recipe)}
"""Fields of the recipe's schema by dotted key."""
FIELDS = {f"decoding.{name}": field for name, field in SearchOptions.model_fields.items()} | RECIPE_FIELDS
"""Fields of the options that derive from a schema: the recipe's, and options of searches that are no keys of it."""


def option(default: Any, *names: str, **settings: Any) -> Any:
    """Declares an option.

    Args:
        default: default value; ``...`` if the option is required.
        names: names of the option; none: that of the parameter, with dashes.
        settings: ``help`` and other settings of :func:`typer.Option`.
    """
    return _declared(default, typer.Option(*names, **settings))


def argument(default: Any, **settings: Any) -> Any:
    """Declares an argument; see :func:`option`."""
    return _declared(default, typer.Argument(**settings))


def recipe_option(key: str, *names: str, help: str | None = None) -> Any:  # noqa: A002  typer's word
    """Declares an option that replaces a dotted key of a recipe; it has its bounds and, without ``help``, its text.

    Options of searches that recipes lack are named as keys of the section ``decoding``.
    """
    field = FIELDS[key]
    text = help or _sentence(key, str(field.description))
    default: bool | str = "the recipe's"
    if key not in RECIPE_FIELDS:
        default = str(field.default) if field.default else False
        if field.annotation is bool:  # else typer adds an option --no-...
            names = names or (f"--{key.rpartition('.')[2].replace('_', '-')}",)
    info = typer.Option(*names, help=text, show_default=default)
    return _declared(None, _bounded(info, field.annotation, field.metadata))


def _declared(default: Any, info: Any) -> Any:
    return dataclasses.field(
        default=dataclasses.MISSING if default is ... else default, metadata={"typer": info}
    )


class RecipeKeys(NamedTuple):
    """Mark of a dictionary parameter: it stands for an option for each of some keys, and holds those that are given.

    Attributes:
        section: dotted key of the section.
        names: keys in it.
        short: short names of options by key.
        heading: heading of the options in the command's help.
    """

    section: str
    names: Sequence[str]
    short: Mapping[str, str] = {}
    heading: str | None = None


class GroupedCommand(typer.core.TyperCommand):
    """Command whose options are checked together, and whose help shows a group's options under its heading."""

    def invoke(self, ctx: Any) -> Any:
        """Runs the command, unless :func:`refuse_options` refuses its options."""
        refuse_options(ctx, str(ctx.info_name))
        return super().invoke(ctx)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Writes arguments, groups in the order of the command, and all other options."""
        sections: dict[str, list[Any]] = {"Arguments": []}
        others: list[Any] = []
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None and parameter.param_type_name == "argument":
                sections["Arguments"].append(record)
            elif record is not None:
                heading = getattr(parameter, "rich_help_panel", None)
                (others if heading is None else sections.setdefault(heading, [])).append(record)
        for heading, records in {**sections, "Options": others}.items():
            if records:
                with formatter.section(heading):
                    formatter.write_dl(records)


def _sentence(key: str, description: str) -> str:
    """Returns the description of a key as a sentence in which other keys of its section are named as options."""
    section = key.rpartition(".")[0]

    def as_option(word: re.Match[str]) -> str:
        return f"--{word[0].replace('_', '-')}" if f"{section}.{word[0]}" in FIELDS else word[0]

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

    def check(values: Numbers) -> Numbers:
        for value in values if isinstance(values, Sequence) else [values]:
            fits = value is None or (math.isfinite(value) and least <= value <= most)
            if not fits or (above and value == least):
                raise typer.BadParameter(
                    f"must be {'more than' if above else 'at least'} {least:g} and at most {most:g}, found {value}"
                )
        return values

    return check


def with_option_groups(function: Callable[..., Any]) -> Callable[..., None]:
    """Makes a function for typer of a command; see the module's docstring."""
    parameters: list[inspect.Parameter] = []
    groups: dict[str, tuple[Callable[..., Any], list[str]]] = {}
    for name, parameter in inspect.signature(function, eval_str=True).parameters.items():
        hint = parameter.annotation
        keys = next((mark for mark in get_args(hint) if isinstance(mark, RecipeKeys)), None)
        if keys is None and not dataclasses.is_dataclass(hint):
            parameters.append(_parameter(name, hint, parameter.default))
            continue
        made = _of_dataclass(hint) if keys is None else _of_keys(keys)
        groups[name] = _given if keys else hint, [each.name for each in made]
        heading = getattr(hint, "heading", None) if keys is None else keys.heading
        for each in made:
            info = next(mark for mark in get_args(each.annotation) if isinstance(mark, ParameterInfo))
            info.rich_help_panel = heading
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
    return [_parameter(each.name, hints[each.name], each) for each in dataclasses.fields(kind) if each.init]


def _of_keys(keys: RecipeKeys) -> list[inspect.Parameter]:
    """Returns a parameter for each key, None where it is not given."""
    made = []
    for name in keys.names:
        key = f"{keys.section}.{name}"
        names = [f"--{name.replace('_', '-')}", keys.short[name]] if name in keys.short else []
        kind: Any = FIELDS[key].annotation
        made.append(_parameter(name, kind | None, recipe_option(key, *names)))
    return made


def _given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _parameter(name: str, hint: Any, default: Any) -> inspect.Parameter:
    """Returns a parameter for typer, with an enumeration in place of ``Literal`` and bounds as typer has them.

    ``hint`` is its type, with typer's description in it or not, ``default`` its default value, or its declaration.
    """
    kind, *marks = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    info = next((mark for mark in marks if isinstance(mark, ParameterInfo)), None)
    if isinstance(default, dataclasses.Field):
        info = default.metadata.get("typer", info)
        default = inspect.Parameter.empty if default.default is dataclasses.MISSING else default.default
    if info is not None:
        info = _bounded(info, kind, marks)
        if kind is bool and info.default is ...:  # else typer adds an option --no-...
            info.default = f"--{name.replace('_', '-')}"
    kind = _with_enums(name, kind)
    if isinstance(kind, EnumMeta) and isinstance(default, str):
        default = kind(default)
    annotation = kind if info is None else Annotated[kind, info]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _bounded(info: Any, kind: Any, marks: Iterable[Any]) -> Any:
    """Returns a copy of typer's description of an option, with the bounds that an annotation has."""
    info, bounds = copy(info), dict[str, Any]()
    for mark in marks:
        for each in mark.metadata if isinstance(mark, FieldInfo) else [mark]:
            bounds |= {name: getattr(each, name) for name in ("ge", "gt", "le") if hasattr(each, name)}
    if bounds and float in (kind, *get_args(kind)):
        above = "gt" in bounds
        info.callback = _within(bounds["gt" if above else "ge"], bounds["le"], above=above)
    elif bounds:
        info.min, info.max = bounds["ge"], bounds["le"]
    return info


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
