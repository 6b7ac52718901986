"""Training of attention-LSTM translation models in little memory."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

_PACKAGES = os.path.join(__path__[0], "_packages")  # noqa: PTH118  importing econmt takes no time
if os.path.isdir(_PACKAGES) and _PACKAGES not in sys.path:  # noqa: PTH112
    # econmt.pth names the folder, too, but is not read in folders of PYTHONPATH.
    sys.path.append(_PACKAGES)
# oneDNN and PyTorch cache kernels of 1,024 shapes of products, 0.3 MB each: batches of many lengths would fill them.
for _capacity in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
    os.environ.setdefault(_capacity, "16")

__version__ = "0.1.0"
__all__ = ["Request", "TrainedModel", "__version__", "evaluate", "load", "memory", "train"]

if TYPE_CHECKING:
    import econmt_memory as memory
    from econmt.api import Request as Request
    from econmt.api import TrainedModel as TrainedModel
    from econmt.api import evaluate as evaluate
    from econmt.api import load as load
    from econmt.api import train as train
else:

    def __getattr__(name: str) -> object:
        """Imports the Python interface of :mod:`econmt.api`, and with it torch, on first use."""
        if name not in __all__:
            raise AttributeError(f"module 'econmt' has no attribute '{name}'")
        if name == "memory":
            import econmt_memory

            return econmt_memory
        from econmt import api

        return getattr(api, name)

    def __dir__() -> list[str]:
        """Returns the names of the Python interface, also before they are imported."""
        return sorted(__all__)
