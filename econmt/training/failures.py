"""Messages for training that has to stop."""

from __future__ import annotations

import torch

from econmt.data.batching.batch import AnyBatch
from econmt.data.batching.token_store import TokenStore
from econmt.training.update_metrics import UpdateMetrics


def not_finite(metrics: UpdateMetrics, store: TokenStore, last_good: str) -> str:
    """Says that a loss or gradient is not finite, and for which lines.

    Args:
        metrics: of the update.
        store: the training text.
        last_good: which checkpoint is whole, in words.
    """
    what = "loss" if metrics.loss != metrics.loss or abs(metrics.loss) == float("inf") else "gradient"
    lines = [store.location(int(i)) for indices in metrics.indices for i in indices]
    shown = ", ".join(lines[:8]) + (f" and {len(lines) - 8} more" if len(lines) > 8 else "")
    return (
        f"the {what} is not finite at update {metrics.update}, pairs {shown}; {last_good}: lower "
        "training.optimizer.learning_rate or training.gradient_clipping.threshold"
    )


def out_of_memory(batch: AnyBatch, device: torch.device, last_good: str, *, planned: bool) -> str:
    """Says that there is no memory for a batch, and what to do.

    Args:
        batch: see above.
        device: whose memory is full.
        last_good: which checkpoint is whole, in words.
        planned: a plan has divided batches as far as it could.
    """
    advice = (
        "give training.memory_budget=auto, or lower training.batch.size and raise training.update_interval"
    )
    if planned:
        advice = "no budget can divide it further: lower data.max_length or the model's sizes"
    return f"no memory left on {device} for a batch of {batch.size_text}; {last_good}: {advice}"
