"""A run in parts leaves the files of the run that never stopped, with every option that a run carries on."""

from __future__ import annotations

from pathlib import Path

import pytest

from econmt.model import layers
from tests.unit.training.conftest import UseRows
from tests.unit.training.tiny import Run, assert_parts_are_the_whole, snapshot, write_guides, write_text

OPTIONS = (
    "model.decoder={cell: gru, size: 8, layers: 2, context_gating: true}",
    "model.attention.coverage={type: gru, num_hidden: 2}",
    "model.layer_normalization=true",
    "model.dropout={embedding: 0.1, layers: 0.1}",
)
CHANGING = (
    "data.train=[{text}/train, {text}/valid]",
    "data.mixing={weights: [[3, 1], [0, 1]], epochs: [2], epoch_pairs: 13}",
    "data.noise={upper: 0.2, typos: 0.3, emoji: 0.2, markup: 0.2}",
    "data.tags=['', <BT>]",
    "training.bucket_width=null",
    "training.max_buckets=3",
)
NARROW = ("training.param_dtype=bfloat16", "training.precision=bfloat16")
WIDE = ("model.encoder.size=32", "model.decoder.size=32", "model.attention.size=32")
GUIDED = ("data.alignment=align", "data.weights=weights", "training.guided_alignment_weight=0.5")
BUDGET = "training.memory_budget=1GiB"

QUICK: dict[str, tuple[str, ...]] = {
    "plain": (),
    "moments of 8 bits and their mean": (
        *WIDE,
        "training.optimizer.name=adam8bit",
        "training.averaging.start=at-once",
    ),
    "decoder with every option, noam": (*OPTIONS, "training.schedule={name: noam, warmup: 3}"),
    "changing epochs": CHANGING,
    "guides and a budget": (*GUIDED, BUDGET),
    "adafactor in bfloat16": (*NARROW, "training.optimizer={name: adafactor, learning_rate: 0.02}"),
    "factors, words, momentum": (
        "model.encoder.rank=2",
        "model.decoder.rank=3",
        "training.batch={type: word, size: 24}",
        "training.update_interval=3",
        "training.optimizer={name: sgd, momentum: 0.9, learning_rate: 0.5}",
    ),
}
THOROUGH: dict[str, tuple[str, ...]] = {
    "a budget": (BUDGET,),
    "derived buckets": CHANGING[-2:],
    "nadam": ("training.optimizer.name=nadam",),
    "moving average": ("training.averaging={start: at-once, decay: 0.6}",),
    "tied, inverse-sqrt": (
        "model.weight_tying=trg_softmax",
        "training.schedule={name: inverse-sqrt, warmup: 3}",
    ),
    "bfloat16": ("training.precision=bfloat16",),
    "cosine": ("training.schedule={name: cosine, decay_updates: 7}",),
    "linear": ("training.schedule={name: linear, warmup: 2, decay_updates: 7}",),
    "lnlstm with every option": (*OPTIONS, "model.decoder.cell=lnlstm"),
    **{
        f"{name} in bfloat16": (*NARROW, f"training.optimizer.name={name}")
        for name in ("adam8bit", "adam", "sgd")
    },
}
CASES = [
    *(pytest.param(case, id=name) for name, case in QUICK.items()),
    *(pytest.param(case, id=name, marks=pytest.mark.thorough) for name, case in THOROUGH.items()),
]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_text(tmp_path_factory.mktemp("resumed"), {"train": 30, "valid": 6})
    write_guides(folder)
    return folder


@pytest.mark.parametrize("case", CASES)
def test_a_run_in_parts_is_the_run_that_never_stopped(
    text: Path, tmp_path: Path, use_rows: UseRows, monkeypatch: pytest.MonkeyPatch, case: tuple[str, ...]
) -> None:
    """Ends between checkpoints add rows of metrics, so that the parts end at checkpoints."""
    use_rows(3)
    if not case:
        monkeypatch.setattr(layers, "_FEW", 0)  # the gradients of embeddings are rows
    keys = (f"data.prepared={tmp_path}/prepared", *(each.replace("{text}", str(text)) for each in case))

    def make_run(*more: str, name: str) -> Run:
        return Run(text, tmp_path / name, (*keys, *more))

    whole = assert_parts_are_the_whole(make_run, ends=(2, 4, 6))
    if not case:
        # Dropout, the order of batches and the moments went on: another seed shows that they matter.
        other = make_run("training.max_updates=6", "training.seed=8", name="other").trained()
        assert snapshot(other.folder) != snapshot(whole.folder)
