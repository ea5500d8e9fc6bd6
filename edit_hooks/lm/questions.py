"""Questions of lm-eval's requests, read before the weights are loaded."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from lm_eval.api.instance import Instance

from edit_hooks.answers import (
    ContextReport,
    FailedAnswer,
    GeneratedText,
    ModelAnswer,
    ModelResult,
    ScoredContinuation,
)
from edit_hooks.decoding import AskedModel
from edit_hooks.inference.items import GenerateItem, StateItem
from edit_hooks.lm.asking.item_builder import ItemBuilder
from edit_hooks.lm.editing.unusable import warn_of_unusable
from edit_hooks.lm.sessions import CaseQuestion
from edit_hooks.modeling.forward.positions import Room
from edit_hooks.prompt_context import PromptContext
from edit_hooks.request import EditRequest, InTurn, RequestGroup, require_compatible
from edit_hooks.utils.errors import EditingError, UnusableRequestError
from edit_hooks.utils.logs import get_logger

log = get_logger("lm_eval.edited_hf")

STATES_UNDER_CONTEXTS = FailedAnswer(
    "edits of this run are text before the prompt, here or of a second model; hidden states and distributions are "
    "compared after the same text",
    is_failure=False,
)


def read_questions(
    requests: Sequence[Instance], builder: ItemBuilder, edit_context: PromptContext, *, in_prompts: bool
) -> list[CaseQuestion | FailedAnswer]:
    """The question of each request; for one that the model cannot be asked, the reason.

    A document whose ``unusable`` is set has no usable text: that is the reason. The edits of one whose ``edit_in_turn``
    is set are written one after another (:class:`~edit_hooks.request.InTurn`).

    Args:
        edit_context: text around the prompts in which edits are made.
        in_prompts: the run's edits are, at least in part, text before the prompts.

    Raises:
        EditingError: for edit requests that violate the schema, generation settings that are not accepted, and edits in
            prompts that are chats of a document's own (``own_chat`` names the setting).
    """
    validated: dict[str, EditRequest] = {}  # every instance of a case repeats the case's requests
    questions: list[CaseQuestion | FailedAnswer] = []
    for request in requests:
        if in_prompts and (own := request.doc.get("own_chat")):
            raise EditingError(
                f"{own} writes each question as a chat of its own, into which no text of an edit can be put. Choose "
                "another context of the questions, or an editor that changes weights or activations."
            )
        if reason := request.doc.get("unusable"):
            questions.append(FailedAnswer(reason))
            continue
        edits = []
        for record in request.doc["edit_requests"]:
            key = json.dumps(record, sort_keys=True)
            if key not in validated:
                edit = EditRequest.from_dict(record, where=str(request.task_name))
                validated[key] = edit.in_context(edit_context)
            edits.append(validated[key])
        group = _group(edits, request)
        try:
            item, num_cut = builder.from_instance(request)
        except UnusableRequestError as error:
            questions.append(FailedAnswer(str(error)))
        else:
            if in_prompts and isinstance(item, StateItem):
                questions.append(STATES_UNDER_CONTEXTS)
                continue
            questions.append(CaseQuestion(item, group, _asked_model(request.doc), cut=num_cut > 0))
    return questions


def _group(edits: Sequence[EditRequest], request: Instance) -> RequestGroup:
    in_turn = request.doc.get("edit_in_turn", False)
    if not isinstance(in_turn, bool):
        raise EditingError(f"{request.task_name}: a document has edit_in_turn={in_turn!r}; true or false is needed.")
    group = InTurn(edits) if in_turn else tuple(edits)
    require_compatible(group, str(request.task_name))
    return group


def _asked_model(doc: Mapping[str, Any]) -> AskedModel:
    """The model that is asked; without ``asked``, both if the document's ``ask_unedited`` is set."""
    asked: AskedModel = doc.get("asked", {}).get("model") or ("both" if doc.get("ask_unedited") else "edited")
    if asked not in get_args(AskedModel):
        raise EditingError(f"a document asks the model {asked!r}; {', '.join(get_args(AskedModel))} are accepted.")
    return asked


def with_cut(answer: ModelResult, question: CaseQuestion) -> ModelResult:
    """Note in an answer that its question lost its beginning; the report of a context edit has its own note."""
    final = answer.final
    if not question.cut or not isinstance(final, (ScoredContinuation, GeneratedText)) or final.context is not None:
        return answer
    return dataclasses.replace(answer, final=dataclasses.replace(final, context=ContextReport(cut=True)))


def warn_of_questions(questions: Sequence[CaseQuestion | FailedAnswer], room: Room, *, fail_if_all: bool) -> None:
    """Log how many questions the model cannot be asked, and how many lost the beginning of their prompt.

    Raises:
        EditingError: with ``fail_if_all``, if none of several questions can be asked.
    """
    failures = [read.reason for read in questions if isinstance(read, FailedAnswer) and read.is_failure]
    if fail_if_all and 1 < len(questions) == len(failures):
        raise EditingError(f"no question of this run ({len(questions)}) can be asked; the first: {failures[0]}")
    reasons = {number: read.reason for number, read in enumerate(questions) if isinstance(read, FailedAnswer)}
    warn_of_unusable("questions", reasons, len(questions))
    cut = [question.item for question in questions if isinstance(question, CaseQuestion) and question.cut]
    if cut:
        generated = isinstance(cut[0], GenerateItem)
        remedy = "a smaller max_gen_toks or max_thought_tokens" if generated else "shorter prompts"
        log.warning(
            "%d of %d questions do not fit into max_length=%d with their answers: their prompts are cut at the "
            "beginning, and scored unless that takes an edit's text away (context.cut in their samples). They need %s.",
            len(cut),
            len(questions),
            room.max_length,
            room.remedy(remedy),
        )


def warn_of_shortened(answers: Sequence[ModelAnswer | FailedAnswer], room: Room, rank: int = 0) -> None:
    """Log on the first rank how many prompts of context edits are shorter than the edits make them."""
    if rank != 0:
        return
    reports = [answer.context for answer in answers if isinstance(answer, (ScoredContinuation, GeneratedText))]
    contexts = [report for report in reports if report is not None]
    fewer = sum(report.left_out > 0 for report in contexts)
    cut = sum(report.cut for report in contexts)
    without_fact = sum(report.fact_cut for report in contexts)
    if fewer or cut:
        log.warning(
            "of %d prompts under edits, %d have fewer demonstrations than the edit gives, because not all fit into "
            "max_length=%d (or the positions of a counterfactual model), and %d are cut at the beginning even without "
            "any; %d of these lost an edited fact, so benchmarks of edits leave them unscored (context in the samples, "
            "edit in the results). They need %s.",
            len(answers),
            fewer,
            room.max_length,
            cut,
            without_fact,
            room.remedy("a shorter answer (max_gen_toks), or fewer facts and demonstrations"),
        )
