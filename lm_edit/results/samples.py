"""Answers in files that lm-eval saved (``--log_samples``), for judging them again without generating them again."""

from __future__ import annotations



import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from edit_hooks.utils.errors import EditingError
from judges.base import Item
from lm_eval_tasks.common.answers import NEEDS_EDITED_HF
from lm_eval_tasks.common.answers import Answer
from lm_eval_tasks.common.answers import Failed
from lm_eval_tasks.common.answers import Generation
from lm_eval_tasks.common.answers import read_answer
from lm_eval_tasks.common.probes import CaseAnswers
from lm_eval_tasks.common.dataset import read_rows
from lm_eval_tasks.common.stages import IMMEDIATE
from lm_eval_tasks.common.stages import OUTSIDE
from lm_eval_tasks.common.stages import read_place

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
        for stage, raw in _stages(read_saved_response(row["resps"][number][0])):
            if helper and stage:
                continue
            answer = _shown(read_answer(raw, [stops] if isinstance(stops, str) else stops), helper)
            item = Item(probe["question"], probe["gold"], answer.text.strip() if isinstance(answer, Generation) else "")
            yield SavedAnswer(task, row["doc_id"], stage, helper, item, _why_not(answer))


def _stages(raw: Any) -> Iterator[tuple[str, Any]]:
    place = read_place(raw)
    if place is not None and place.outside:
        yield FINAL, Failed(OUTSIDE)
        return
    yield FINAL, raw
    if place is not None:
        if IMMEDIATE in raw["stream"]:
            yield IMMEDIATE, raw["stream"][IMMEDIATE]
        yield from (raw["stream"].get("checkpoints") or {}).items()


def _shown(answer: Answer, helper: bool) -> Answer:
    if not helper or not isinstance(answer, Generation):
        return answer
    return answer.unedited or Failed(NEEDS_EDITED_HF.format(what="the unedited model's answers"))


def _why_not(answer: Answer) -> str | None:
    if isinstance(answer, Generation):
        return None
    return answer.reason if isinstance(answer, Failed) else f"the answer is a {type(answer).__name__}"


_FIELDS = {"text", "error"}


def read_saved_response(saved: Any) -> Any:
    """A response as the model gave it: lm-eval saves the mappings of `edited_hf` as Python literals in a string.

    Literals only are read, never code. A text that merely looks like one is left a text.
    """
    if not isinstance(saved, str) or not saved.startswith("{"):
        return saved
    try:
        found = ast.literal_eval(_WithoutOddNumbers().visit(ast.parse(saved, mode="eval")))
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return saved
    return found if isinstance(found, dict) and _FIELDS & set(found) else saved


class _WithoutOddNumbers(ast.NodeTransformer):
    """Replaces nan, inf and -inf, which Python writes but has no literals for, by None."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(None) if node.id in ("nan", "inf") else node

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.expr:
        odd = isinstance(node.operand, ast.Name) and node.operand.id == "inf"
        return ast.Constant(None) if odd else node
