"""Answers of several editors to the questions of one case, side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from edit_hooks.request import statement_of
from lm_edit.figures.drawing.tables import Table
from lm_edit.figures.inputs import Inputs
from lm_edit.figures.needs import DEFAULTS, SAMPLES, Needs, Options
from lm_edit.figures.select import OF_CASE_SETS, UNEDITED, edited_labels, require_comparable_documents
from lm_edit.figures.spec import FigureSpec
from lm_edit.results.answers.documents import CaseDocument, SavedResponse

if TYPE_CHECKING:
    from pandas import DataFrame

NEEDS = Needs(
    "case_answers",
    "samples of tasks with free generation (--case ID chooses the case; --only task=... or editor=... what is shown)",
    "lm_eval --model edited_hf --tasks bake_rq --model_args editor=r_rome --log_samples --output_path results",
    SAMPLES,
)
NOT_ASKED = "-"
MAX_NAMED = 20  # case ids in an error


class _Key(NamedTuple):
    """A question as all runs have it."""

    task: str
    kind: str
    prompt: str
    wanted: str
    draw: int


def draw(
    documents: Sequence[CaseDocument],
    runs: Mapping[str, str],
    options: Options = DEFAULTS,
    models: Mapping[str, str] | None = None,
    results: DataFrame | None = None,
) -> Table:
    """A row per question that is answered freely: the wanted answer, the unedited models', and one of every run.

    Args:
        documents: cases of all runs. runs: run -> its label; the column of a run without a label is the unedited model.
        models: run -> its model; where there are several, each has a column of its unedited answers.
        options: ``case``; without one, the first case with such a question.
        results: of the same files, to refuse answers of one model under several protocols or on other data; ``None``:
            not checked.
    """
    asked = [document for document in documents if any(one.target is None for one in document.questions)]
    if not asked:
        raise NEEDS.missing("no sample has a question that is answered freely")
    case = options.case if options.case is not None else asked[0].case_id
    of_case = [document for document in asked if document.case_id == case]
    if not of_case:
        known = ", ".join(list(dict.fromkeys(document.case_id for document in asked))[:MAX_NAMED])
        raise NEEDS.missing(f"there is no case {case!r}; there are {known}")
    edits = {_edits(document): document.task for document in of_case}
    if len(edits) > 1:  # benchmarks number their cases alike
        found = "; ".join(f"{task}: {text}" for text, task in edits.items())
        raise NEEDS.missing(f"several cases have the id {case} ({found}); choose with --only task=...")
    if results is not None:
        for _, of_model in results.groupby("model"):  # every model has its own chat template
            require_comparable_documents(of_case, of_model, NEEDS, OF_CASE_SETS)
    named = dict(models or {})
    several = len(set(named.values())) > 1
    unedited = {run: f"{UNEDITED}, {model}" if several else UNEDITED for run, model in named.items()}
    answers: dict[_Key, dict[str, SavedResponse]] = {}
    for document in of_case:
        own = unedited.get(document.run, UNEDITED)
        for question in document.questions:
            if question.target is not None:
                continue  # scored by likelihood
            key = _Key(document.task, question.kind, question.prompt, question.wanted, question.draw)
            cells = answers.setdefault(key, {})
            if question.unedited is not None:
                cells.setdefault(own, question.unedited)
            if "" in question.answers:
                cells.setdefault(runs.get(document.run, own), question.answers[""])
    labels = [*dict.fromkeys(unedited.values() or [UNEDITED]), *runs.values()]
    shown = [label for label in labels if any(label in cells for cells in answers.values())]
    rows: list[list[str | int | float]] = [
        [key.task, key.kind, key.prompt, key.wanted, *(_written(cells.get(label)) for label in shown)]
        for key, cells in answers.items()
    ]
    return Table(
        name=NEEDS.figure,
        title=f"Answers to the questions of case {case}",
        header=["task", "kind", "question", "wanted", *shown],
        rows=rows,
        notes=[next(iter(edits)), "Answers up to their natural stop, as they are scored; -: not asked."],
    )


def _written(response: SavedResponse | None) -> str:
    if response is None:
        return NOT_ASKED
    return f"unscored: {response.failure}" if response.text is None else response.text or '""'


def _edits(document: CaseDocument) -> str:
    """The edits of the case in a sentence."""
    texts = [
        statement_of(edit) + (f" (was {edit['target_true']})" if edit.get("target_true") else "")
        for edit in document.edits
    ]
    return f"Edits: {'; '.join(texts)}." if texts else "No edits."


def _draw(inputs: Inputs, options: Options) -> Table:
    rows = inputs.rows()
    models = rows.drop_duplicates("run").set_index("run")["model"]
    labels = edited_labels(rows)
    named = {str(run): str(model) for run, model in models.items()}
    return draw(inputs.documents(), labels, options, named, rows)


SPEC = FigureSpec(
    name=NEEDS.figure,
    title="table: free answers of several editors to the questions of one case",
    published="BAKE (TMLR) table 4, WILD table 7, ThinkEdit figure 3: tables of cases",
    needs=NEEDS,
    draw=_draw,
    options=("case",),
    is_table=True,
)
