"""Error messages of failures that stop training."""

from __future__ import annotations

import torch

from econmt.data.batching.batch import AnyBatch
from econmt.data.batching.token_store import TokenStore
from econmt.training.update_metrics import UpdateMetrics


def not_finite(metrics: UpdateMetrics, store: TokenStore, last_good: str) -> str:
    """Describes a loss or gradient that is not finite, and the lines of its text."""
    quantity = "loss" if metrics.loss != metrics.loss or abs(metrics.loss) == float("inf") else "gradient"
    lines = [store.location(int(i)) for indices in metrics.indices for i in indices]
    shown = ", ".join(lines[:8]) + (f" and {len(lines) - 8} more" if len(lines) > 8 else "")
    wider = (
        ""
        if metrics.loss_scale is None
        else ", or compute in training.precision=float32, which has a wider range"
    )
    return (
        f"the {quantity} is not finite at update {metrics.update}, pairs {shown}; {last_good}; lower "
        f"training.optimizer.learning_rate or training.gradient_clipping.threshold{wider}"
    )


def out_of_memory(batch: AnyBatch, device: torch.device, last_good: str, *, planned: bool) -> str:
    """Describes a batch that memory does not suffice for, and the remedy.

    ``planned``: a memory plan has already split batches as far as possible.
    """
    advice = (
        "set training.memory_budget=auto, or lower training.batch.size and raise training.update_interval"
    )
    if planned:
        advice = "it cannot be split further: lower data.max_length or the model's sizes"
    return f"out of memory on {device} for a batch of {batch.size_text}; {last_good}; {advice}"
