"""Loading of YAML into a validated pydantic model, with errors that name file, line and key.

:func:`load_section` works for any pydantic model that forbids unknown keys. YAML is read by the rules of version 1.2
(only ``true`` and ``false`` are booleans, so ``no`` is Norwegian; ``3e-4`` is a number). Duplicate keys, aliases and
tags that would create objects are errors.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, BeforeValidator, Tag, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from econmt.config import limits
from econmt.config.suggestions import meant_keys
from econmt.errors import InputError, printable, talk

SectionType = TypeVar("SectionType", bound=BaseModel)
Path = tuple[Union[str, int], ...]
Locations = dict[Path, str]

_SCALARS = {
    "tag:yaml.org,2002:null": (r"~|null|Null|NULL|", "~nN"),
    "tag:yaml.org,2002:bool": (r"true|True|TRUE|false|False|FALSE", "tTfF"),
    "tag:yaml.org,2002:int": (r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789"),
    "tag:yaml.org,2002:float": (
        r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        "-+.0123456789",
    ),
}
_DIGITS = 100
"""Maximum number of characters of an integer."""
_TAGS = {*_SCALARS, *(f"tag:yaml.org,2002:{name}" for name in ("str", "seq", "map"))}


class _Reader(yaml.SafeLoader):
    """Safe loader with the scalars of YAML 1.2 and without aliases, which can expand a short text without bound."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Returns the next node; raises an error if it is an alias."""
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()  # type: ignore[no-untyped-call]
            raise yaml.composer.ComposerError(None, None, "aliases are not allowed", event.start_mark)
        return super().compose_node(parent, index)


