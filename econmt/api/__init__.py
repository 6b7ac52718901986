"""Python interface: train a recipe, load a trained model, translate, score, write text and evaluate with it.

Example::

    import econmt

    econmt.train("multi30k", {"training.max_updates": 3000})
    model = econmt.load("runs/multi30k", device="cpu")
    best = model.translate(["A dog."], beam_size=5, nbest_size=3)[0]
    print(best.text, best.score, [other.text for other in best.hypotheses], best.attention)

Invalid arguments raise :class:`econmt.errors.InputError`. Programs around a model find more in the modules of this
package: :mod:`~econmt.api.requests` reads what clients send, :mod:`~econmt.api.text` has what texts are divided by,
:mod:`~econmt.api.checked_json` reads and writes JSON, and :mod:`~econmt.api.commands` declares commands. Programs
that train and convert models have :mod:`~econmt.api.recipes`, :mod:`~econmt.api.export`, :mod:`~econmt.api.files` and
:mod:`~econmt.api.programs`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from econmt import __version__ as __version__
from econmt.errors import EconmtError as EconmtError
from econmt.errors import InputError as InputError

if TYPE_CHECKING:
    from econmt.api.interface import Outcome as Outcome
    from econmt.api.interface import Score as Score
    from econmt.api.interface import check_training as check_training
    from econmt.api.interface import evaluate as evaluate
    from econmt.api.interface import load as load
    from econmt.api.interface import train as train
    from econmt.api.saved_model import SavedModel as SavedModel
    from econmt.api.translation import Request as Request
    from econmt.api.translation import TrainedModel as TrainedModel
    from econmt.api.translation import Translator as Translator
    from econmt.config import limits as limits
    from econmt.engine.devices import is_out_of_memory as is_out_of_memory
    from econmt.engine.devices import resolve_device as resolve_device
else:

    def __getattr__(name: str) -> object:
        """Imports the rest of the interface, and with it torch, on first use."""
        import econmt.api.interface

        try:
            return getattr(econmt.api.interface, name)
        except AttributeError:
            raise AttributeError(f"module 'econmt.api' has no attribute '{name}'") from None
