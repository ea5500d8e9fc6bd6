"""Cases of a run with their questions and answers, for a look at single cases."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple, TypeAlias

import pandas as pd

from edit_hooks.answers import EditedAnswer, FailedAnswer, GeneratedText, ScoredContinuation, StateSimilarity
from edit_hooks.utils.storage.json_io import json_text
from edit_hooks.utils.text.readable import readable
from lm_edit.results.answers.samples import FINAL_STAGE, answers_by_stage, read_saved_response, saved_stops
from lm_edit.results.files.runs import ResultFile, Samples
from lm_edit.results.files.shape import as_saved
from lm_edit.results.files.task_facts import TaskFacts
from lm_edit.results.schema import CASE_COLUMNS
from lm_edit.results.tables import ResultSet, Source, current_cases, make_frame
from lm_eval_tasks.common.asking.answers import NOT_FINITE, Answer, read_answer
from lm_eval_tasks.common.asking.probes import case_requests
from lm_eval_tasks.common.scoring.columns import SUMMARIES, read_columns, split_stage

READ_FIELDS = ("case_id", "category", "edit_requests", "probes")  # of a document, with attributes of their own


@dataclass(frozen=True, kw_only=True)
@readable
class SavedResponse:
    """One answer of a model, as far as it was saved.

    Attributes:
        text: generated text up to its natural stop; ``None`` for a scored continuation, and without an answer.
        raw: generated text with what follows the stop.
        thought: text of the thought before the answer.
        logprob: log-probability of the continuation in nats. num_tokens: its number of tokens.
        is_greedy: the continuation is the most likely one.
        similarity: of edited and unedited model, where their states or distributions are compared, as text.
        failure: why there is no answer.
    """

    text: str | None = None
    raw: str | None = None
    thought: str | None = None
    logprob: float | None = None
    num_tokens: int | None = None
    is_greedy: bool | None = None
    similarity: str | None = None
    failure: str | None = None


@dataclass(frozen=True, kw_only=True)
@readable
class SavedQuestion:
    """One request of a case: a continuation that was scored, or a text that was generated.

    Attributes:
        kind: kind of the probe; "" for lm-eval's own tasks.
        prompt: the text shown to the model. wanted: the gold answer.
        target: the continuation that was scored; ``None`` for a generation.
        draw: number of the generation, where there are several.
        answers: stage -> answer of the edited model; "" is the final stage.
        unedited: the unedited model's answer, if it was asked.
    """

    kind: str
    prompt: str
    wanted: str
    target: str | None
    draw: int = 0
    answers: Mapping[str, SavedResponse] = field(default_factory=dict)
    unedited: SavedResponse | None = None


@dataclass(frozen=True, kw_only=True)
@readable
class CaseDocument:
    """One case of a task in a run.

    The documents of a run are distinguished by task, version, data, protocol and ``doc_id``: settings of a task and a
    chat template are not part of the run.

    Attributes:
        file: path of the newest result file that has the case. task_version, data_hash, protocol: of its result, as in
            ``load_results``. judge: of its verdicts, "" without any.
        edits: the case's edits (prompt, subject, target_new, target_true, ...), as in the documents.
        metrics: ``<metric>[@<stage>],<filter>`` -> value; ``None`` is unscored.
        reasons: the same keys -> why a value is missing.
        report: facts about the edit (final_loss, seconds, error, ...); empty without an edit.
        extras: the other fields of the document, such as the chains of a KnowGIC case.
    """

    run: str
    file: str
    task: str
    task_version: str
    data_hash: str
    protocol: str
    judge: str
    doc_id: int
    case_id: str
    category: str
    edits: Sequence[Mapping[str, Any]]
    questions: Sequence[SavedQuestion]
    metrics: Mapping[str, Any]
    reasons: Mapping[str, str]
    report: Mapping[str, Any]
    extras: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The document as plain JSON values."""
        return asdict(self)


def load_documents(
    paths: Source, *, require_samples: bool = True, places: Collection[tuple[str, ...]] | None = None
) -> Iterator[CaseDocument]:
    """Yield the cases of all runs, task by task; of the files that ``load_results`` uses.

    A case that several files have, as with two judges, comes once: as the newest file has it, with the scores of older
    files that it lacks.

    Args:
        require_samples: as of ``load_cases``.
        places: (file, task) of the results whose cases are wanted, as in rows of ``load_results``; ``None``: all.

    Raises:
        EditingError: as ``load_cases``.
    """
    current = ResultSet.of(paths)
    for group in _same_results(current, places, require_samples):
        yield from _documents(current, [_read(*place) for place in group])


