from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.parallel.group import Group
from tests.unit.training import tiny, tiny_text


@pytest.fixture(scope="session")
def group() -> Iterator[Group]:
    made = Group()
    yield made
    made.close()


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_text(tmp_path_factory.mktemp("text"), {"train": 30, "valid": 6, "test": 4})


@pytest.fixture(scope="session")
def lines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_text.write_lines(tmp_path_factory.mktemp("lines"), {"train": 60, "valid": 8, "test": 6})
