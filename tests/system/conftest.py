from __future__ import annotations

from tests.pictures import _no_pictures, pictures  # noqa: F401
