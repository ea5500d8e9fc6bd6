"""Chains by length: how many, how many are active before and after the edit, and IFR; of one edit or of a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lm_edit.figures.drawing.tables import Table
from lm_edit.figures.needs import DEFAULTS, SAMPLES, Needs, Options
from lm_edit.figures.select import OF_CASE_SETS, require_comparable_documents
from lm_edit.figures.spec import FigureSpec
from lm_edit.figures.thinkedit.questions import BY_METRIC, choose_documents
from lm_eval_tasks.common.scoring.aggregation import mean_scored, pooled_mean, total_scored
from lm_eval_tasks.knowgic.chains import MAX_STEPS

if TYPE_CHECKING:
    from pandas import DataFrame

    from lm_edit.results.answers.documents import CaseDocument

LONGER, ALL = "longer", "all"
LENGTHS = (*map(str, range(1, MAX_STEPS + 1)), LONGER, ALL)
EFFICACY = ("knowgic_es", "efficacy_prob")  # task and column of table 1
UNSCORED = "unscored"

NEEDS = Needs(
    "thinkedit_steps",
    f"the samples of a KnowGIC task with chains ({BY_METRIC}; --case ID: one edit, default: all edits of a run), and "
    "for the efficacy those of knowgic_es",
    "lm_eval --model edited_hf --tasks knowgic,knowgic_es --model_args editor=r_rome --log_samples --output_path "
    "results",
    SAMPLES,
)

Cell = str | int | float


def draw(
    documents: Sequence[CaseDocument],
    names: Mapping[str, str],
    options: Options = DEFAULTS,
    results: DataFrame | None = None,
) -> Table:
    """A row per run and length of the chains, and one for all of them.

    Args:
        names: run -> name, for the first column and the notes.
        results: of the same files, to refuse documents that cannot be compared; ``None``: not checked.
    """
    protocol, chosen = choose_documents(documents, NEEDS, options)
    by_run: dict[str, list[CaseDocument]] = {}
    for document in chosen:
        by_run.setdefault(document.run, []).append(document)
    if results is not None:
        of_efficacy = [one for one in documents if one.task == EFFICACY[0] and one.run in by_run]
        varying = () if options.case is None else OF_CASE_SETS
        require_comparable_documents([*chosen, *of_efficacy], results, NEEDS, varying)
    labels = _labels(by_run, names)
    # Columns of sampled responses only.
    after, deep = (
        any(_key(document, column) for document in chosen)
        for column in (f"ifr_active_after_{protocol}", f"deep_edited_{protocol}")
    )
    header = ["run"] if len(by_run) > 1 else []
    header += ["steps", "chains", "active before", *(["active after"] if after else []), "IFR"]
    header += ["deep edited up to n"] if deep else []
    rows: list[list[Cell]] = []
    notes = []
    for run, of_run in by_run.items():
        scored = [one for one in of_run if _value(one, f"ifr_active_{protocol}") is not None]
        if left_out := len(of_run) - len(scored):
            notes.append(f"{labels[run]}: without {left_out} of {len(of_run)} edits, whose answers are incomplete.")
        for cells in _rows(scored, protocol, after=after, deep=deep):
            rows.append([labels[run], *cells] if len(by_run) > 1 else cells)
        notes.append(f"{labels[run]}: {_efficacy(documents, run, options.case)}")
    notes.append(_legend(protocol, after=after, deep=deep))
    return Table(name=NEEDS.figure, title=_title(chosen, options.case), header=header, rows=rows, notes=notes)


def _title(chosen: Sequence[CaseDocument], case: str | None) -> str:
    if case is None:
        return f"Chains by length, {len({document.case_id for document in chosen})} edits"
    edit = chosen[0].edits[0]
    return f"Chains from {edit['subject']} to {edit['target_true']}, edited to {edit['target_new']} (case {case})"


def _labels(runs: Mapping[str, object], names: Mapping[str, str]) -> dict[str, str]:
    """Names of the runs; the run itself behind a name that two of them have."""
    counts = Counter(names.get(run, run) for run in runs)
    return {run: name if counts[name := names.get(run, run)] == 1 else f"{name} ({run})" for run in runs}


def _rows(documents: Sequence[CaseDocument], protocol: str, *, after: bool, deep: bool) -> Iterator[list[Cell]]:
    """A row for every length that occurs, and the sums."""
    lengths = [len(chain) for document in documents for chain in document.extras["chains"]]
    counts = Counter(str(length) if length <= MAX_STEPS else LONGER for length in lengths)
    counts[ALL] = len(lengths)
    for length in LENGTHS:
        if length != ALL and not counts[length]:
            continue
        name = "ifr" if length == ALL else f"ifr_{length}"
        cells: list[Cell] = [int(length) if length.isdigit() else length, counts[length]]
        for column in ("active", *(["active_after"] if after else [])):
            cells.append(_shown(total_scored(_values(documents, f"{name}_{column}_{protocol}"))))
        cells.append(_shown(pooled_mean(_values(documents, f"{name}_{protocol}"))))
        if deep:
            column = f"deep_edited_{protocol}" if length == ALL else f"deep_edited_{length}_{protocol}"
            cells.append("" if length == LONGER else _shown(mean_scored(_values(documents, column))))
        yield cells


def _efficacy(documents: Sequence[CaseDocument], run: str, case: str | None) -> str:
    """Efficacy of the same edits, if the files have it."""
    task, column = EFFICACY
    of_task = [one for one in documents if (one.task, one.run) == (task, run) and case in (None, one.case_id)]
    if not of_task:
        return f"no samples of {task}, so without efficacy."
    return f"efficacy ({column} of {task}) {_shown(mean_scored(_values(of_task, column)))}."


def _legend(protocol: str, *, after: bool, deep: bool) -> str:
    parts = [f"Protocol {protocol}. Active: R > 0, the product of the probabilities of a chain's answers."]
    parts += ["IFR is the mean over the chains that are active before the edit, each weighted by 1/sqrt(steps)."]
    parts += ["Deep edited up to n: share of edits after which no chain of at most n steps is active."] if deep else []
    parts += [] if after else ["A likelihood is never 0, so chains active after the edit are not counted."]
    return " ".join(parts)


def _values(documents: Sequence[CaseDocument], column: str) -> list[Any]:
    return [_value(document, column) for document in documents]


def _key(document: CaseDocument, column: str) -> str | None:
    """The key of a column of the final stage, in any filter pipeline."""
    return next((key for key in document.metrics if key.partition(",")[0] == column), None)


def _value(document: CaseDocument, column: str) -> Any:
    return document.metrics[key] if (key := _key(document, column)) else None


def _shown(value: float | None) -> Cell:
    return UNSCORED if value is None else value if isinstance(value, int) else round(value, 4)


SPEC = FigureSpec(
    name=NEEDS.figure,
    title="table: chains by length, those active before and after the edit, and IFR; of one edit or of a run",
    published="ThinkEdit tables 1 and 2",
    needs=NEEDS,
    draw=lambda inputs, options: draw(inputs.documents(), inputs.run_names(), options, inputs.rows()),
    options=("metric", "case"),
    is_table=True,
)
