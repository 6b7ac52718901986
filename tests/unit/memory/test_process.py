"""What a process is made of: parts that add up to what the system says it has."""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from econmt.estimate import process
from econmt.estimate.process import FREE, LIBRARIES, OTHERS, PYTHON, TENSORS, TORCH, resident_parts

SMAPS = """\
5600-5700 r-xp 00002000 fe:00 260131                     /usr/lib/python3/torch/lib/libtorch_cpu.so
Rss:                 200 kB
Anonymous:            20 kB
5700-5800 r--p 00000000 fe:00 7                          /usr/lib/libc.so.6 (deleted)
Rss:                  30 kB
Anonymous:             0 kB
5800-5900 rw-p 00000000 00:00 0                          [heap]
Rss:                 100 kB
Anonymous:           100 kB
5900-5a00 rw-p 00000000 00:00 0
Rss:                  50 kB
Anonymous:            50 kB
"""


def test_pages_belong_to_the_file_that_they_were_read_from() -> None:
    assert process._mapped(SMAPS) == {TORCH: 180 * 1024, LIBRARIES: 30 * 1024, "": 170 * 1024}


def test_every_storage_counts_once() -> None:
    before = process.tensor_bytes()
    held = torch.ones(1000, requires_grad=True)
    views = [held[:10], held.detach().view(10, 100)]
    held.grad = torch.ones(1000)
    assert process.tensor_bytes() - before == 8000
    del held, views
    assert process.tensor_bytes() == before


def test_tensors_without_memory_do_not_count() -> None:
    """Fake tensors, of which torch.compile leaves some alive, with sizes that are symbols or numbers."""
    gc.collect()  # tensors in circles of earlier tests would otherwise leave between the two counts
    before = process.tensor_bytes()
    modes = [FakeTensorMode(), FakeTensorMode(shape_env=ShapeEnv())]
    held = [mode.from_tensor(torch.ones(1000, 50)) for mode in modes]
    assert held[0].device.type == "cpu"
    assert isinstance(held[1].shape[0], torch.SymInt)
    held[1].fake_mode.shape_env.var_to_range.clear()  # type: ignore[union-attr]  # as after a compilation
    assert process.tensor_bytes() == before


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell which file a page belongs to")
def test_parts_add_up_to_the_resident_set() -> None:
    held = torch.ones(8 << 20)
    parts = resident_parts()
    resident = process._MAPS.with_name("statm").read_text(encoding="utf-8").split()[1]
    assert set(parts) == {TORCH, LIBRARIES, PYTHON, TENSORS, OTHERS, FREE}
    assert min(parts.values()) >= 0
    assert sum(parts.values()) == pytest.approx(int(resident) * 4096, rel=0.05)
    assert parts[TENSORS] >= held.nbytes
    assert parts[PYTHON] > 10e6
    assert parts[TORCH] > 10e6


def test_each_page_is_counted_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The C library's allocator holds tensors, too; a part is no larger than the pages that remain."""
    (tmp_path / "smaps").write_text(SMAPS)
    monkeypatch.setattr(process, "_MAPS", tmp_path / "smaps")
    for tensors, allocated, expected in (
        (100, 130, {TENSORS: 100, PYTHON: 20, OTHERS: 30, FREE: 20}),
        (100, 90, {TENSORS: 100, PYTHON: 20, OTHERS: 0, FREE: 50}),
        (160, 400, {TENSORS: 160, PYTHON: 10, OTHERS: 0, FREE: 0}),
    ):
        for name, size in (("tensor_bytes", tensors), ("_malloc_bytes", allocated), ("_python_arenas", 20)):
            monkeypatch.setattr(process, name, lambda size=size: size * 1024)
        parts = {name: size // 1024 for name, size in resident_parts().items()}
        assert parts == {TORCH: 180, LIBRARIES: 30, **expected}


def test_a_system_that_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_MAPS", process._MAPS.with_name("no such file"))
    assert resident_parts() == {}


def test_an_error_leaves_standard_error_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise KeyboardInterrupt

    before = os.fstat(2)
    monkeypatch.setattr(sys, "_debugmallocstats", fail)
    with pytest.raises(KeyboardInterrupt):
        process._python_arenas()
    assert os.path.samestat(os.fstat(2), before)
