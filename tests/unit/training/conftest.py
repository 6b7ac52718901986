from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.training.tiny import Run, write_text


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    write_text(folder, {"train": 30, "valid": 6, "test": 4})
    return folder


@pytest.fixture
def make_run(text: Path, tmp_path: Path) -> Callable[..., Run]:
    def make(*overrides: str, name: str = "run") -> Run:
        return Run(text, tmp_path / name, overrides)

    return make
