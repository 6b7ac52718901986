"""Source factors in the model: what the encoder reads, every gradient, and the search's own encoder."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from econmt.config.recipe import load_recipe
from econmt.engine.parameters import fix_parameters
from econmt.factored_ids import joined_ids
from econmt.model import Implementations, TranslationModel, translation
from econmt.model.inference.encoder import PrepackedEncoder
from econmt_ops import UniqueRows
from tests.unit.model.test_translation import EOS, PAD, VOCABULARY, make_batch, make_config

SIZES = (7, 5)
COMBINED = pytest.mark.parametrize("combine", ["concat", "sum"])


def factored(combine: str, **options: object) -> TranslationModel:
    widths = [6, 6] if combine == "sum" else [3, 1]
    more = {"source_factors_num_embed": widths, "source_factors_combine": combine, **options}
    torch.manual_seed(1)
    return TranslationModel(make_config(**more), VOCABULARY, VOCABULARY, factor_sizes=SIZES).double().eval()


def factored_batch() -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor]]:
    """As make_batch, with factors in the source, and the ids of words and factors."""
    words, lengths, target_input, target_output = make_batch()
    real = (words != PAD) & (words != EOS)
    factors = [torch.where(real, (words * step) % (size - 4) + 4, PAD) for step, size in ((3, 7), (2, 5))]
    source = joined_ids(words, factors, (VOCABULARY, *SIZES))
    return source, lengths, target_input, target_output, [words, *factors]


@COMBINED
def test_the_encoder_reads_words_and_factors(combine: str) -> None:
    model = factored(combine)
    source, lengths, _, _, parts = factored_batch()
    tables = [model.source_embedding.weight, *(table.weight for table in model.source_factor_embeddings)]
    vectors = [functional.embedding(ids, table) for ids, table in zip(parts, tables, strict=True)]
    read = torch.cat(vectors, -1) if combine == "concat" else vectors[0] + vectors[1] + vectors[2]
    assert model.config.source_width == read.shape[2] == (10 if combine == "concat" else 6)
    values, _ = model.encoder(read, lengths, Implementations.everywhere("reference"))
    assert torch.equal(model.embed_source(source), read)
    torch.testing.assert_close(model.encode(source, lengths).memory.values, values, rtol=1e-12, atol=1e-13)
    other = joined_ids(parts[0], [parts[1], parts[2].roll(1, 1)], (VOCABULARY, *SIZES))
    assert not torch.allclose(model.encode(other, lengths).memory.values, values)


@pytest.mark.parametrize("once", [False, True], ids=["written out", "once"])
@COMBINED
def test_gradients_of_all_tables_and_of_the_encoder(
    combine: str, once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against differences; words are written out or, those with the same factors, each multiplied once."""
    monkeypatch.setattr(translation, "ROWS", 1)
    monkeypatch.setattr(translation, "DISTINCT", float(once))
    model = factored(combine, encoder__layers=1, decoder__layers=1)
    batch = factored_batch()[:4]
    read = model._look_up(model.embed_source, model.source_size, batch[0], model.source_dropout, True)
    assert isinstance(read, UniqueRows) == once
    model.loss(*batch, implementations=Implementations.everywhere("recompute")).backward()
    weights = model.encoder.forward_layers[0].weights
    tables = model.source_embedding.weight, *(table.weight for table in model.source_factor_embeddings)
    for parameter in (*tables, weights.input):
        gradient = parameter.grad
        assert gradient.abs().max() > 0
        draw = torch.randn(parameter.shape, dtype=torch.float64)
        if parameter is not weights.input:
            draw[PAD] = 0.0
            assert gradient[PAD].abs().max() == 0.0
        with torch.no_grad():
            slope = loss_along(model, parameter, draw, batch, 1e-5) / 2e-5
        torch.testing.assert_close((gradient * draw).sum(), slope, rtol=1e-5, atol=1e-5)


def loss_along(
    model: TranslationModel, parameter: Tensor, draw: Tensor, batch: tuple[Tensor, ...], step: float
) -> Tensor:
    """How much more the loss is a step ahead along ``draw`` than a step behind."""
    found = []
    for ahead in (step, -step):
        parameter += ahead * draw
        hidden = model(*batch[:3])
        logits = functional.linear(hidden, model.output.weight, model.output.bias)
        given = logits.flatten(0, 1), batch[3].flatten()
        found.append(functional.cross_entropy(*given, ignore_index=PAD, reduction="sum"))
        parameter -= ahead * draw
    return found[0] - found[1]


@COMBINED
def test_the_encoder_of_a_search_gives_what_the_model_gives(combine: str) -> None:
    model = factored(combine).float()
    source, lengths, _, _, _ = factored_batch()
    with torch.no_grad():
        expected = model.encode(source, lengths)
        found = PrepackedEncoder(model, torch.float32)(source, lengths)
    torch.testing.assert_close(found.memory.values, expected.memory.values)
    torch.testing.assert_close(found.summary, expected.summary)


def test_dropout_is_of_words_and_factors_together() -> None:
    """As in Sockeye: after they are combined, so that a sum is dropped or kept as one."""
    model = factored("sum", dropout={"embedding": 0.5}).train()
    source, _, _, _, _ = factored_batch()
    found = model._look_up(model.embed_source, model.source_size, source, model.source_dropout, False)
    assert isinstance(found, Tensor)
    whole = model.embed_source(source)
    kept = found != 0
    assert 0 < int(kept.sum()) < int((whole != 0).sum())
    torch.testing.assert_close(found[kept], 2 * whole[kept])


def test_layers_and_what_is_fixed_and_tables_of_factors_are_initialized() -> None:
    model = factored("concat")
    names = [name for name in model.parameter_layers() if name.startswith("source_factor")]
    assert len(names) == 2
    assert {model.parameter_layers()[name] for name in names} == {"embedding"}
    fixed = r"training.fixed_param_names=['(source_.*|encoder)\..*']"
    fix_parameters(model, load_recipe("quickstart", [fixed]).training)
    learnt = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert not [name for name in learnt if name.startswith(("source_", "encoder."))]
    assert "target_embedding.weight" in learnt
    tables = factored("concat", initialization={"weights": "uniform", "scale": 1e-6}).source_factor_embeddings
    for table in tables:
        assert 0.0 < float(table.weight.detach().abs().max()) <= 1e-6
