"""Description of a trained model in its folder."""

from __future__ import annotations

from pathlib import Path

from econmt.checkpoint.checkpoints import parameter_file
from econmt.checkpoint.folder import ModelFolder
from econmt.checkpoint.hub import local_model
from econmt.checkpoint.tensor_files import read_metadata
from econmt.config.data import Data
from econmt.config.recipe import Recipe, read_recipe
from econmt.export.model_folder import read_metrics


class SavedModel:
    """Trained model in its folder, described without loading its parameters.

    Every property reads the folder anew, so that a program sees what training has written meanwhile.

    Args:
        name: model folder; ``hf://OWNER/NAME`` is downloaded from the Hugging Face Hub.

    Attributes:
        folder: the model folder on this machine.

    Raises:
        InputError: if a model of the Hub cannot be downloaded; properties raise it for files that cannot be read.

    Example::

        saved = econmt.api.SavedModel("runs/multi30k")
        print(saved.languages, saved.recipe.decoding.beam_size, saved.metrics["bleu"])
    """

    def __init__(self, name: Path | str) -> None:
        self.folder = local_model(name)
        self._files = ModelFolder(self.folder)

    @property
    def recipe(self) -> Recipe | None:
        """Recipe of the model; None if the folder has none, which loading reports."""
        return read_recipe(self._files.recipe) if self._files.recipe.is_file() else None

    @property
    def languages(self) -> tuple[str, str] | None:
        """Codes of the source and the target language; None if the model does not translate."""
        recipe = self.recipe
        data = None if recipe is None else recipe.data
        return (data.source, data.target) if isinstance(data, Data) else None

    @property
    def size(self) -> int:
        """Bytes of the file of the best parameters."""
        return parameter_file(self._files, "best").stat().st_size

    @property
    def version(self) -> tuple[int, int, int] | None:
        """Identity of the file of the best parameters, another one after it is replaced; None if there is no file."""
        try:
            status = self._files.best.stat()
        except OSError:  # loading reports the error
            return None
        return status.st_ino, status.st_size, status.st_mtime_ns

    @property
    def metrics(self) -> dict[str, float]:
        """The ``update`` of the best parameters, and its row of ``metrics.tsv``, as far as the folder has them."""
        update = read_metadata(self._files.best).get("update")
        if update is None or not update.isdecimal():
            return {}
        rows = [row for row in read_metrics(self._files.metrics) if str(row["update"]) == update]
        return {"update": int(update), **(rows[-1] if rows else {})}
