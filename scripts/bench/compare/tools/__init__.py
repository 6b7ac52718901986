"""The compared toolkits, by the names that ``--only`` takes, in the order of the table."""

from __future__ import annotations

from ..toolkit import Toolkit
from .econmt import Econmt, EconmtBfloat16, EconmtFloat32
from .fairseq import Fairseq
from .joeynmt import JoeyNMT
from .opennmt import OpenNMT
from .plain import Plain, PlainBfloat16

TOOLKITS: dict[str, type[Toolkit]] = {
    "econmt": Econmt, "econmt-float32": EconmtFloat32, "econmt-bfloat16": EconmtBfloat16, "plain": Plain,
    "plain-bfloat16": PlainBfloat16, "fairseq": Fairseq, "opennmt": OpenNMT, "joeynmt": JoeyNMT,
}  # fmt: skip
