"""The compared toolkits, by the names that ``--only`` takes, in the order of the table."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from ..toolkit import Toolkit
from .econmt import Econmt
from .fairseq import Fairseq
from .joeynmt import JoeyNMT
from .opennmt import OpenNMT
from .plain import Plain

TOOLKITS: dict[str, Callable[[], Toolkit]] = {
    "econmt": Econmt, "econmt-float32": partial(Econmt, "float32"), "econmt-bfloat16": partial(Econmt, "bfloat16"),
    "plain": Plain, "plain-bfloat16": partial(Plain, "bfloat16"), "fairseq": Fairseq, "opennmt": OpenNMT,
    "joeynmt": JoeyNMT,
}  # fmt: skip
