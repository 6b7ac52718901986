"""Implementations of a model's operations, by name."""

from __future__ import annotations

from typing import Any, NamedTuple

from econmt.config import recipe
from econmt_ops.dispatch.rule import leanest
from econmt_ops.dispatch.traits import Traits, definition, implementations_of


class Implementations(NamedTuple):
    """Names of implementations in ``econmt_ops``; "auto" leaves the choice to it.

    They affect memory and speed; results differ by rounding only.

    Attributes:
        encoder: implementation of the encoder's or language model's recurrent layers.
        decoder: implementation of the decoder: with input feeding all steps including attention, else its layers.
        attention: implementation of the attention of a decoder without input feeding.
        output: implementation of the output layer and its loss.
        stash: feature maps that recomputing LSTMs keep: a level of `econmt_ops.core.chunks.STASHES`, or "auto".
    """

    encoder: str = "auto"
    decoder: str = "auto"
    attention: str = "auto"
    output: str = "auto"
    stash: str = "auto"

    @classmethod
    def of(cls, ops: recipe.Ops) -> Implementations:
        """Returns the implementations that a recipe names."""
        return cls(**ops.model_dump())

    @classmethod
    def everywhere(cls, name: str, stash: str = "auto") -> Implementations:
        """Returns one implementation for all operations."""
        return cls(name, name, name, name, stash)

    @classmethod
    def definitions(cls) -> Implementations:
        """Returns the reference implementations: plain PyTorch under autograd."""
        return cls(**{key: definition(functions[0]).name for key, functions in recipe.OPS.items()})

    @classmethod
    def leanest(cls, device: str) -> Implementations:
        """Returns the implementations that save the fewest bytes on a device type and need no warm-up."""
        names = {key: leanest(functions[0], device) for key, functions in recipe.OPS.items()}
        return cls(**names)

    def traits(self, key: str) -> Traits | None:
        """Returns the traits of the implementation under a key of ``econmt.config.recipe.OPS``, or None for "auto"."""
        name = getattr(self, key)
        return None if name == "auto" else implementations_of(recipe.OPS[key][0])[name].traits

    def traceable(self) -> Implementations:
        """Returns implementations that allocate the same bytes and can run on fake tensors."""
        traits = {key: self.traits(key) for key in recipe.OPS}
        return self._replace(
            **{
                key: each.fake_implementation
                for key, each in traits.items()
                if each and each.fake_implementation
            }
        )

    def accepts_unique_rows(self, key: str) -> bool:
        """Returns True if the LSTM under ``key`` accepts ``econmt_ops.UniqueRows`` as inputs."""
        traits = self.traits(key)
        return traits is None or traits.casts

    def recurrent(self, key: str) -> dict[str, Any]:
        """Returns keyword arguments of the recurrent operations under ``key``, "encoder" or "decoder"."""
        traits = self.traits(key)
        takes_stash = self.stash != "auto" and (traits is None or traits.takes_stash)
        return {"implementation": getattr(self, key), **({"stash": self.stash} if takes_stash else {})}