class _Writer(yaml.SafeDumper):
    """Safe dumper that quotes all texts which :class:`_Reader` would not read back as text."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:  # noqa: ARG002
        """Indents lists inside mappings too."""
        super().increase_indent(flow, False)


def _integer(_: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    bases = {"0o": 8, "0x": 16}
    if len(node.value) > _DIGITS:
        raise ValueError(f"a number of {len(node.value):,} characters; give at most {_DIGITS}")
    return int(node.value, bases.get(node.value[:2], 10))


_Reader.yaml_implicit_resolvers = {}
_Writer.yaml_implicit_resolvers = {}
for _tag, (_pattern, _first) in _SCALARS.items():
    for _kind in (_Reader, _Writer):
        _kind.add_implicit_resolver(_tag, re.compile(f"^(?:{_pattern})$"), list(_first))
        if _tag.endswith("null"):
            _kind.add_implicit_resolver(_tag, re.compile("^$"), [""])
_Reader.add_constructor("tag:yaml.org,2002:int", _integer)


def dump_yaml(value: Any) -> str:
    """Returns plain data as YAML, keys in their given order; :func:`load_section` reads it back unchanged."""
    return yaml.dump(
        value, Dumper=_Writer, sort_keys=False, allow_unicode=True, default_flow_style=False, width=10**6
    )


MOST_ERRORS = 50
"""Maximum number of errors listed for one text."""

MISPLACED: Literal["misplaced"] = "misplaced"
"""Type of the errors of values that do not fit others, whose context has their ``key``, dotted."""


def load_section(
    kind: type[SectionType],
    text: str,
    where: str,
    overrides: Sequence[str] = (),
    *,
    remove: Callable[[dict[str, Any]], Mapping[str, str]] = lambda _: {},
    notes: Callable[[SectionType], Iterable[tuple[str, str]]] = lambda _: (),
    context: object = None,
) -> SectionType:
    """Reads YAML text, applies ``key.sub=value`` overrides and validates the result.

    Args:
        kind: pydantic model to create.
        text: YAML text, a mapping at the top level.
        where: name of the text in errors, usually its file.
        overrides: command-line arguments, applied in order; values are read as YAML.
        remove: function that removes keys of earlier versions in place; returns those that it refuses, with the reason.
        notes: function that yields dotted keys of a valid section with notes, which are printed on standard error.
        context: context of the section's validators.

    Raises:
        InputError: if anything is wrong, with one line for each mistake that names its location and key.
    """
    tree, locations = _read(text, where)
    if not isinstance(tree, dict):
        actual = "the file is empty" if tree is None else f"found {_describe(tree)} at the top"
        raise InputError(f"{where}:1: expected keys and values ({', '.join(kind.model_fields)}), {actual}")
    for argument in overrides:
        _override(tree, locations, argument)
    if removed := remove(tree):
        raise InputError(
            *(
                f"{_location_of(tuple(key.split('.')), locations)}: {key} {why}"
                for key, why in removed.items()
            )
        )
    try:
        section = kind.model_validate(tree, context=context)
    except ValidationError as failure:
        errors = failure.errors(include_url=False)
        lines = [_explain(kind, error, locations) for error in errors[:MOST_ERRORS]]
        rest = [f"{where}: and {len(errors) - MOST_ERRORS:,} more"] if len(errors) > MOST_ERRORS else []
        raise InputError(*dict.fromkeys(lines), *rest) from None
    for key, text in notes(section):
        talk(printable(f"note: {_location_of(tuple(key.split('.')), locations)}: {text}"))
    return section


def check_section(kind: type[SectionType], tree: Any, where: str, advice: str) -> SectionType:
    """Validates machine-written data, such as a JSON file of a run, against ``kind``.

    Raises InputError, one line with ``where``, the first wrong key and ``advice``, if it is invalid.
    """
    try:
        return kind.model_validate(tree)
    except ValidationError as failure:
        explanation = _explain(kind, failure.errors(include_url=False)[0], {(): where})
        raise InputError(f"{explanation}; {advice}") from None


def complaints(failure: ValidationError) -> list[str]:
    """Returns a line for each error that pydantic has found, with the name of the field and what is expected."""
    lines = []
    for error in failure.errors(include_url=False):
        name = dotted([shortened(part) if isinstance(part, str) else part for part in error["loc"]])
        lines.append(": ".join(filter(None, (name, _complaint(error, error.get("ctx", {}))))))
    return lines


def _read(text: str, where: str) -> tuple[Any, Locations]:
    """Parses YAML; returns its plain data and, for every path into it, the location that errors name."""
    locations: Locations = {(): f"{where}:1"}
    text = text.removeprefix("\ufeff")
    try:
        reader = _Reader(text)
        node = reader.get_single_node()
        return (None if node is None else _plain(reader, node, (), locations, where)), locations
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = " ".join(str(error.problem or error.context).split())
        raise InputError(f"{where}:{mark.line + 1 if mark else 1}: not valid YAML: {problem}") from None
    except yaml.reader.ReaderError as error:
        line = text[: error.position].count("\n") + 1
        raise InputError(
            f"{where}:{line}: not valid YAML: the character U+{error.character:04X} is not allowed"
        ) from None
    except RecursionError:
        raise InputError(f"{where}:1: not valid YAML: nested too deeply") from None
    except (ValueError, OverflowError) as error:  # from escapes that are not valid characters
        raise InputError(f"{where}:1: not valid YAML: {error}") from None


def _plain(reader: _Reader, node: yaml.Node, path: Path, locations: Locations, where: str) -> Any:
    line = node.start_mark.line + 1
    if path not in locations:
        locations[path] = f"{where}:{line}"
    if node.tag not in _TAGS:
        raise InputError(f"{where}:{line}: {dotted(path)}: the tag {node.tag} is not allowed in a recipe")
    if isinstance(node, yaml.SequenceNode):
        return [_plain(reader, item, (*path, i), locations, where) for i, item in enumerate(node.value)]
    if isinstance(node, yaml.MappingNode):
        mapping: dict[str, Any] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                raise InputError(f"{where}:{line}: a key must be a word, not a list or a section")
            key = str(key_node.value)
            inner = (*path, key)
            _check_text(key, f"{where}:{line}: a key")
            if key in mapping:
                raise InputError(f"{where}:{line}: {dotted(inner)}: given twice; first at {locations[inner]}")
            locations[inner] = f"{where}:{line}"
            mapping[key] = _plain(reader, value_node, inner, locations, where)
        return mapping
    location = ": ".join(filter(None, (f"{where}:{line}", dotted(path))))
    # An explicit tag may not fit the value.
    if node.tag in _SCALARS and not re.fullmatch(_SCALARS[node.tag][0], node.value):
        name = node.tag.rpartition(":")[2]
        raise InputError(
            f"{location}: {shortened(node.value)!r} is not a valid {name}; remove the tag !!{name}"
        )
    try:
        value = reader.construct_object(node)
    except ValueError as error:  # an integer with too many digits
        raise InputError(f"{location}: {error}") from None
    if isinstance(value, str):
        _check_text(value, location)
    return value


def _check_text(text: str, location: str) -> None:
    """Checks that a text is not too long and has no control characters, which file names and messages cannot hold."""
    if len(text) > limits.TEXT:
        raise InputError(f"{location}: text of {len(text):,} characters; at most {limits.TEXT:,} are allowed")
    for character in text:
        if printable(character) != character:
            raise InputError(f"{location}: the character U+{ord(character):04X} is not allowed in a recipe")


def _override(tree: dict[str, Any], locations: Locations, argument: str) -> None:
    """Applies ``key.sub=value`` to ``tree``; records the argument as the location of that key for errors."""
    where = f"override {argument if len(argument) <= 200 else argument[:197] + '...'!r}"
    key, equals, text = argument.partition("=")
    names = key.split(".")
    if not equals or not all(names):
        raise InputError(f"{where}: expected key=value, for example training.batch.size=32")
    value, inner_locations = _read(text, where)
    section = tree
    for depth, name in enumerate(names[:-1], start=1):
        path = tuple(names[:depth])
        inner = section.get(name)
        if inner is None:
            inner = section[name] = {}
            locations[path] = where
        if not isinstance(inner, dict):
            raise InputError(
                f"{where}: {dotted(path)} is {_describe(inner)} in {locations[path]}, not a section; replace it with "
                f"{dotted(path)}={{{'.'.join(names[depth:])}: ...}}"
            )
        section = inner
    section[names[-1]] = value
    target_path: Path = tuple(names)
    for old in [old for old in locations if old[: len(target_path)] == target_path]:
        del locations[old]
    for inner_path in inner_locations:
        locations[(*target_path, *inner_path)] = where


def dotted(path: Sequence[str | int]) -> str:
    """Returns a path in dotted notation, such as ``data.train[0]``."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def members(annotation: Any) -> tuple[Any, ...]:
    """Returns the members of a union without None (tagged ones as Annotated), or a tuple of the type itself."""
    if get_origin(annotation) in (Union, UnionType):
        return tuple(member for member in get_args(annotation) if member is not type(None))
    return (annotation,)


