"""The table of run options agrees with the constructor, with the tables of results and with itself."""

from __future__ import annotations

import dataclasses

from edit_hooks.lm.options.editing import EditingOptions
from edit_hooks.run_options import BY_NAME, MODES, RUN_OPTIONS, default_of
from lm_edit.results.schema import RESULT_COLUMNS
from lm_eval_tasks.report.run_options import ANSWER_OPTIONS, EDIT_OPTIONS, OPTIONS


def test_the_constructor_has_a_field_for_every_option() -> None:
    fields = {field.name: field.default for field in dataclasses.fields(EditingOptions)}
    assert fields == {option.name: option.default for option in RUN_OPTIONS}
    assert len(BY_NAME) == len(RUN_OPTIONS) and default_of("answer") == "auto"


def test_every_option_that_changes_numbers_is_part_of_a_runs_identity() -> None:
    """By itself, in a list of options, in the resolved settings of the editor, or among the facts about the data."""
    recorded = {*OPTIONS, *EDIT_OPTIONS, *ANSWER_OPTIONS}
    for option in RUN_OPTIONS:
        assert set(option.modes) <= set(MODES)
        if option.changes == "nothing":
            assert option.name not in recorded
        elif option.changes != "settings":
            assert option.name in recorded


def test_columns_of_options_are_columns_of_results() -> None:
    assert {option.column for option in RUN_OPTIONS} - {""} <= set(RESULT_COLUMNS)
