"""Tests of extras that are not installed are skipped; what is missing besides stays an error."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from tests.conftest import run_python
from tests.extras import optional_packages

# As if two packages of extras were not there.
_RUN = """
import sys
sys.modules["starlette"] = sys.modules["pyarrow"] = None
import pytest
sys.exit(pytest.main(["-p", "tests.extras", "-p", "no:cacheprovider", "-ra", "--import-mode=importlib", sys.argv[1]]))
"""


@pytest.mark.slow
def test_modules_and_folders_of_missing_extras_are_skipped(tmp_path: Path) -> None:
    for name, text in {
        "test_plain.py": "def test_one(): pass",
        "test_served.py": "import starlette.applications\ndef test_two(): pass",
        "tables/conftest.py": "from pyarrow import parquet",
        "tables/test_tables.py": "def test_three(): pass",
        "test_typing.py": "import no_such_package\ndef test_four(): pass",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    run = partial(run_python, "-c", _RUN, tmp_path, cwd=tmp_path, check=False)
    shown = run().stdout
    assert "2 skipped, 1 error" in shown
    assert "test_served.py:1: starlette is not installed" in shown
    assert "tables:1: pyarrow is not installed" in shown
    assert "No module named 'no_such_package'" in shown
    (tmp_path / "test_typing.py").unlink()
    assert "1 passed, 2 skipped" in run().stdout


def test_every_extra_is_known() -> None:
    needed = {
        *("starlette", "uvicorn", "prometheus_client", "pyarrow"),
        *("huggingface_hub", "triton", "playwright"),
    }
    assert needed <= optional_packages()
    assert not optional_packages() & {"econmt", "torch", "numpy"}
