"""Migration of recipes that earlier versions wrote: renames old keys."""

from __future__ import annotations

from typing import Any


def rename_ops(ops: dict[str, Any], input_feeding: bool) -> list[tuple[str, list[str]]]:
    """Renames the keys of an older ``ops`` section in place; returns each old key with those that got its value.

    In older recipes ``lstm`` selected the implementation of the LSTM layers of the encoder and of a decoder without
    input feeding. ``attention`` selected that of a decoder with input feeding, which kept its gates if ``lstm`` was
    reference. The values are not checked.
    """
    renamed_keys = []
    if "lstm" in ops:
        value = ops.pop("lstm")
        keys = ["encoder"] if input_feeding else ["encoder", "decoder"]
        ops.update(dict.fromkeys(keys, value))
        if input_feeding and value == "reference":
            ops["stash"] = "gates"
        renamed_keys.append(("lstm", keys))
    value = ops.get("attention", "auto")
    names_implementation = isinstance(value, str) and value.isidentifier() and value != "auto"
    if input_feeding and names_implementation and ops.get("decoder", "auto") == "auto":
        ops["decoder"] = value
        renamed_keys.append(("attention", ["decoder"]))
    return renamed_keys


def rename(tree: dict[str, Any]) -> list[tuple[str, list[str]]]:
    """Applies :func:`rename_ops` to the data of a recipe that is not validated yet; returns dotted keys."""
    section: Any = tree
    for key in ("model", "decoder", "input_feeding"):
        section = section.get(key) if isinstance(section, dict) else None
    ops = tree.get("ops")
    renamed_keys = rename_ops(ops, section is not False) if isinstance(ops, dict) else []
    return [(f"ops.{old}", [f"ops.{key}" for key in new]) for old, new in renamed_keys]
