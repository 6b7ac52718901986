"""The translation model: every combination of options, against properties that any of them must have."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from econmt.config import recipe
from econmt.model import Implementations, IncrementalModel, TranslationModel
from econmt_ops import linear_cross_entropy

VOCABULARY = 13
PAD, BOS, EOS = 0, 2, 3


def make_config(**options: object) -> recipe.Model:
    """A tiny model section; keys with a dot reach into sections."""
    mapping: dict[str, dict[str, object] | object] = {
        "embedding": 6,
        "encoder": {"layers": 2, "size": 8},
        "decoder": {"layers": 2, "size": 8},
        "attention": {"size": 5},
    }
    for key, value in options.items():
        section, _, name = key.partition("__")
        if name:
            part = mapping.setdefault(section, {})
            assert isinstance(part, dict)
            part[name] = value
        else:
            mapping[section] = value
    return recipe.Model.model_validate(mapping)


def make_model(config: recipe.Model, seed: int = 1) -> TranslationModel:
    torch.manual_seed(seed)
    return TranslationModel(config, VOCABULARY, VOCABULARY).double().eval()


def make_batch() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Three pairs of unlike lengths, padded: source, source lengths, target input, target output."""
    source = torch.tensor([[4, 5, 6, 7, EOS], [8, EOS, PAD, PAD, PAD], [9, 10, 11, EOS, PAD]])
    target = torch.tensor([[4, 9, 7, EOS], [12, EOS, PAD, PAD], [5, 5, EOS, PAD]])
    start = torch.full((3, 1), BOS)
    shifted = torch.where(target == EOS, PAD, target)[:, :-1]
    return source, torch.tensor([5, 2, 4]), torch.cat([start, shifted], dim=1), target


ATTENTIONS = ("additive", "dot", "scaled_dot", "bilinear")
OTHERS = (True, False), ("none", "bottom", "all"), (False, True), ("last", "avg", "zero")
CORE = list(itertools.product(ATTENTIONS, *OTHERS))
TYING = ("none", "src_trg", "trg_softmax", "src_trg_softmax")


