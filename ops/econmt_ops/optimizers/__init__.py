"""Optimizers whose updates are one pass over memory, loss scaling, and updates during the backward pass."""

from __future__ import annotations

from econmt_ops.optimizers.eight_bit import EightBitOptimizer
from econmt_ops.optimizers.fused import FusedOptimizer
from econmt_ops.optimizers.in_backward import BackwardUpdates
from econmt_ops.optimizers.loss_scale import LossScale

__all__ = ["BackwardUpdates", "EightBitOptimizer", "FusedOptimizer", "LossScale"]
