"""What older recipes say, under the keys of today."""

from __future__ import annotations

from typing import Any


def rename_ops(ops: dict[str, Any], input_feeding: bool) -> list[tuple[str, list[str]]]:
    """Puts what older recipes say in their section ``ops`` under the keys of today; the values are not checked.

    There ``lstm`` named the LSTM layers of the encoder and of a decoder without input feeding; a decoder with input
    feeding was named by ``attention``, and kept its gates where ``lstm`` was reference.

    Args:
        ops: the section, which is changed.
        input_feeding: whether the decoder has it.

    Returns:
        The old keys that were found, each with the new ones that have its value.
    """
    moved = []
    if "lstm" in ops:
        value = ops.pop("lstm")
        keys = ["encoder"] if input_feeding else ["encoder", "decoder"]
        ops.update(dict.fromkeys(keys, value))
        if input_feeding and value == "reference":
            ops["stash"] = "gates"
        moved.append(("lstm", keys))
    value = ops.get("attention", "auto")
    named = isinstance(value, str) and value.isidentifier() and value != "auto"
    if input_feeding and named and ops.get("decoder", "auto") == "auto":
        ops["decoder"] = value
        moved.append(("attention", ["decoder"]))
    return moved


def rename(tree: dict[str, Any]) -> list[tuple[str, list[str]]]:
    """:func:`rename_ops` for a whole recipe that is not checked yet, with dotted keys."""
    section: Any = tree
    for key in ("model", "decoder", "input_feeding"):
        section = section.get(key) if isinstance(section, dict) else None
    ops = tree.get("ops")
    moved = rename_ops(ops, section is not False) if isinstance(ops, dict) else []
    return [(f"ops.{old}", [f"ops.{key}" for key in new]) for old, new in moved]
