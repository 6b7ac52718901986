from __future__ import annotations

import json
import math

import pytest
import torch

from econmt.checkpoint.state import COLUMNS, Meter, TrainingState, random_states, restore_random_states
from econmt.errors import InputError


def row(**values: float) -> dict[str, float]:
    return {**dict.fromkeys(COLUMNS, 0), **values}


def state() -> TrainingState:
    return TrainingState(
        update=12,
        seconds=0.1 + 0.2,
        target_tokens=345,
        data={"epoch": 1, "position": 3, "batches_per_epoch": 4},
        random=random_states(),
        schedule={"name": "constant", "factor": 1 / 3, "num_not_improved": 0},
        best_update=10,
        best_score=math.pi,
        num_not_improved=1,
        last_checkpoint=12,
        parameters_from=10,
        signature="nrefs:1",
        vocabulary="abc",
        text="def",
        since_checkpoint=Meter(1 / 7, 5, 2.5),
        since_log=Meter(1e-300, 1, 0.0),
        metrics=[row(update=10, valid_perplexity=math.inf), row(update=12, train_loss=0.1)],
    )


def test_every_value_comes_back_from_json_with_the_same_bits() -> None:
    before = state()
    after = TrainingState.from_json(before.to_json(), "state.json")
    assert after == before
    assert after.to_json() == before.to_json()


def without(field: str) -> str:
    values = json.loads(state().to_json())
    del values[field]
    return json.dumps(values)


def test_text_that_is_no_state_is_refused_with_the_file() -> None:
    fields = "random", "since_log", "metrics", "num_not_improved"
    none = ("", "{", "[]", "null", without("format"))
    later = state().to_json().replace("econmt-training-state-1", "econmt-training-state-9")
    for text, problem in (
        *((without(field), rf"broken training state \({field}: missing\)") for field in fields),
        *((text, "(broken|not a training state)") for text in none),
        ('{"format": "econmt-training-state-1", "since_checkpoint": 3}', "broken"),
        (later, "not a training state of this"),
    ):
        with pytest.raises(InputError, match=rf"^state\.json: {problem}"):
            TrainingState.from_json(text, "state.json")


def test_a_value_that_no_run_has_saved_is_named() -> None:
    for path, value, words in (
        (("metrics", 0), {}, "metrics"),
        (("metrics",), {}, "metrics"),
        (("metrics", 1, "update"), "12", "metrics"),
        (("update",), "12", "update"),
        (("update",), 11, "update 11: less than that of a checkpoint"),
        (("best_update",), 7, "best_update 7: no such checkpoint"),
        (("seconds",), math.nan, "seconds"),
        (("data",), [], "data"),
        (("data", "position"), 4, "data"),
        (("random",), {}, "random: empty"),
        (("random", "torch"), "AAAA", "torch is not a state of its generator"),
        (("random", "torch"), "ä", "torch is not a state of its generator"),
        (("schedule", "factor"), "x", "schedule"),
        (("since_log",), [], "since_log"),
        (("since_log",), {"loss": 0.0, "tokens": -1, "seconds": 0.0}, "tokens"),
        (("choices",), {"device": "cpu", "decoder": "nosuch"}, "decoder 'nosuch' is not one of"),
        (("plan",), {"budget": 1}, "plan"),
        (("precision",), "float8", "precision"),
        (("unheard",), 1, "unheard"),
    ):
        values = json.loads(state().to_json())
        inner = values
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = value
        with pytest.raises(InputError, match=r"^state\.json: broken training state") as caught:
            TrainingState.from_json(json.dumps(values), "state.json")
        assert words in str(caught.value)
        assert len(str(caught.value).splitlines()) == 1


def test_metrics_have_the_promised_columns_first_and_read_back_exactly() -> None:
    figures = {"train_loss": 0.1 + 0.2, "bleu": 100 / 3, "target_tokens_per_second": 12.345}
    values = row(update=10, seconds=1.23456, target_tokens=99, **figures)
    text = TrainingState(metrics=[values]).metrics_text()
    header, line, end = text.split("\n")
    assert end == ""
    names = (
        "update seconds target_tokens train_loss valid_perplexity bleu learning_rate target_tokens_per_second"
    )
    assert header.split("\t")[:9] == [*names.split(), "peak_memory_bytes"]
    found = dict(zip(header.split("\t"), line.split("\t"), strict=True))
    assert (found["update"], found["seconds"], found["target_tokens_per_second"]) == ("10", "1.235", "12.3")
    assert float(found["train_loss"]) == 0.1 + 0.2
    assert float(found["bleu"]) == 100 / 3


def test_random_states_bring_back_the_generator() -> None:
    torch.manual_seed(5)
    states = json.loads(json.dumps(random_states()))
    first = torch.rand(3).tolist()
    assert torch.rand(3).tolist() != first
    restore_random_states(states)
    assert torch.rand(3).tolist() == first


def test_states_of_gpus_that_are_not_there_are_left_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    states, restored = random_states(), list[int]()
    states["cuda"] = [states["torch"]] * 3
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda _, index: restored.append(index))
    restore_random_states(states)
    assert restored == [0, 1]