def core_config(index: int) -> recipe.Model:
    """Combination ``index`` of the options that change the computation; the others take turns."""
    attention, feeding, bidirectional, residual, state_init = CORE[index]
    return make_config(
        attention__type=attention,
        attention__layer_norm=attention == "additive" and index % 2 == 0,
        decoder__input_feeding=feeding,
        decoder__residual=residual,
        decoder__state_init=state_init,
        decoder__layers=1 + (index // 2) % 3,
        encoder__layers=1 + (index // 3) % 3,
        encoder__bidirectional=bidirectional,
        encoder__residual=residual,
        encoder__reverse_input=index % 5 == 0,
        weight_tying=TYING[index % 4],
        initialization__weights=("xavier", "uniform")[index % 2],
        initialization__scale=0.5,
        initialization__forget_bias=float(index % 3),
        dropout={"embedding": 0.2, "layers": 0.3, "output": 0.1, "variational": index % 2 == 0},
    )


def sum_of_losses(model: TranslationModel) -> Tensor:
    source, lengths, target_input, target_output = make_batch()
    hidden = model(source, lengths, target_input)
    arguments = hidden.flatten(0, 1), model.output.weight, target_output.flatten()
    return linear_cross_entropy(*arguments, bias=model.output.bias, ignore_index=PAD, reduction="sum")


def log_probabilities(model: TranslationModel, hidden: Tensor) -> Tensor:
    return torch.log_softmax(hidden @ model.output.weight.T + model.output.bias, dim=-1)


def check_rows_and_steps(model: TranslationModel) -> tuple[Tensor, Any]:
    """Rows do not see each other or padding, and steps equal teacher forcing.

    Returns:
        The log-probabilities of teacher forcing, and the last state of the steps.
    """
    source, lengths, target_input, target_output = make_batch()
    together = model(source, lengths, target_input)
    for row, (begin, end) in enumerate(zip(lengths, (target_output != PAD).sum(1), strict=True)):
        only = slice(row, row + 1)
        alone = model(source[only, :begin], lengths[only], target_input[only, :end])
        torch.testing.assert_close(together[only, :end], alone, rtol=1e-10, atol=1e-12)

    expected = log_probabilities(model, together)
    steps = IncrementalModel(model)
    state = steps.encode(source, lengths)
    for step in range(target_input.shape[1]):
        found, attention, state = steps.step(target_input[:, step], state)
        torch.testing.assert_close(found, expected[:, step], rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(attention.sum(1), torch.ones(3, dtype=torch.float64))
        assert attention[1, 2:].abs().max() == 0.0, "attention past the end of a source sentence"
    return expected.detach(), state


@pytest.mark.sampled(18)
@pytest.mark.parametrize("index", range(len(CORE)), ids=lambda index: "-".join(map(str, CORE[index])))
def test_every_combination(index: int) -> None:
    """Rows do not see each other or padding, steps equal teacher forcing, every parameter gets a gradient."""
    model = make_model(core_config(index))
    check_rows_and_steps(model)
    model.train()
    torch.manual_seed(7)
    first = sum_of_losses(model)
    first.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, f"{name} got no gradient"
        assert torch.isfinite(parameter.grad).all(), name
        assert parameter.grad.abs().max() > 0.0, f"the gradient of {name} is zero"
    torch.manual_seed(7)
    assert sum_of_losses(model) == first, "the same random state must drop the same units"
    assert sum_of_losses(model) != first, "dropout is not active in training mode"


def test_every_tying_and_width_of_one_vocabulary() -> None:
    """Tied matrices are one storage, the readout appears where widths differ, and the names count each once."""
    for tying, width in itertools.product(TYING, (6, 8)):
        model = make_model(make_config(weight_tying=tying, embedding=width))
        source, target = model.source_embedding.weight, model.target_embedding.weight
        assert (source.data_ptr() == target.data_ptr()) == (tying in ("src_trg", "src_trg_softmax"))
        assert (model.output.weight.data_ptr() == target.data_ptr()) == tying.endswith("softmax")
        assert (model.readout is not None) == (tying.endswith("softmax") and width == 6)
        assert set(model.parameter_layers()) == {name for name, _ in model.named_parameters()}
    with pytest.raises(ValueError, match="13 source and 14 target"):
        TranslationModel(make_config(weight_tying="src_trg"), 13, 14)


def test_parallel_decoder_against_the_equations() -> None:
    """GNMT style: the upper layer reads [h_bottom ; context], the residual adds h_bottom."""
    config = make_config(decoder__input_feeding=False, decoder__residual=True, decoder__state_init="zero")
    model = make_model(config)
    source, lengths, target_input, _ = make_batch()
    memory = model.encode(source, lengths).memory
    embedded = model.target_embedding(target_input)

    def run(layer: int, inputs: Tensor) -> Tensor:
        module = model.decoder.layers[layer]
        reference = torch.nn.LSTM(inputs.shape[-1], 8, batch_first=True).double()
        reference.weight_ih_l0.data.copy_(module.input)
        reference.weight_hh_l0.data.copy_(module.hidden)
        reference.bias_ih_l0.data.copy_(module.bias)
        torch.nn.init.zeros_(reference.bias_hh_l0)
        return reference(inputs)[0]

    bottom = run(0, embedded)
    context, _ = model.decoder.attention(
        bottom, memory.keys, memory.values, memory.lengths, Implementations()
    )
    top = run(1, torch.cat([bottom, context], dim=-1)) + bottom
    expected = torch.tanh(model.decoder.combine(torch.cat([top, context], dim=-1)))
    torch.testing.assert_close(model(source, lengths, target_input), expected, rtol=1e-9, atol=1e-11)


def test_encoder_residual_adds_each_upper_input() -> None:
    """A residual stack over a bidirectional bottom adds from the second layer on."""
    plain = make_model(make_config(encoder__layers=2))
    residual = make_model(make_config(encoder__layers=2, encoder__residual=True))
    bottom = make_model(make_config(encoder__layers=1))
    source, lengths, _, _ = make_batch()
    bottom.load_state_dict(
        {name: value for name, value in plain.state_dict().items() if not name.startswith("encoder.upper")}
    )
    residual.load_state_dict(plain.state_dict())
    below = bottom.encode(source, lengths).memory.values
    difference = residual.encode(source, lengths).memory.values - plain.encode(source, lengths).memory.values
    torch.testing.assert_close(difference, below, rtol=1e-9, atol=1e-11)


def test_reverse_input_reads_from_the_end() -> None:
    config = make_config(encoder__bidirectional="none", encoder__reverse_input=True)
    backwards = make_model(config)
    forwards = make_model(make_config(encoder__bidirectional="none"))
    forwards.load_state_dict(backwards.state_dict())
    ids, flipped = torch.tensor([[4, 5, 6]]), torch.tensor([[6, 5, 4]])
    length = torch.tensor([3])
    torch.testing.assert_close(
        backwards.encode(ids, length).memory.values, forwards.encode(flipped, length).memory.values.flip(1)
    )
