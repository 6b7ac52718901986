"""The ledger counts what it says: every storage once, under the layer and category it belongs to."""

from __future__ import annotations

import pytest
import torch
from rich.console import Console
from torch import Tensor

from econmt import recipe
from econmt.memory.ledger import CATEGORIES, LAYERS, Ledger, measure_step
from econmt.memory.report import format_bytes, table
from econmt.model import TranslationModel
from econmt_ops.accounting import current_layer, layer


@pytest.fixture
def model() -> TranslationModel:
    torch.manual_seed(1)
    config = recipe.Model.model_validate(
        {
            "embedding": 6,
            "encoder": {"layers": 1, "size": 8},
            "decoder": {"layers": 1, "size": 8},
            "attention": {"size": 5},
        }
    )
    return TranslationModel(config, 11, 11)


def test_feature_maps_by_layer(model: TranslationModel) -> None:
    """A computation whose saved tensors are known: an exponential saves its output, a product its factors."""
    source = torch.randn(10, 11)

    def loss() -> Tensor:
        with layer("encoder"):
            hidden = (
                source @ model.output_weight
            ).exp()  # keeps source (as it is no parameter) and the output
        with layer("output"):
            squared = hidden * hidden  # keeps hidden, which is counted already
            return squared.exp().sum()  # keeps its output

    ledger = measure_step(model, loss, torch.optim.SGD(model.parameters(), lr=0.1), tokens=10)
    feature_maps = {name: ledger.entries.get(("feature maps", name), 0) for name in LAYERS}
    assert feature_maps["encoder"] == source.nbytes + 10 * 8 * 4
    assert feature_maps["output"] == 10 * 8 * 4
    assert ledger.category("feature maps") == sum(feature_maps.values())


def test_parameters_gradients_and_optimizer_state(model: TranslationModel) -> None:
    ids, lengths = torch.tensor([[4, 5, 3], [6, 3, 0]]), torch.tensor([3, 2])

    def loss() -> Tensor:
        return (model(ids, lengths, ids) @ model.output_weight.T + model.output_bias).exp().sum()

    optimizer = torch.optim.Adam(model.parameters())
    loss().backward()
    optimizer.step()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random_state = torch.get_rng_state()
    ledger = measure_step(model, loss, optimizer, tokens=5)
    size = sum(parameter.nbytes for parameter in model.parameters())
    assert ledger.category("weights") == size
    assert ledger.category("gradients") == size
    steps = 4 * len(list(model.parameters()))  # Adam counts its steps in one float a parameter
    assert ledger.category("optimizer state") == 2 * size + steps
    assert ledger.entries["weights", "embedding"] == 2 * 11 * 6 * 4
    assert ledger.entries["weights", "output"] == (11 * 8 + 11) * 4
    assert ledger.total == sum(ledger.category(category) for category in CATEGORIES)
    assert ledger.total == sum(ledger.layer(name) for name in LAYERS)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert torch.equal(random_state, torch.get_rng_state())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_layer_scopes_nest() -> None:
    assert current_layer() == "other"
    with layer("decoder"), layer("attention"):
        assert current_layer() == "attention"
    with pytest.raises(RuntimeError, match="inside"), layer("decoder"):
        raise RuntimeError("inside")
    assert current_layer() == "other"


def test_report_prints_every_figure() -> None:
    ledger = Ledger(tokens=7)
    ledger.entries["feature maps", "attention"] = 3_000_000
    ledger.entries["weights", "attention"] = 1_000_000
    console = Console(width=120)
    with console.capture() as capture:
        console.print(table(ledger))
    text = capture.get()
    assert "7 target tokens" in text
    assert "3.0 MB" in text
    assert "4.0 MB" in text
    assert "100 %" in text
    assert [format_bytes(size) for size in (999, 1000, 2_500_000, 9_117_000_000)] == [
        "999 B",
        "1.0 kB",
        "2.5 MB",
        "9.12 GB",
    ]
