"""Generated answers from lm-eval's sample files (``--log_samples``)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from edit_hooks.answers import FORMAT, EditedAnswer, FailedAnswer, GeneratedText, ModelAnswer, ModelResult
from edit_hooks.decoding import Decoding
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.logs import get_logger
from edit_hooks.utils.storage.json_io import parse_json, read_rows
from judges.base import Item
from lm_edit.results.answers.sample_files import SampleFile, current_sample_files
from lm_edit.results.files.sample_rows import read_samples
from lm_edit.results.files.shape import as_saved
from lm_eval_tasks.common.asking.answers import NOT_IN_STREAM, Answer, read_answer, unedited_answer, why_no_answer
from lm_eval_tasks.common.asking.generation import stop_strings
from lm_eval_tasks.common.asking.probes import NO_GOLD, NO_QUESTION, case_requests, why_not_judged
from lm_eval_tasks.common.records.cases import NEIGHBORHOOD
from lm_eval_tasks.common.scoring.population import PRE_EDIT

log = get_logger(__name__)

FINAL_STAGE = ""


class SavedAnswer(NamedTuple):
    """One generated answer of a sample file.

    Attributes:
        source: the file with its task and run.
        case: index of the document in its task.
        stage: stage of a stream; "" for the final answer.
        is_helper: the answer of a helper probe, which tests whether the unedited model answers correctly (the
            published filter); not a result itself.
        item: question, gold answer and answer; the answer is empty if there is a ``failure``.
        failure: why there is nothing to judge.
    """

    source: SampleFile
    case: int
    stage: str
    is_helper: bool
    item: Item
    failure: str | None = None


def read_saved_answers(paths: Sequence[str], *, locality: bool = False) -> list[SavedAnswer]:
    """Read all generated answers in files or folders.

    Accepted are lm-eval's sample files of editing tasks and of other generating tasks (one answer per document, as
    returned by the task's first filter), and plain JSONL with ``question``, ``gold`` (a text or a list of accepted
    texts) and ``answer``. Which files count: :func:`~lm_edit.results.answers.sample_files.current_sample_files`.

    Args:
        paths: files, or folders that are searched for ``samples_*.jsonl``.
        locality: include locality tasks, whose answers are otherwise compared with the unedited model's only.

    Raises:
        EditingError: for missing and unreadable files, for samples that are not as the run left them, and when there is
            no answer to judge.
    """
    answers: list[SavedAnswer] = []
    for source in current_sample_files(paths):
        of_file: list[SavedAnswer] = []
        seen: set[int] = set()
        for number, (where, row) in enumerate(_rows(source)):
            if "resps" not in row:
                of_file.append(_from_plain_row(row, source, number, where))
            elif row["doc_id"] not in seen:  # a sample file repeats the answers for each filter of the task
                seen.add(row["doc_id"])
                of_file += _from_sample(row, source, where, locality)
        if any(answer.failure not in (NO_QUESTION, NO_GOLD) for answer in of_file):  # not so in a task of fluency
            answers += of_file
    if not answers:
        raise EditingError(
            f"no answers to judge in {', '.join(paths)}: likelihood tasks have none, texts of fluency tasks have no "
            "gold answer, and answers of locality tasks are compared with the unedited model (--locality judges them "
            "all the same)."
        )
    return answers


def _rows(source: SampleFile) -> list[tuple[str, Mapping[str, Any]]]:
    """The rows of a file: samples of lm-eval as its run left them, or plain rows."""
    rows = read_rows(source.path, "file of answers", finite=False, halves="replace")
    for where, row in rows:
        if not isinstance(row, Mapping):
            raise EditingError(f"{where}: the row is a {type(row).__name__}; an object is needed.")
    if source.expected is None and not any("resps" in row for _, row in rows):
        return rows
    if source.expected is None:
        log.warning(
            "%s has no readable result file beside it, so it is unknown whether samples are missing; keep the files of "
            "a run together.", source.path
        )  # fmt: skip
    return read_samples(Path(source.path), source.expected)


def _from_plain_row(row: Mapping[str, Any], source: SampleFile, number: int, where: str) -> SavedAnswer:
    gold = row.get("gold")
    golds = gold if isinstance(gold, list) else [gold]
    if not golds or not all(isinstance(text, str) for text in [row.get("question"), row.get("answer"), *golds]):
        raise EditingError(f"{where}: neither a sample of lm-eval nor a row with the texts question, gold and answer.")
    item = Item(str(row["question"]), str(golds[0]), str(row["answer"]), tuple(map(str, golds[1:])))
    return SavedAnswer(source, number, FINAL_STAGE, False, item)


def _from_sample(row: Mapping[str, Any], source: SampleFile, where: str, locality: bool) -> Iterator[SavedAnswer]:
    with as_saved(f"{where}: not a sample as lm-eval saves it"):
        if "probes" in row["doc"]:
            if locality or row["doc"]["probes"][0]["kind"] != NEIGHBORHOOD:
                yield from _from_case(row, source)
        elif isinstance(row["filtered_resps"][0], str):
            prompt = row["arguments"]["gen_args_0"]["arg_0"]
            item = Item(str(row["doc"].get("question") or prompt), str(row["target"]), row["filtered_resps"][0].strip())
            yield SavedAnswer(source, row["doc_id"], FINAL_STAGE, False, item)


def _from_case(row: Mapping[str, Any], source: SampleFile) -> Iterator[SavedAnswer]:
    """The generated answers of a case of an editing task.

    In a stream, there is one for every stage with a column of its own.
    """
    for number, request in enumerate(case_requests(row["doc"])):
        probe = request.probe
        is_helper = probe.kind == PRE_EDIT
        if request.target is not None or (probe.only_unedited and not is_helper):
            continue  # nothing generated, or another fact about the unedited model, as the old answers of MQuAKE
        stops = saved_stops(row["arguments"][f"gen_args_{number}"]["arg_1"], request.decoding)
        fixed = request.decoding is not None and request.decoding.length_of is not None
        response = read_saved_response(row["resps"][number][0])
        for stage, at_stage in answers_by_stage(response, source.scores_outside):
            if is_helper and stage != FINAL_STAGE:
                continue  # the unedited model's answer is the same at every stage
            answer = read_answer(at_stage, stops, fixed_length=fixed)
            if is_helper:
                answer = unedited_answer(answer)
            text = answer.text.strip() if isinstance(answer, GeneratedText) else ""
            item = Item(probe.question, probe.gold, text)
            failure = why_not_judged(row["doc"], probe.kind, probe.gold) or _failure(answer)
            yield SavedAnswer(source, row["doc_id"], stage, is_helper, item, failure)


def saved_stops(arguments: Mapping[str, Any], decoding: Decoding | None) -> list[str]:
    """The strings at which the run has cut a saved answer.

    Args:
        arguments: the request's ``generation_kwargs``, which name those of the task also where a text fixes the length.
        decoding: the question's own settings.
    """
    until = arguments.get("until") or []
    return stop_strings(decoding, [until] if isinstance(until, str) else until)


def answers_by_stage(
    response: ModelResult | str, scores_outside: bool
) -> Iterator[tuple[str, ModelResult | ModelAnswer | FailedAnswer | str]]:
    """Yield the stages of a response that have a column of their own, each with its answer; the final one first.

    Args:
        scores_outside: a case that is not among the run's edits has an answer, too.
    """
    if isinstance(response, str) or response.position is None:
        yield FINAL_STAGE, response
        return
    if response.position.not_in_stream and not scores_outside:
        yield FINAL_STAGE, FailedAnswer(NOT_IN_STREAM)
        return
    yield FINAL_STAGE, response
    yield from ((stage, answer) for stage, answer in response.stages.items() if isinstance(stage, str))


def _failure(answer: Answer) -> str | None:
    if isinstance(answer, GeneratedText):
        return why_no_answer(answer)
    return answer.reason if isinstance(answer, FailedAnswer) else f"the answer is a {type(answer).__name__}"


_PREFIX = json.dumps({"format": FORMAT})[:-1]  # the beginning of the JSON text of an EditedAnswer


def read_saved_response(saved: str, *, with_report: bool = True) -> ModelResult | str:
    """Parse a response of a sample file.

    It is the JSON text of an `edited_hf` answer. Any other text is returned unchanged.

    Args:
        with_report: read the report on the edit, too, which the sample itself has as well.
    """
    if not saved.startswith(_PREFIX):
        return saved
    record = parse_json(saved, "a saved answer", finite=False, halves="replace")
    return EditedAnswer.from_json(record, with_report=with_report)
