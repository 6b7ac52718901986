"""GRU as `recompute`, with the pointwise work of a step compiled; see `econmt_ops.backends.compiled`."""

from __future__ import annotations

import functools
from dataclasses import replace

from econmt_ops.gru import recompute

TRAITS = replace(recompute.TRAITS, warms_up=True, fake_implementation="recompute")

gru = functools.partial(recompute.gru, backend="compiled")
