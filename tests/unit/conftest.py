from __future__ import annotations

import importlib.util

if importlib.util.find_spec("econmt") is not None:  # else econmt_memory is tested alone
    from tests.pictures import _no_pictures, pictures  # noqa: F401
