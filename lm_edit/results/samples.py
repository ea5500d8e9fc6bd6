"""Answers from lm-eval's sample files (``--log_samples``), for judging them again without generating them again."""

from __future__ import annotations



import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from edit_hooks.utils.errors import EditingError
from edit_hooks.answers import FORMAT, EditedAnswer, FailedAnswer, GeneratedText
from judges.base import Item
from lm_eval_tasks.common.answers import NEEDS_EDITED_HF, Answer, read_answer
from lm_eval_tasks.common.stages import IMMEDIATE, NOT_IN_STREAM
from lm_eval_tasks.common.probes import CaseAnswers
from lm_eval_tasks.common.dataset import read_rows

FINAL = ""


LOCALITY = "neighborhood"


class SavedAnswer(NamedTuple):
    """One answer to judge.

    Args:
        task: the task it belongs to; the file's name for plain rows.
        case: the document's number in its task.
        stage: of a stream, "" for the final answer.
        helper: it says whether the unedited model knew the edited question (the published filter), and is no result.
        item: question, gold answer and answer; of an unusable answer ``item.answer`` is empty.
        failed: why there is nothing to judge.
    """

    task: str
    case: int
    stage: str
    helper: bool
    item: Item
    failed: str | None = None


def read_saved(paths: Sequence[str], *, locality: bool = False) -> list[SavedAnswer]:
    """All generated answers in files or folders.

    Read are lm-eval's sample files of our tasks and of other generating tasks (one answer each, read by the task's
    first filter), and plain JSONL with ``question``, ``gold`` (a text or a list of accepted texts) and ``answer``.

    Args:
        paths: files, or folders that are searched for ``samples_*.jsonl``.
        locality: also those of locality tasks, which compare with the unedited model and not with a gold answer.

    Raises:
        EditingError: for missing and unreadable files, and when there is no answer to judge.
    """
    found: list[SavedAnswer] = []
    for path in _files(paths):
        seen: set[int] = set()
        for number, (where, row) in enumerate(read_rows(path)):
            if not isinstance(row, Mapping):
                raise EditingError(f"{where}: the row is a {type(row).__name__}; an object is needed.")
            if "resps" not in row:
                found.append(_plain(row, path.stem, number, where))
            elif row["doc_id"] not in seen:  # each filter of a task saves the same answers again
                seen.add(row["doc_id"])
                found += _of_sample(row, _task_of(path), where, locality)
    if not found:
        raise EditingError(
            f"no answers to judge in {', '.join(paths)}: likelihood tasks have none, and those of locality tasks are "
            "compared with the unedited model (--locality judges them all the same)."
        )
    return found


def _files(paths: Sequence[str]) -> Iterator[Path]:
    for name in paths:
        path = Path(name).expanduser()
        if path.is_dir():
            inside = sorted(path.rglob("samples_*.jsonl"))
            if not inside:
                raise EditingError(f"no samples_*.jsonl in {path}; run lm_eval with --log_samples --output_path.")
            yield from inside
        elif path.is_file():
            yield path
        else:
            raise EditingError(f"there is no file or folder {path}.")


def _task_of(path: Path) -> str:
    return re.sub(r"_\d{4}-\d\d-\d\dT[\d.\-]+$", "", path.stem.removeprefix("samples_"))


def _plain(row: Mapping[str, Any], task: str, number: int, where: str) -> SavedAnswer:
    golds = row.get("gold")
    golds = [golds] if isinstance(golds, str) else golds
    texts = [row.get("question"), row.get("answer"), *(golds if isinstance(golds, list) else [None])]
    if not golds or not all(isinstance(text, str) for text in texts):
        raise EditingError(f"{where}: neither a sample of lm-eval nor a row with the texts question, gold and answer.")
    assert isinstance(golds, list)
    return SavedAnswer(task, number, FINAL, False, Item(row["question"], golds[0], row["answer"], tuple(golds[1:])))


def _of_sample(row: Mapping[str, Any], task: str, where: str, locality: bool) -> Iterator[SavedAnswer]:
    try:
        if "probes" in row["doc"]:
            if locality or row["doc"]["probes"][0]["kind"] != LOCALITY:
                yield from _of_case(row, task)
        elif isinstance(row["filtered_resps"][0], str):
            prompt = row["arguments"]["gen_args_0"]["arg_0"]
            item = Item(str(row["doc"].get("question") or prompt), str(row["target"]), row["filtered_resps"][0].strip())
            yield SavedAnswer(task, row["doc_id"], FINAL, False, item)
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise EditingError(f"{where}: not a sample as lm-eval saves it ({type(error).__name__}: {error}).") from None


def _of_case(row: Mapping[str, Any], task: str) -> Iterator[SavedAnswer]:
    """The generated answers of a case of our tasks, at every stage of a stream that has a text."""
    for number, (_, probe, target) in enumerate(CaseAnswers.asked(row["doc"])):
        if target is not None:
            continue
        helper = bool(probe.get("only_unedited"))
        stops = row["arguments"][f"gen_args_{number}"]["arg_1"].get("until") or []
        for stage, response in _answers_by_stage(read_saved_response(row["resps"][number][0])):
            if helper and stage:
                continue
            answer = _answer_to_judge(read_answer(response, [stops] if isinstance(stops, str) else stops), helper)
            text = answer.text.strip() if isinstance(answer, GeneratedText) else ""
            item = Item(probe["question"], probe["gold"], text)
            yield SavedAnswer(task, row["doc_id"], stage, helper, item, _reason_against_judging(answer))


def _answers_by_stage(response: EditedAnswer | str) -> Iterator[tuple[str, Any]]:
    if isinstance(response, str) or response.position is None:
        yield FINAL, response
        return
    if response.position.not_in_stream:
        yield FINAL, FailedAnswer(NOT_IN_STREAM)
        return
    yield FINAL, response
    if response.immediate is not None:
        yield IMMEDIATE, response.immediate
    yield from ((str(number), answer) for number, answer in response.checkpoints.items())


def _answer_to_judge(answer: Answer, helper: bool) -> Answer:
    """The answer, of helper probes the unedited model's."""
    if not helper or not isinstance(answer, GeneratedText):
        return answer
    return answer.unedited or FailedAnswer(NEEDS_EDITED_HF.format(what="the unedited model's answers"))


def _reason_against_judging(answer: Answer) -> str | None:
    if isinstance(answer, GeneratedText):
        return None
    return answer.reason if isinstance(answer, FailedAnswer) else f"the answer is a {type(answer).__name__}"


_PREFIX = json.dumps({"format": FORMAT})[:-1]  # how the JSON text of an EditedAnswer begins
_RELEASE_0_1 = re.compile(r"\{'(text|logprob|error)': ")


def read_saved_response(saved: str) -> EditedAnswer | str:
    """A response from a sample file: an answer of `edited_hf` from its JSON text, any other text as it stands.

    Raises:
        EditingError: for answers that release 0.1.0 of this package saved, as Python literals.
    """
    if _RELEASE_0_1.match(saved):
        raise EditingError(
            "these samples were saved by release 0.1.0 of lm-eval-editing, in a format that is no longer read. Run the "
            "evaluation again (finished edits come from the store), or judge them with that release."
        )
    return EditedAnswer.from_json(json.loads(saved)) if saved.startswith(_PREFIX) else saved