SampleGroup: TypeAlias = "list[tuple[ResultFile, str]]"


def sample_groups(results: ResultSet, places: Collection[tuple[str, ...]]) -> list[SampleGroup]:
    """What :func:`cases_and_documents` reads at once: the files that have samples of a task of a run.

    Args:
        places: (file, task) of the results whose cases are wanted; those without samples are left out.
    """
    return _same_results(results, places, require_samples=False)


def cases_and_documents(results: ResultSet, group: SampleGroup) -> tuple[pd.DataFrame, list[CaseDocument]]:
    """What :func:`~lm_edit.results.tables.load_cases` and :func:`load_documents` return of one task of a run.

    Each sample file is read once.
    """
    parts = [_read(*place) for place in group]
    rows = [row for part in parts for row in current_cases(results, *part)]
    return make_frame(rows, CASE_COLUMNS), list(_documents(results, parts))


class _Part(NamedTuple):
    """A task of a result file with its samples."""

    file: ResultFile
    task: str
    samples: Samples


def _read(file: ResultFile, task: str) -> _Part:
    return _Part(file, task, file.samples(task))


def _same_results(
    current: ResultSet, places: Collection[tuple[str, ...]] | None, require_samples: bool
) -> list[list[tuple[ResultFile, str]]]:
    """Tasks whose cases are the same, as with two judges: the files that have them, oldest first."""
    of_result: dict[tuple[str, ...], list[tuple[ResultFile, str]]] = {}
    for file, task in current.places:
        if places is not None and (str(file.path), task) not in places:
            continue
        if file.num_cases(task) is not None and (require_samples or file.sample_file(task) is not None):
            about = TaskFacts(file, task)
            names = (file.facts.run, task, *(about.columns[name] for name in ("task_version", "data_hash")))
            of_result.setdefault((*names, about.protocol), []).append((file, task))
    return list(of_result.values())


def _documents(current: ResultSet, parts: Sequence[_Part]) -> Iterator[CaseDocument]:
    """The cases of the newest of these files, with the scores of older ones that it lacks."""
    *older, newest = parts
    missing = _scores_of(current, older)
    for document in task_documents(*newest):
        metrics, reasons = missing.get(document.doc_id, ({}, {}))
        added = {key: reason for key, reason in reasons.items() if key not in document.metrics}
        yield (
            replace(document, metrics={**metrics, **document.metrics}, reasons={**added, **document.reasons})
            if metrics
            else document
        )


def _scores_of(current: ResultSet, parts: Sequence[_Part]) -> dict[int, tuple[dict[str, Any], dict[str, str]]]:
    """Document -> scores that no newer file has, and reasons of missing ones."""
    found: dict[int, tuple[dict[str, Any], dict[str, str]]] = {}
    for part in parts:
        about = TaskFacts(part.file, part.task)
        for document in task_documents(*part):
            metrics, reasons = found.setdefault(document.doc_id, ({}, {}))
            for key, value in document.metrics.items():
                name, _, pipeline = key.partition(",")
                if current.counts(part.file, about, split_stage(name)[0], pipeline):
                    metrics[key] = value
                    reasons |= {key: document.reasons[key]} if key in document.reasons else {}
    return found


def task_documents(file: ResultFile, task: str, samples: Samples | None = None) -> Iterator[CaseDocument]:
    """Yield the cases of one task of a run.

    Args:
        samples: of the task, if they were read.
    """
    about = TaskFacts(file, task)
    of_task = {name: about.columns[name] for name in ("task_version", "data_hash")}
    of_task |= {"run": file.facts.run, "file": str(file.path), "protocol": about.protocol, "judge": about.judge}
    by_doc: dict[int, list[tuple[str, Mapping[str, Any]]]] = {}
    for where, sample in file.samples(task) if samples is None else samples:
        by_doc.setdefault(sample["doc_id"], []).append((where, sample))
    for doc_id, own in by_doc.items():
        where, first = own[0]
        with as_saved(f"{where}: not a sample as lm-eval saves it"):
            doc = first["doc"] if isinstance(first["doc"], Mapping) else {}
            metrics, reasons = _metrics([sample for _, sample in own], about.metrics)
            document = CaseDocument(
                task=task,
                **of_task,
                doc_id=doc_id,
                case_id=str(doc.get("case_id", doc_id)),
                category=str(doc.get("category") or ""),
                edits=doc.get("edit_requests") or [],
                questions=list(_questions(first, doc, about.scores_outside)),
                metrics=metrics,
                reasons=reasons,
                report=next((sample["edit"] for _, sample in own if sample.get("edit")), {}),
                extras={name: value for name, value in doc.items() if name not in READ_FIELDS},
            )
        yield document


