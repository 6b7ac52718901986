"""Heat maps of the attention between source and target tokens, drawn with matplotlib."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from econmt.data.text.vocabulary import WORD_START
from econmt.errors import printable

VISIBLE_SPACE = "\N{OPEN BOX}"

LONGEST = 40
"""Maximum number of characters of a token label; very long labels would take minutes to draw."""


def token_label(token: str) -> str:
    """Returns a readable token: SentencePiece's sign for a space becomes an open box, long tokens are cut."""
    shown = token if len(token) <= LONGEST else token[: LONGEST - 1] + "…"
    return printable(shown.replace(WORD_START, VISIBLE_SPACE))


def draw_attention(
    attention: Tensor, source_tokens: Sequence[str], target_tokens: Sequence[str], path: Path
) -> str:
    """Draws a heat map with a row for each target and a column for each source token; dark means much attention.

    Args:
        attention: (T, S) weights in [0, 1]; a row or column beyond the tokens is that of EOS.
        source_tokens, target_tokens: the tokens, EOS left out or not.
        path: file of the picture; its suffix selects the format.

    Returns:
        Characters that no installed font has, which are drawn as boxes; see :func:`missing_note`.

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
    # pyplot has global state and may need a display.
    from matplotlib.figure import Figure

    width = min(40.0, 2.6 + 0.42 * max(len(columns), 4))
    height = min(40.0, 1.8 + 0.34 * max(len(rows), 4))
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.add_subplot()
    image = axes.imshow(attention.float().cpu().numpy(), cmap="Blues", vmin=0.0, vmax=1.0, aspect="auto")
    axes.set_xticks(range(len(columns)), columns, rotation=60, ha="left", rotation_mode="anchor", fontsize=11)
    axes.set_yticks(range(len(rows)), rows, fontsize=11)
    families, missing = fonts_for("".join(rows + columns))
    for label in (*axes.get_xticklabels(), *axes.get_yticklabels()):
        label.set_parse_math(False)  # a dollar sign is a token, not a formula
        label.set_fontfamily(families)
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
        # The caller reports characters without a font in one note.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        # Very long labels leave little space, which is acceptable.
        warnings.filterwarnings("ignore", message="constrained_layout not applied")
        figure.savefig(path, dpi=120, format=path.suffix.lower().removeprefix("."))
    return missing


def missing_note(letters: str, path: Path) -> str:
    """Returns a note on characters that a picture shows as boxes."""
    some = ", ".join(f"U+{ord(letter):04X}" for letter in letters[:5])
    more = f" and {len(letters) - 5} more" if len(letters) > 5 else ""
    return (
        f"{path}: no font of this machine has {some}{more}, drawn as boxes; install one that does (Noto Sans CJK, "
        "Noto Sans Arabic, Noto Emoji) and draw again"
    )


def fonts_for(text: str) -> tuple[list[str], str]:
    """Returns installed fonts that together have the characters of a text, and the characters that none has."""
    from matplotlib.font_manager import FontProperties, findfont, fontManager, get_font

    def covered(path: str) -> set[str]:
        known = get_font(path).get_charmap()
        return {letter for letter in missing if ord(letter) in known}

    missing = {letter for letter in text if not letter.isspace()}
    usual = FontProperties()
    names = list(usual.get_family())
    missing -= covered(findfont(usual))
    for font in sorted(fontManager.ttflist, key=lambda entry: (entry.style != "normal", entry.weight != 400)):
        # "Last Resort" has a box for every character, and math fonts have other shapes for usual characters.
        if not missing:
            break
        if font.name.startswith(("Last Resort", "STIXSize", "STIXNonUnicode", "cm")) or font.name in names:
            continue
        try:
            characters = covered(font.fname)
        except (OSError, RuntimeError):  # a file that was removed, or is no font
            continue
        if characters:
            names.append(font.name)
            missing -= characters
    return names, "".join(sorted(missing))