def section_kinds(annotation: Any) -> list[type[BaseModel]]:
    """Returns the pydantic models that a type annotation allows, without duplicates."""
    bare = [get_args(m)[0] if get_origin(m) is Annotated else m for m in members(annotation)]
    return list(dict.fromkeys(m for m in bare if isinstance(m, type(BaseModel))))


def _locate(kind: type[BaseModel], location: Sequence[str | int]) -> tuple[Path, list[type[BaseModel]]]:
    """Converts pydantic's error location to a path without union tags; also returns the models owning its last key."""
    path: list[str | int] = []
    current: Any = kind
    owners: list[type[BaseModel]] = [kind]
    for part in location:
        choices = members(current)
        if len(choices) > 1:
            current = next((get_args(c)[0] for c in choices if Tag(str(part)) in get_args(c)[1:]), None)
            continue
        (current,) = choices
        if get_origin(current) is Annotated:
            current = get_args(current)[0]
        path.append(part)
        if isinstance(current, type(BaseModel)):
            owners = [current]
            field = current.model_fields.get(str(part))
            current = field.annotation if field is not None else None
        else:
            current = (*get_args(current), None)[0]
    return tuple(path), owners


def _location_of(path: Path, locations: Locations) -> str:
    """Returns the location of a path, or of the innermost enclosing section that has one."""
    return next(locations[path[:depth]] for depth in range(len(path), -1, -1) if path[:depth] in locations)


def _explain(kind: type[BaseModel], error: ErrorDetails, locations: Locations) -> str:
    """Formats one of pydantic's errors as one line."""
    path, owners = _locate(kind, error["loc"])
    context = error.get("ctx", {})
    if error["type"] == MISPLACED:
        return f"{_location_of(tuple(context['key'].split('.')), locations)}: {error['msg']}"
    if error["type"] == "union_tag_invalid":
        path = (*path, "type")
        error = {**error, "type": "literal_error", "input": context["tag"]}
        context = {"expected": context["expected_tags"]}
    location = _location_of(path, locations)
    where = f"{location}: {dotted(path)}" if path else location
    if error["type"] == "missing":
        field = owners[0].model_fields.get(str(path[-1]))
        what = "" if field is None or field.description is None else f"; {field.description}"
        return f"{where}: missing{what}"
    if error["type"] == "extra_forbidden":
        return f"{where}: unknown key; {_advice(kind, path, owners)}"
    return f"{where}: {_complaint(error, context)}"


