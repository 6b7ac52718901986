"""The recompute implementation of additive attention, with its steps compiled by torch.compile."""

from __future__ import annotations

import functools
from dataclasses import replace

from econmt_ops.additive_attention import recompute

TRAITS = replace(recompute.TRAITS, warms_up=True, fake_implementation="recompute")

additive_attention = functools.partial(recompute.additive_attention, backend="compiled")
