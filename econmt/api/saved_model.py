"""Description of a trained model in its folder."""

from __future__ import annotations

from pathlib import Path

from econmt.checkpoint.checkpoints import parameter_file
from econmt.checkpoint.folder import ModelFolder
from econmt.checkpoint.hub import FILES as FILES
from econmt.checkpoint.hub import local_model as local_model
from econmt.checkpoint.recovery import changed_keys
from econmt.checkpoint.tensor_files import read_metadata
from econmt.config.data import Data
from econmt.config.recipe import Recipe, read_recipe
from econmt.data.text.subwords import load_vocabularies, vocabulary_files
from econmt.data.text.vocabulary import Vocabularies
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
    def vocabularies(self) -> Vocabularies:
        """Vocabularies, which divide text into tokens as the model does."""
        return load_vocabularies(self.folder)

    @property
    def parameters(self) -> Path:
        """File of the best parameters, which need not exist."""
        return self._files.best

    @property
    def files(self) -> list[Path]:
        """Files that translation needs; raises InputError if there are no parameters."""
        return [self._files.recipe, parameter_file(self._files, "best"), *vocabulary_files(self.folder)]

    @property
    def is_begun(self) -> bool:
        """True if the folder holds checkpoints, from which training resumes."""
        return bool(self._files.commits())

    def changed_keys(self, recipe: Recipe) -> list[str]:
        """Compares a recipe with that of the folder's run.

        Args:
            recipe: recipe with which training could be resumed.

        Returns:
            The differing keys that matter for resuming, each with both values.

        Raises:
            InputError: if the folder has no recipe.
        """
        return changed_keys(recipe, self._files)

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
