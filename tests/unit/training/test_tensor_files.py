from __future__ import annotations

import json
import math
import os
import pickle
import stat
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import safetensors.torch
import torch

from econmt.checkpoint.state import COLUMNS, Meter, TrainingState, random_states, restore_random_states
from econmt.checkpoint.tensor_files import (
    check_tensors,
    quantized,
    read_metadata,
    read_tensors,
    write_tensors,
    write_text,
)
from econmt.errors import InputError
from tests.unit.engine.toy import assert_same_bits

METADATA = {"format": "econmt-1", "update": "3", "zeta": "z", "alpha": "ä"}


@pytest.fixture(autouse=True)
def _few_bytes_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("econmt.checkpoint.tensor_files._BLOCK", 37)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file of tensors."""
    write_tensors(tmp_path / "t.safetensors", tensors(), METADATA)
    return tmp_path / "t.safetensors"


def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(2)
    return {
        "half": torch.randn(3).to(torch.bfloat16),
        "matrix": torch.randn(4, 5),
        "transposed": torch.randn(4, 5).t(),
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 4),
        "whole": torch.arange(6),
        "double": torch.randn(2, dtype=torch.float64),
        "flag": torch.tensor([True, False]),
    }


def without_checksum(metadata: dict[str, str]) -> dict[str, str]:
    assert len(metadata["checksum"]) == 64
    return {key: value for key, value in metadata.items() if key != "checksum"}


def test_what_is_written_is_read_once_and_damage_found(path: Path, tmp_path: Path) -> None:
    with safetensors.safe_open(path, framework="pt") as file:
        theirs = without_checksum(file.metadata())
    content = path.read_bytes()
    head = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    for name, tensor in tensors().items():
        assert head[name]["data_offsets"][0] % tensor.element_size() == 0, "aligned"
    found, metadata = read_tensors(path)
    assert metadata == read_metadata(path)
    assert without_checksum(metadata) == theirs == METADATA
    by_library = {name: value.clone() for name, value in safetensors.torch.load_file(path).items()}
    path.write_bytes(b"gone")  # what was read does not depend on the file any more
    for each in (by_library, found):
        assert_same_bits(each, tensors())
        assert {name: value.dtype for name, value in each.items()} == {
            n: v.dtype for n, v in tensors().items()
        }
    path = tmp_path / "file"
    write_text(path, "same\n")
    inode = path.stat()[stat.ST_INO]
    write_text(path, "same\n")
    assert path.stat()[stat.ST_INO] == inode
    write_text(path, "other ä\n")
    assert path.read_bytes() == "other ä\n".encode()


def test_any_flipped_bit_and_relabelled_types_are_found(path: Path) -> None:
    write_tensors(path, {name: tensors()[name] for name in ("half", "whole")}, METADATA)
    whole = path.read_bytes()
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x40]) + whole[place + 1 :])
        for read in (read_tensors, check_tensors):
            with pytest.raises(InputError, match=f"^{path}"):
                read(path)
    path.write_bytes(path.read_bytes().replace(b'"F32"', b'"I32"'))
    with pytest.raises(InputError, match=rf"^{path}: damaged \(its checksum is wrong\)"):
        read_tensors(path)


class Hostile:
    """Would make a file if anything unpickled it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (self.path,))


def test_a_pickle_is_refused_by_name_and_never_run(tmp_path: Path) -> None:
    path, trap = tmp_path / "params.best.safetensors", tmp_path / "trap"
    for protocol in (2, 3, 4, 5):
        path.write_bytes(pickle.dumps({"weight": Hostile(trap)}, protocol=protocol))
        message = r"params\.best\.safetensors is a pickle; econmt never loads pickles"
        with pytest.raises(InputError, match=message):
            read_tensors(path)
        assert not trap.exists()
    for new in (True, False):
        torch.save({"a": torch.zeros(2)}, path, _use_new_zipfile_serialization=new)
        with pytest.raises(InputError, match="is a pickle"):
            read_tensors(path)


def test_a_header_as_long_as_a_pickle_begins_is_no_pickle(tmp_path: Path) -> None:
    # 0x80 0x02, the beginning of a pickle of protocol 2, is also the length of a header of 640 bytes.
    path = tmp_path / "t.safetensors"
    write_tensors(path, {"a": torch.zeros(1)}, {**METADATA, "padding": ""})
    padding = "x" * (640 - int.from_bytes(path.read_bytes()[:8], "little"))
    write_tensors(path, {"a": torch.zeros(1)}, {**METADATA, "padding": padding})
    assert path.read_bytes()[:2] == b"\x80\x02"
    assert read_tensors(path)[1]["padding"] == padding


