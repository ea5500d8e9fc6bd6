"""Export to ``.eval`` logs of inspect (https://inspect.aisi.org.uk), for its viewer: one log per run and task."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edit_hooks.request import prompt_of
from edit_hooks.utils.errors import EditingError
from lm_edit.results.answers.documents import CaseDocument, SavedQuestion, SavedResponse, task_documents
from lm_edit.results.exports.options import ExportOptions, ExportResult
from lm_edit.results.files.runs import ResultFile
from lm_edit.results.filters import SAMPLE_FILE, filter_rows, places_of
from lm_edit.results.tables import Source, current_tasks, load_results, result_rows
from lm_eval_tasks.common.scoring.columns import is_number
from lm_eval_tasks.report.run_facts import slug

if TYPE_CHECKING:
    from inspect_ai.log import EvalLog, EvalSample

EXTRA = "inspect"


def export_inspect(paths: Source, out: Path, options: ExportOptions) -> ExportResult:
    """Write one log per run and task, with inspect's own writer; tasks without samples have results only.

    Raises:
        EditingError: without inspect_ai.
    """
    try:
        from inspect_ai.log import write_eval_log
    except ImportError:
        raise EditingError(f'export to inspect needs its package: pip install "lm-eval-editing[{EXTRA}]".') from None
    exported = ExportResult()
    wanted = places_of(filter_rows(load_results(paths), options.only), SAMPLE_FILE) if options.only else None
    for file, task in current_tasks(paths):
        if wanted is not None and (str(file.path), task) not in wanted:
            continue
        if file.sample_file(task) is None:
            exported.leave_out("no samples beside the result file: a log without cases")
        folder = out / file.facts.name
        folder.mkdir(parents=True, exist_ok=True)
        # inspect's own order of parts: date, task, id
        path = folder / f"{file.date_id}_{slug(task)}_{file.facts.run}.eval"
        write_eval_log(_log(file, task), str(path), format="eval")
        exported.files.append(path)
    return exported


def _log(file: ResultFile, task: str) -> EvalLog:
    from inspect_ai.log import EvalConfig, EvalDataset, EvalLog, EvalSpec, EvalStats

    rows = [row for row in result_rows(file) if row["task"] == task]
    documents = [] if file.sample_file(task) is None else list(task_documents(file, task))
    about = rows[0] if rows else {}
    spec = EvalSpec(
        created=file.date or "1970-01-01T00:00:00+00:00",
        run_id=file.facts.run,
        task=task,
        task_id=f"{file.facts.run}-{task}",
        task_attribs={"version": about.get("task_version", ""), "protocol": about.get("protocol", "")},
        dataset=EvalDataset(
            name=about.get("benchmark") or task,
            location=about.get("data"),
            samples=file.num_cases(task),
            sample_ids=[_sample_id(document) for document in documents],
        ),
        model=_model_name(file),
        config=EvalConfig(limit=int(file.facts.limit) if file.facts.limit and file.facts.limit >= 1 else None),
        packages={name: str(version) for name, version in _versions(file).items()},
        metadata={
            "run_name": file.facts.name,
            "editor": file.facts.editor,
            "mode": file.facts.mode,
            "settings": file.facts.settings,
            "editor_config": dict(file.facts.editor_config),
            "data": {name: about.get(name, "") for name in ("data", "data_revision", "data_hash")},
        },
    )
    return EvalLog(
        status="success",
        eval=spec,
        results=_results(rows, file.num_cases(task) or 0),
        stats=EvalStats(started_at=file.date, completed_at=file.date),
        samples=[_sample(document, file.facts.model) for document in documents] or None,
    )


def _model_name(file: ResultFile) -> str:
    """Class, model and editor: the viewer compares logs by this name, which one per model would give all editors."""
    return f"{file.content['config'].get('model')}/{file.facts.model}/{file.facts.editor_label or file.facts.editor}"


def _results(rows: Iterable[Mapping[str, Any]], num_cases: int) -> Any:
    from inspect_ai.log import EvalMetric, EvalResults, EvalScore

    scores = []
    for row in rows:
        numbers = {"value": row["value"], "stderr": row["stderr"]}
        companions = {
            name: row[name] for name in ("n", "excluded", "failed", "or_0", "coverage") if row[name] is not None
        }
        facts = {name: row[name] for name in ("population", "judge", "protocol", "role") if row[name]}
        scores.append(
            EvalScore(
                name=_score_name(row),
                scorer=row["filter"] or row["metric"],
                metrics={
                    name: EvalMetric(name=name, value=value)
                    for name, value in numbers.items()
                    if value is not None and math.isfinite(value)
                },
                metadata=companions
                | facts
                | ({} if row["value"] is not None else {"unscored": row["unscored_reason"]}),
            )
        )
    return EvalResults(total_samples=num_cases, completed_samples=num_cases, scores=scores)


def _sample(document: CaseDocument, model: str) -> EvalSample:
    from inspect_ai.log import EvalSample
    from inspect_ai.model import ChatMessageAssistant, ChatMessageUser, ModelOutput
    from inspect_ai.scorer import Score

    messages: list[Any] = []
    for question in document.questions:
        messages.append(ChatMessageUser(content=question.prompt))
        messages.append(ChatMessageAssistant(content=_answer_text(question)))
    first = document.questions[0] if document.questions else None
    return EvalSample(
        id=_sample_id(document),
        epoch=1,
        input=_edits_text(document) or (first.prompt if first else ""),
        target=first.wanted if first else "",
        messages=messages,
        output=ModelOutput.from_content(model, messages[1].content if first else ""),
        scores={
            name: Score(value=float(value), explanation=document.reasons.get(name))
            for name, value in document.metrics.items()
            if is_number(value) and math.isfinite(value)
        },
        metadata={
            "case_id": document.case_id,
            "category": document.category,
            "edits": [dict(edit) for edit in document.edits],
            "edit_report": dict(document.report),
            "unscored": dict(document.reasons),
        },
    )


def _answer_text(question: SavedQuestion) -> str:
    """What the models answered, stage by stage, with the unedited model's answer."""
    lines = [
        (f"[{stage}] " if stage else "") + response_text(question, response)
        for stage, response in question.answers.items()
    ]
    if question.unedited is not None:
        lines.append(f"[unedited model] {response_text(question, question.unedited)}")
    return "\n".join(lines)


def response_text(question: SavedQuestion, response: SavedResponse) -> str:
    """One answer: a text, a likelihood, or why there is none."""
    if response.failure is not None:
        return f"(no answer: {response.failure})"
    if response.similarity is not None:
        return f"edited and unedited model: {response.similarity}"
    if question.target is not None:
        greedy = ", the likeliest continuation" if response.is_greedy else ""
        return f"log P({question.target!r}) = {response.logprob:.4f}{greedy}"
    return response.text or ""


def _edits_text(document: CaseDocument) -> str:
    """The case's edits, one per line; "" without one."""
    texts = []
    for edit in document.edits:
        texts.append(f"Edit: {prompt_of(edit)} -> {edit.get('target_new')}")
    return "\n".join(texts)


def _score_name(row: Mapping[str, Any]) -> str:
    return (f"{row['metric']}@{row['stage']}" if row["stage"] else row["metric"]) + f",{row['filter']}"


def _sample_id(document: CaseDocument) -> str:
    """Unique in its task: records may share their id."""
    return f"{document.doc_id}: {document.case_id}"


def _versions(file: ResultFile) -> Mapping[str, Any]:
    own = (file.content["config"].get("edited_hf") or {}).get("versions") or {}
    return own or {"lm_eval": file.content.get("lm_eval_version", "")}
