"""The ledger: the bytes of one training step, by category and by layer, measured.

Feature maps are counted as autograd saves them, through saved-tensor hooks: a storage that several operations keep
counts once, for the layer that saved it first, and parameters never count as feature maps.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from econmt.model import TranslationModel
from econmt_ops.accounting import current_layer

LAYERS = ("embedding", "encoder", "attention", "decoder", "output", "loss", "other")
CATEGORIES = ("feature maps", "weights", "gradients", "optimizer state")


@dataclass
class Ledger:
    """Bytes of one training step.

    Attributes:
        entries: bytes by (category, layer); absent means none.
        tokens: target tokens of the step that was measured.
    """

    entries: dict[tuple[str, str], int] = field(default_factory=lambda: defaultdict(int))
    tokens: int = 0

    def category(self, category: str) -> int:
        """Bytes of one category over all layers."""
        return sum(size for (kind, _), size in self.entries.items() if kind == category)

    def layer(self, layer: str) -> int:
        """Bytes of one layer over all categories."""
        return sum(size for (_, name), size in self.entries.items() if name == layer)

    @property
    def total(self) -> int:
        """Bytes of the whole step."""
        return sum(self.entries.values())


def measure_step(
    model: TranslationModel, loss: Callable[[], Tensor], optimizer: torch.optim.Optimizer, tokens: int
) -> Ledger:
    """Run one forward and backward pass and account for what it keeps.

    The parameters, the optimizer and the random states are left as they were; gradients are left cleared.

    Args:
        model: the model whose parameters ``loss`` uses.
        loss: computes the scalar training loss of one batch.
        optimizer: its state is counted as it stands (empty before the first update).
        tokens: target tokens of that batch, for the ledger's record.
    """
    ledger = Ledger(tokens=tokens)
    layers = model.parameter_layers()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    seen: set[int] = set()
    # Held so that no storage is freed and its address given to another while counting.
    held: list[Tensor] = []

    def save(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address not in own and address not in seen and storage.nbytes():
            seen.add(address)
            held.append(tensor.detach())
            ledger.entries["feature maps", current_layer()] += storage.nbytes()
        return tensor

    devices = {parameter.device for parameter in model.parameters() if parameter.device.type == "cuda"}
    optimizer.zero_grad(set_to_none=True)
    with torch.random.fork_rng(devices=[device.index for device in devices]):
        with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
            value = loss()
        torch.autograd.backward(value)
    for parameter in model.parameters():
        layer = layers[names[id(parameter)]]
        ledger.entries["weights", layer] += parameter.nbytes
        if parameter.grad is not None:
            ledger.entries["gradients", layer] += parameter.grad.nbytes
        for part in optimizer.state.get(parameter, {}).values():
            if isinstance(part, Tensor):
                ledger.entries["optimizer state", layer] += part.nbytes
    optimizer.zero_grad(set_to_none=True)
    return ledger
