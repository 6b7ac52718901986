from __future__ import annotations

from typing import Any

import pytest

from econmt import memory
from tests.unit.memory.account.unchanged import Fingerprints


@pytest.fixture(autouse=True)
def _predictions_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compares all that is reachable before and after each prediction of these tests."""
    predict = memory.predict

    def checked(*args: Any, **settings: Any) -> memory.Account:
        before = Fingerprints(*args)
        try:
            return predict(*args, **settings)
        finally:
            assert before.differences(Fingerprints(*args)) == []

    monkeypatch.setattr(memory, "predict", checked)
