"""Marks on recipe keys, and what follows from them."""

from __future__ import annotations

from typing import Any

import pytest

from econmt.config.recipe import Data, Recipe, TextData
from econmt.config.section import KeyMark, marked_keys
from econmt.config.yaml_reader import walk

FREE_WHEN_RESUMED = """
name output data.test data.prepared ops.encoder ops.decoder ops.attention ops.output ops.stash training.memory_budget
training.max_updates training.max_epochs training.max_seconds training.keep_last_params
training.early_stopping.max_num_checkpoint_not_improved training.device training.cuda_graphs training.threads
training.log_interval training.optimizer_in_backward parallel.pipeline parallel.shard_optimizer parallel.timeout
"""


def test_only_these_keys_may_change_when_a_run_is_resumed() -> None:
    assert marked_keys(Recipe, KeyMark.NO_PARAMETERS) == frozenset(FREE_WHEN_RESUMED.split())


@pytest.mark.parametrize(
    ("mark", "prefixes"),
    [
        (KeyMark.NO_MEMORY, ("model.", "ops.", "decoding.", "training.batch.", "training.optimizer.")),
        (KeyMark.NO_PREPARED_TEXT, ("model.", "training.", "ops.")),
        (
            KeyMark.NO_PARAMETERS,
            ("model.", "training.optimizer.", "training.schedule.", "training.averaging."),
        ),
    ],
    ids=lambda value: value.name if isinstance(value, KeyMark) else "",
)
def test_sections_that_matter_have_no_marked_key(mark: KeyMark, prefixes: tuple[str, ...]) -> None:
    assert [key for key in sorted(marked_keys(Recipe, mark)) if key.startswith(prefixes)] == []


@pytest.mark.parametrize("kind", [Data, TextData])
def test_prepared_text_depends_on_all_that_is_written(kind: Any) -> None:
    known = {"prepared", "mixing", "noise", "subwords.dropout"}
    keys = marked_keys(kind, KeyMark.NO_PREPARED_TEXT)
    marked = {key for key in keys if not key.startswith(("mixing.", "noise."))}
    assert marked == known & {key for key, _, _ in walk(kind)}


def test_a_mark_on_a_section_holds_for_its_keys() -> None:
    translation = marked_keys(Recipe, KeyMark.TRANSLATION)
    assert "decoding.beam_size" in translation
    assert "training.max_updates" not in translation


def test_no_key_belongs_to_both_tasks_alone() -> None:
    assert not marked_keys(Recipe, KeyMark.TRANSLATION) & marked_keys(Recipe, KeyMark.LANGUAGE_MODEL)