def _advice(kind: type[BaseModel], path: Path, owners: list[type[BaseModel]]) -> str:
    """Returns a suggestion for an unknown key."""
    valid = [name for owner in owners for name in owner.model_fields]
    wrong = dotted(path)
    meant = meant_keys(wrong.split("."), dict.fromkeys(key for key, _, _ in walk(kind) if key != wrong))
    if meant:
        return f"did you mean {' or '.join(meant)}?"
    return f"valid keys {'in ' + dotted(path[:-1]) if path[:-1] else 'here'}: {', '.join(valid)}"


def walk(kind: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, type[BaseModel], FieldInfo]]:
    """Yields every key below a section in order: dotted key, owning model, field."""
    for name, field in kind.model_fields.items():
        yield prefix + name, kind, field
        for inner in section_kinds(field.annotation):
            yield from walk(inner, f"{prefix}{name}.")


def leaves(
    section: BaseModel, prefix: str = "", *, changed_only: bool = False
) -> Iterator[tuple[str, object]]:
    """Yields dotted key and value of everything below a section, or, if ``changed_only``, of what is not default."""
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            yield from leaves(value, f"{prefix}{name}.", changed_only=changed_only)
        elif not changed_only or field.is_required() or value != field.get_default(call_default_factory=True):
            yield prefix + name, value


def plain_text(value: object) -> str:
    """Formats a value for messages, with null, true and false as in YAML."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


_UNITS = {
    unit: factor
    for power, letter in enumerate("kMGT", start=1)
    for unit, factor in ((f"{letter}B".lower(), 1000**power), (f"{letter}iB".lower(), 1024**power))
}


def parse_size(text: str) -> int:
    """Converts a size such as 4GiB, 512 MiB, 1.5GB or a plain number to bytes; raises ValueError for other text."""
    match = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]{1,18})?) *([A-Za-z]*)", text.strip())
    unit = "" if match is None else match[2].lower()
    factor = {"": 1, "b": 1, **_UNITS}.get(unit)
    size = 0 if match is None or factor is None else int(float(match[1]) * factor)
    if size < 1:
        raise ValueError(
            f"expected a size like 4GiB, 512MiB, 2GB or a number of bytes, found {shortened(text)!r}"
        )
    return size


def _check_size(value: Any) -> Any:
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if isinstance(value, str) and value != "auto":
        parse_size(value)
    return value


SizeOrAuto = Annotated[str, BeforeValidator(_check_size)]
"""Type of a key that holds auto or a size for :func:`parse_size`."""

_EXPECTED = {
    "string_type": "text",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "list_type": "a list",
    "tuple_type": "a list",
    "model_type": "a section (keys and values)",
    "model_attributes_type": "a section (keys and values)",
}
_BOUNDS = {
    "greater_than_equal": ("at least", "ge"),
    "greater_than": ("more than", "gt"),
    "less_than_equal": ("at most", "le"),
    "less_than": ("less than", "lt"),
}


def _complaint(error: ErrorDetails, context: dict[str, Any]) -> str:
    """Formats what one of pydantic's errors expected and what it found."""
    name, found_text = error["type"], _describe(error["input"])
    if name in _EXPECTED:
        return f"expected {_EXPECTED[name]}, found {found_text}"
    if name in _BOUNDS:
        words, key = _BOUNDS[name]
        return f"must be {words} {context[key]}, found {found_text}"
    if name == "literal_error":
        choices = re.findall(r"'([^']*)'", str(context["expected"]))
        near = difflib.get_close_matches(str(error["input"]), choices, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        return f"must be one of {', '.join(choices)}, found {found_text}{hint}"
    if name == "value_error":
        return str(context["error"])
    if name == "missing":
        return "missing"
    if name in ("unexpected_keyword_argument", "extra_forbidden"):
        return "unknown option"
    if name in ("too_short", "string_too_short"):
        return f"must not be empty, found {found_text}"
    return f"{error['msg'][0].lower()}{error['msg'][1:]}, found {found_text}"


def _describe(value: Any) -> str:
    """Describes a value as it appears in the file."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f"the text {shortened(value)!r}"
    if isinstance(value, dict):
        return "a section"
    if isinstance(value, list):
        return "a list" if value else "an empty list"
    if isinstance(value, int) and abs(value) >= 10**40:
        return "a whole number of more than 40 digits"
    return shortened(str(value))


def shortened(text: str, most: int = 40) -> str:
    """Returns a text cut to at most ``most`` characters, for messages."""
    return text if len(text) <= most else text[: most - 3] + "..."
