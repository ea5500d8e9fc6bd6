"""Columns of BAKE's reverse questions, asked as they are and with the answer in the prompt.

The release of May 2025 asks the second form of IKE alone; the paper does not say which one its figures show.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from lm_edit.figures.needs import Needs
from lm_edit.figures.select import FINAL, require_edited, require_rows
from lm_eval_tasks.bake.reversal import answer_in_prompt_name

if TYPE_CHECKING:
    from pandas import DataFrame

TASK = "bake_rq"
ANSWER_IN_PROMPT = "bake_rq_answer_in_prompt"
IN_PROMPT_NOTE = (
    "Answer in the prompt: the text before the question states the reversed fact, so its answer is copied; a control, "
    "not reversal."
)


class QuestionRows(NamedTuple):
    """The rows of one form of the questions.

    Attributes:
        rows: the drawn ones. all_rows: of the task at the last stage, for values of the unedited model.
        column: column of bake_rq -> its name in this form.
        ending: of a panel's title.
    """

    rows: DataFrame
    all_rows: DataFrame
    column: dict[str, str]
    ending: str


def by_form(rows: DataFrame, needs: Needs, columns: Sequence[str]) -> list[QuestionRows]:
    """The forms of which there are rows; ``columns`` are those of bake_rq.

    Raises:
        EditingError: without edited runs of either form, and for rows that cannot be compared.
    """
    in_prompt = {column: answer_in_prompt_name(column) for column in columns}
    forms = {TASK: {column: column for column in columns}, ANSWER_IN_PROMPT: in_prompt}
    endings = {TASK: "", ANSWER_IN_PROMPT: ", answer in the prompt"}
    given = [
        task for task, names in forms.items() if (rows["task"].eq(task) & rows["metric"].isin(names.values())).any()
    ]
    asked = []
    for task in given or [TASK]:
        chosen = require_rows(rows, needs, list(forms[task].values()), tasks=[task])
        require_edited(chosen, needs)
        at_end = rows[rows["task"].eq(task) & rows["stage"].eq(FINAL)]
        asked.append(QuestionRows(chosen, at_end, forms[task], endings[task]))
    return asked


def rows_of(forms: Sequence[QuestionRows]) -> DataFrame:
    """The drawn rows of all forms."""
    import pandas

    return pandas.concat([form.rows for form in forms])


def form_notes(forms: Sequence[QuestionRows]) -> list[str]:
    """Sentences about the forms for the caption."""
    return [IN_PROMPT_NOTE] if any(form.ending for form in forms) else []
