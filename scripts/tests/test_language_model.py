"""Contenders of the benchmark of language models."""

from __future__ import annotations

import torch

from scripts.bench import language_model


def test_contenders_of_the_bench_compute_the_same() -> None:
    """The step loop and torch.nn.LSTM with the same weights have one loss, and leave one state."""
    sizes = language_model.Sizes(30, 6, 2)
    loop = language_model._Stepwise(6, 2)
    library = torch.nn.LSTM(6, 6, 2, batch_first=True)
    with torch.no_grad():
        for number in range(2):
            getattr(library, f"weight_ih_l{number}").copy_(loop.inputs[number].weight)
            getattr(library, f"weight_hh_l{number}").copy_(loop.states[number].weight)
            getattr(library, f"bias_ih_l{number}").copy_(loop.inputs[number].bias)
            getattr(library, f"bias_hh_l{number}").zero_()
    models = [language_model._Plain(sizes, layers) for layers in (loop, library)]
    models[1].embedding, models[1].output = models[0].embedding, models[0].output
    inputs, targets = torch.randint(30, (2, 2, 4))
    h, c = torch.randn(2, 2, 2, 6)
    for found, wanted in zip(*(model(inputs, targets, h, c) for model in models), strict=True):
        torch.testing.assert_close(found, wanted)
