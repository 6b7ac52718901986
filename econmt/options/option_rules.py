"""Rules about options of commands: which have an effect only together with others, and which cannot be combined.

Options are named as on the command line. Keys of recipes and options of searches have :mod:`econmt.config.conditions`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from econmt.config.conditions import PROCESSES, Condition, any_of, is_set, one_of
from econmt.errors import InputError


def _only(text: str, unless: str = "") -> Condition:
    """Returns the condition that an option is not given, or one that no option satisfies, in words."""
    return Condition(lambda given: bool(unless) and unless not in given, text, ())


def _with_metric(*names: str) -> Condition:
    """Returns the condition that econmt evaluate computes one of some metrics."""

    def holds(given: Mapping[str, Any]) -> bool:
        named = " ".join(given.get("--metrics") or names).lower().replace(",", " ").split()
        return not set(names).isdisjoint(named)

    return Condition(holds, f"{' and '.join(names)}, which --metrics does not name", ())


_SEVERAL_SYSTEMS = Condition(
    lambda given: len(given.get("--hypotheses") or ()) > 1,
    "comparing systems, with --hypotheses several times",
    (),
)
_OF_PAIRS = "--source --source-factors --target-tokens --batch-size --max-input-length"
_PENALTIES = "--length-penalty-alpha --length-penalty-beta"

OPTION_NEEDS: dict[str, dict[str, Condition]] = {
    "translate": {
        "--beam-size": _only("searching, not for --sample", unless="--sample"),
        "--top-k --top-p --temperature --seed": is_set("--sample"),
        "--nbest-size --sample --output-type --attention-picture": _only(
            "lines of one sentence, not for --split-sentences", unless="--split-sentences"
        ),
        "--glossary-mode": any_of(is_set("--glossary"), is_set("--json-input")),
        "--restrict-lexicon-topk": is_set("--restrict-lexicon"),
        "--lm-weight": is_set("--language-model"),
    },
    "score of a language model": {f"{_OF_PAIRS} {_PENALTIES}": _only("translation models")},
    "score of a translation model": {
        "--total": _only("language models"),
        _PENALTIES: one_of("--score-type", "normalized", "json"),
    },
    "evaluate": {
        "--tokenize --language": _with_metric("bleu"),
        "--lowercase": _with_metric("bleu", "chrf"),
        "--width": _only("text; figures of --json are not rounded", unless="--json"),
        "--samples": _SEVERAL_SYSTEMS,
    },
    "rerank": {
        "--metric": is_set("--reference"),
        "--weight": is_set("--models"),
        "--reverse-weight": is_set("--reverse-models"),
        "--source --batch-size --device --threads --precision": any_of(
            is_set("--models"), is_set("--reverse-models")
        ),
    },
    "export": {
        "--hub": is_set("--license"),
        "--license": is_set("--hub"),
        "--precision --lexicon": any_of(is_set("--runtime"), is_set("--web")),
        "--lexicon-topk": is_set("--lexicon"),
        "--platforms": is_set("--runtime"),
    },
    "train": {"--max-restarts": is_set(PROCESSES)},
    "distill": {
        "--beam-size --nbest-size --batch-size --codes --precision --target": _only(
            "models; the program of --command takes options of its own", unless="--command"
        ),
        "--nbest-size": is_set("--target"),
    },
}
"""Conditions under which options of a command, separated by spaces, have an effect; without it they are errors."""

_OF_A_STEP = (
    "--data-dir --device --threads --bucket --batch --estimate --measure --fit --compare --processes --json --trace "
    "--html"
)

OPTION_CONFLICTS: dict[str, list[tuple[str, str, str]]] = {
    "evaluate": [("--language", "--tokenize", ": it chooses a tokenizer")],
    "export": [("--hub", "--runtime --web", ""), ("--web", "--runtime", "")],
    "train": [("--overwrite-output", "--resume-with-changes", ": it starts a new run")],
    "profile": [
        ("--diff", _OF_A_STEP, ": it compares two files"),
        ("--estimate", "--measure --trace", ": it runs no step"),
        ("--fit", "--measure --trace --html", ": it prints a table of estimates"),
        ("--fit", "--batch", ": it finds the batch"),
    ],
}
"""Options of a command, others that each cannot be combined with, and the reason."""


def refuse_options(context: Any, command: str) -> None:
    """Raises InputError if an option given on the command line has no effect or does not fit the others.

    Args:
        context: context of the command.
        command: its name in :data:`OPTION_NEEDS`.
    """
    given = {
        max(each.opts, key=len): context.params[each.name]
        for each in context.command.params
        if getattr(context.get_parameter_source(each.name), "name", "") == "COMMANDLINE"
    }
    for names, needs in OPTION_NEEDS.get(command, {}).items():
        idle = [name for name in names.split() if name in given]
        if idle and not needs.holds(given):
            advice = "give that too, or leave it out" if needs.keys else "leave it out"
            raise InputError(f"{idle[0]} is for {needs.text}; {advice}")
    for one, others, reason in OPTION_CONFLICTS.get(command, []):
        both = [other for other in others.split() if one in given and other in given]
        if both:
            raise InputError(f"{one} cannot be combined with {both[0]}{reason}; leave out one of them")
