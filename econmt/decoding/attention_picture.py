"""Pictures of attention."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

SENTENCEPIECE_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
VISIBLE_SPACE = "\N{OPEN BOX}"


def token_label(token: str) -> str:
    """A token as a person reads it: SentencePiece's sign for a space becomes an open box."""
    return token.replace(SENTENCEPIECE_SPACE, VISIBLE_SPACE)


def draw_attention(
    attention: Tensor, source_tokens: Sequence[str], target_tokens: Sequence[str], path: Path
) -> None:
    """Draw a heat map: one row a target token, one column a source token, dark where the model looked.

    Args:
        attention: (T, S) weights in [0, 1]; a row or column more than there are tokens is that of EOS.
        source_tokens, target_tokens: the tokens, EOS left out or not.
        path: where to write the picture; its suffix chooses the format.

    Raises:
        ValueError: if the shape does not fit the tokens.
    """
    labels = []
    for size, tokens, side in zip(
        attention.shape, (target_tokens, source_tokens), ("target", "source"), strict=True
    ):
        if size - len(tokens) not in (0, 1):
            raise ValueError(f"attention {tuple(attention.shape)} does not fit {len(tokens)} {side} tokens")
        labels.append([token_label(token) for token in tokens] + ["</s>"] * (size - len(tokens)))
    rows, columns = labels
    # No pyplot: it has global state and may want a display.
    from matplotlib.figure import Figure

    width = min(40.0, 2.6 + 0.42 * max(len(columns), 4))
    height = min(40.0, 1.8 + 0.34 * max(len(rows), 4))
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.add_subplot()
    image = axes.imshow(attention.float().cpu().numpy(), cmap="Blues", vmin=0.0, vmax=1.0, aspect="auto")
    axes.set_xticks(range(len(columns)), columns, rotation=60, ha="left", rotation_mode="anchor", fontsize=11)
    axes.set_yticks(range(len(rows)), rows, fontsize=11)
    for label in (*axes.get_xticklabels(), *axes.get_yticklabels()):
        label.set_parse_math(False)  # a dollar sign is a token, not a formula
    axes.xaxis.tick_top()
    axes.xaxis.set_label_position("top")
    axes.set_xlabel("source", fontsize=12)
    axes.set_ylabel("translation", fontsize=12)
    axes.set_xticks([column - 0.5 for column in range(1, len(columns))], minor=True)
    axes.set_yticks([row - 0.5 for row in range(1, len(rows))], minor=True)
    axes.grid(which="minor", color="0.9", linewidth=0.8)
    axes.tick_params(which="both", length=0)
    figure.colorbar(image, ax=axes, label="attention", fraction=0.05, pad=0.02)
    with warnings.catch_warnings():
        # A letter that none of the fonts has is drawn as a box; the picture is no worse for a warning of each.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure.savefig(path, dpi=120)