def _metrics(
    samples: Sequence[Mapping[str, Any]], declared: Mapping[str, object]
) -> tuple[dict[str, Any], dict[str, str]]:
    metrics, reasons = {}, {}
    for sample in samples:
        named = {name: sample[name] for name in sample["metrics"] if name not in SUMMARIES}
        for column in read_columns(named, declared):
            key = f"{column.name},{sample['filter']}"
            metrics[key] = column.value
            if reason := (sample.get("unscored_reason") or {}).get(column.name):
                reasons[key] = reason
    return metrics, reasons


def _questions(sample: Mapping[str, Any], doc: Mapping[str, Any], scores_outside: bool) -> Iterator[SavedQuestion]:
    """The requests of a case of an editing task, or those of an ordinary document."""
    arguments = list(sample["arguments"].values())
    if "probes" not in doc:
        for number, argument in enumerate(arguments):
            target = argument.get("arg_1")
            target = target if isinstance(target, str) else None
            stock = _response(_stock_answer(sample["resps"][number][0], target is not None, ()))
            yield SavedQuestion(
                kind="",
                prompt=_prompt(argument),
                wanted=str(sample["target"]),
                target=target,
                answers={FINAL_STAGE: stock},
            )
        return
    for number, request in enumerate(case_requests(doc)):
        probe, argument = request.probe, arguments[number]
        stops = [] if request.target is not None else saved_stops(argument["arg_1"], request.decoding)
        saved = sample["resps"][number][0]
        response = read_saved_response(saved, with_report=False) if isinstance(saved, str) else saved
        answers: dict[str, Answer] = {}
        if isinstance(response, EditedAnswer):
            stages = answers_by_stage(response, scores_outside)
            answers = {stage: read_answer(answer, stops) for stage, answer in stages}
        else:
            answers = {FINAL_STAGE: _stock_answer(response, request.target is not None, stops)}
        unedited = getattr(answers[FINAL_STAGE], "unedited", None)
        yield SavedQuestion(
            kind=probe.kind,
            prompt=_prompt(argument),
            wanted=probe.gold,
            target=request.target,
            draw=request.draw,
            answers={} if probe.only_unedited else {stage: _response(answer) for stage, answer in answers.items()},
            unedited=None if unedited is None else _response(unedited),
        )


def _prompt(argument: Mapping[str, Any]) -> str:
    """The text shown to the model; classes for chat servers have a list of messages in its place."""
    prompt = argument["arg_0"]
    return prompt if isinstance(prompt, str) else json_text(prompt)


def _stock_answer(saved: object, is_scored: bool, stops: Sequence[str]) -> Answer:
    """The answer of a stock model class: a text, or log-probability and greediness, which lm-eval saves as texts."""
    if not is_scored:
        return read_answer(str(saved), stops)
    if isinstance(saved, Sequence) and not isinstance(saved, str) and len(saved) == 2:
        return ScoredContinuation(logprob=float(saved[0]), is_greedy=str(saved[1]) == "True")
    return FailedAnswer(f"unreadable answer of type {type(saved).__name__}")


def _response(answer: Answer) -> SavedResponse:
    if isinstance(answer, GeneratedText) and not answer.is_finite:
        return SavedResponse(raw=answer.raw, thought=answer.thought, failure=NOT_FINITE)
    if isinstance(answer, GeneratedText):
        return SavedResponse(text=answer.text, raw=answer.raw, thought=answer.thought)
    if isinstance(answer, ScoredContinuation):
        logprob = answer.logprob if math.isfinite(answer.logprob) else None
        failure = None if logprob is not None else f"log-probability is {answer.logprob}"
        return SavedResponse(
            logprob=logprob,
            num_tokens=answer.num_tokens,
            is_greedy=answer.is_greedy,
            failure=failure if answer.is_finite else NOT_FINITE,
        )
    if isinstance(answer, StateSimilarity):
        return SavedResponse(similarity=str(answer))
    reason = answer.reason if isinstance(answer, FailedAnswer) else f"the answer is a {type(answer).__name__}"
    return SavedResponse(failure=reason)
