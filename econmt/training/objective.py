"""What training minimises: the cross-entropy of the target tokens."""

from __future__ import annotations

from torch import Tensor

from econmt.data.batches import Batch
from econmt.data.subwords import PAD
from econmt.model import TranslationModel


def loss_of_batch(model: TranslationModel, batch: Batch, label_smoothing: float) -> tuple[Tensor, Tensor]:
    """Cross-entropy summed over the batch's target tokens, end of sentence counted and padding not.

    The sum, not the mean: whoever accumulates several batches divides by the target tokens of all of them, so that
    the size of one batch makes no difference to the update.

    Args:
        model: the model, in training or evaluation mode.
        batch: B sentence pairs on the model's device.
        label_smoothing: probability mass spread evenly over all V target tokens.

    Returns:
        The loss, a float32 scalar in nats, and the number of target tokens, an int64 scalar, both on the model's
        device: nothing here waits for it.
    """
    loss = model.loss(
        batch.source, batch.source_lengths, batch.target_input, batch.target_output, label_smoothing
    )
    tokens = (batch.target_output != PAD).sum()
    return loss, tokens