@pytest.mark.parametrize("kept", [0.0, 0.01, 0.3, 0.9, 0.999])
def test_a_truncated_file_is_refused_with_its_name(path: Path, kept: float) -> None:
    os.truncate(path, int(path.stat().st_size * kept))
    with pytest.raises(InputError, match=rf"^{path}: (truncated|not a safetensors file)"):
        read_tensors(path)


def test_damaged_headers_and_foreign_files_are_refused_with_their_name(path: Path) -> None:
    header = json.dumps({"a": {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]}}).encode()
    broken = len(header).to_bytes(8, "little") + header + b"\0" * 4
    save = partial(safetensors.torch.save_file, {"a": torch.zeros(2)}, path)
    cases: list[tuple[Callable[[], object], str]] = [
        (lambda: path.write_bytes(broken), "truncated or broken safetensors file"),
        (save, r"not a file of econmt \(format none, expected econmt-1\)"),
        (partial(save, metadata={"format": "pt"}), r"not a file of econmt \(format pt, expected econmt-1\)"),
        (lambda: path.write_text("some text that is long enough"), "not a safetensors file"),
        (path.unlink, r"cannot be read \(No such file"),
    ]
    for spoil, problem in cases:
        spoil()
        with pytest.raises(InputError, match=f"^{path}: {problem}"):
            read_tensors(path)


def test_matrices_of_float32_alone_are_quantized(path: Path) -> None:
    shapes = {"whole": (torch.int64, 2), "wide": (torch.float64, 2), "cube": (torch.float32, 3)}
    tensors = {name: torch.ones([2] * axes, dtype=kind) for name, (kind, axes) in shapes.items()}
    for precision in (torch.int8, torch.bfloat16):
        found = quantized({**tensors, "matrix": torch.ones(2, 2)}, precision, path)
        assert found["matrix"].dtype == precision
        assert {name: found[name] is each for name, each in tensors.items()} == dict.fromkeys(tensors, True)


def row(**values: float) -> dict[str, float]:
    return {**dict.fromkeys(COLUMNS, 0), **values}


def state() -> TrainingState:
    return TrainingState(
        update=12, seconds=0.1 + 0.2, target_tokens=345, data={"epoch": 1, "position": 3, "batches_per_epoch": 4},
        random=random_states(), schedule={"name": "constant", "factor": 1 / 3, "num_not_improved": 0}, best_update=10,
        best_score=math.pi, num_not_improved=1, last_checkpoint=12, parameters_from=10, signature="nrefs:1",
        vocabulary="abc", text="def", since_checkpoint=Meter(1 / 7, 5, 2.5), since_log=Meter(1e-300, 1, 0.0),
        metrics=[row(update=10, valid_perplexity=math.inf), row(update=12, train_loss=0.1)],
    )  # fmt: skip


def test_every_value_comes_back_from_json_with_the_same_bits() -> None:
    before = state()
    after = TrainingState.from_json(before.to_json(), "state.json")
    assert after == before
    assert after.to_json() == before.to_json()
    older = TrainingState.from_json(without("best_regular"), "state.json")
    assert older.best_regular == before.best_update > 0


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
        *(((name,), 7, f"{name} 7: no such checkpoint") for name in ("best_update", "parameters_from")),
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
    early = row(update=5, valid_accuracy=0.5)  # a column of a metric that the recipe has no longer
    header, first, line, end = TrainingState(metrics=[early, values]).metrics_text().split("\n")
    assert (header.split("\t")[-1], first.split("\t")[-1], line.split("\t")[-1]) == (
        "valid_accuracy",
        "0.5",
        "nan",
    )
    assert end == ""
    assert TrainingState(metrics=[values, early]).metrics_text().split("\n")[0] == header
    names = (
        "update seconds target_tokens train_loss valid_perplexity bleu learning_rate target_tokens_per_second"
    )
    assert header.split("\t")[:9] == [*names.split(), "peak_memory_bytes"]
    found = dict(zip(header.split("\t"), line.split("\t"), strict=True))
    assert (found["update"], found["seconds"], found["target_tokens_per_second"]) == ("10", "1.235", "12.3")
    assert float(found["train_loss"]) == 0.1 + 0.2
    assert float(found["bleu"]) == 100 / 3


def test_states_of_gpus_that_are_not_there_are_left_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    states, restored = random_states(), list[int]()
    states["cuda"] = [states["torch"]] * 3
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda _, index: restored.append(index))
    restore_random_states(states)
    assert restored == [0, 1]
