from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from econmt_ops.cells.table import LAYER_OPS

OPS = Path(__file__).parents[2] / "ops"
READMES = sorted(OPS.rglob("README.md"))


def test_every_op_has_one() -> None:
    folders = {path.parent.name for path in (OPS / "econmt_ops").glob("*/reference.py")}
    assert {path.parent.name for path in READMES} == {"ops", "cells", *folders}
    cells = (OPS / "econmt_ops" / "cells" / "README.md").read_text(encoding="utf-8")
    assert all(f"`{name}`" in cells for name in LAYER_OPS)


@pytest.mark.parametrize("readme", READMES, ids=lambda path: path.parent.name)
def test_examples_run(readme: Path) -> None:
    torch.manual_seed(0)
    examples = re.findall(
        r"^```python\n(.*?)^```", readme.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )
    assert examples
    for example in examples:
        exec(compile(example, str(readme), "exec"), {})


@pytest.mark.parametrize("readme", READMES, ids=lambda path: path.parent.name)
def test_links_lead_somewhere(readme: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", readme.read_text(encoding="utf-8")):
        assert (readme.parent / target).exists(), target
