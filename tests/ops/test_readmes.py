from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from econmt_ops.layers.op import OPS as LAYER_OPS

OPS = Path(__file__).parents[2] / "ops"
READMES = [OPS / "README.md", *sorted((OPS / "econmt_ops").rglob("README.md"))]


def test_every_op_has_one() -> None:
    folders = {path.parent.name for path in (OPS / "econmt_ops").glob("*/reference.py")}
    assert {path.parent.name for path in READMES} == {"ops", "cells", "modules", "linear", *folders}


def test_every_cell_has_its_equations() -> None:
    assert all("_{t-1}" in (op.__doc__ or "") or "`lstm`" in (op.__doc__ or "") for op in LAYER_OPS.values())


@pytest.mark.parametrize("readme", READMES, ids=lambda path: path.parent.name)
def test_examples_run(readme: Path) -> None:
    torch.manual_seed(0)
    examples = re.findall(
        r"^```python\n(.*?)^```", readme.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )
    assert examples
    for example in examples:
        exec(compile(example, str(readme), "exec"), {})
