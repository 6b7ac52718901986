from __future__ import annotations

import os
from pathlib import Path

import pytest

from econmt.data.files import describe, is_as_described
from econmt.errors import InputError

LARGE = 5 << 20


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """A file of which a sample is read."""
    path = tmp_path / "large"
    path.write_bytes(bytes(range(256)) * (LARGE // 256))
    return path


def change(path: Path, place: int, *, time: bool) -> None:
    """Changes a byte; ``time``: so that its time shows it."""
    status = path.stat()
    with path.open("r+b") as stream:
        stream.seek(place)
        stream.write(b"\xee" if place % 256 != 0xEE else b"\x11")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + time))


def test_a_file_that_is_the_same(large: Path) -> None:
    description = describe(large)
    assert description["size"] == LARGE
    assert description["sha256"] != description["sample"]
    assert is_as_described(large, description, verify=False)
    assert is_as_described(large, description, verify=True)
    os.utime(large, (1, 1))  # as a copy
    assert is_as_described(large, description, verify=False)


def test_a_small_file_is_its_own_sample(tmp_path: Path) -> None:
    path = tmp_path / "small"
    path.write_bytes(bytes(range(256)) * 40)
    description = describe(path)
    assert description["sha256"] == description["sample"]
    for place in (0, 5000, 10239):
        change(path, place, time=False)
        assert not is_as_described(path, description, verify=False)
        path.write_bytes(bytes(range(256)) * 40)
        os.utime(path, ns=(description["time"], description["time"]))


@pytest.mark.parametrize("place", [0, LARGE // 2, LARGE - 1])
def test_another_time_means_reading_all(large: Path, place: int) -> None:
    description = describe(large)
    change(large, place, time=True)
    assert not is_as_described(large, description, verify=False)


def test_a_sample_sees_the_ends_and_most_large_changes_and_verify_everything(large: Path) -> None:
    description = describe(large)
    found = []
    for place in range(0, LARGE, 40_000):
        before = large.read_bytes()
        change(large, place, time=False)
        assert not is_as_described(large, description, verify=True)
        found.append(not is_as_described(large, description, verify=False))
        large.write_bytes(before)
        os.utime(large, ns=(description["time"], description["time"]))
    assert found[0]
    assert 0.4 < sum(found) / len(found) < 0.8  # 256 of 320 blocks, drawn with repetition
    change(large, LARGE - 1, time=False)
    assert not is_as_described(large, description, verify=False)


def test_the_places_depend_on_the_content(large: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_bytes(large.read_bytes()[:-1] + b"x")
    assert describe(other)["sample"] != describe(large)["sample"]


def test_size_and_absence(large: Path) -> None:
    description = describe(large)
    large.write_bytes(large.read_bytes()[:-1])
    assert not is_as_described(large, description, verify=False)
    large.unlink()
    with pytest.raises(InputError, match=rf"^{large}: cannot read: No such file"):
        is_as_described(large, description, verify=False)
    with pytest.raises(InputError, match=rf"^{large}: cannot read: No such file"):
        describe(large)
