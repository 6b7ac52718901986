"""No test measures time: a slow machine has the results of a fast one."""

from __future__ import annotations

from hypothesis import HealthCheck, settings


def test_drawn_examples_have_no_deadline() -> None:
    here = settings()
    assert here.deadline is None
    assert HealthCheck.too_slow in here.suppress_health_check
