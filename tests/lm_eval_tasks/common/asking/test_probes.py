"""Documents of cases with several edits, and of questions about no edit."""

from __future__ import annotations

from edit_hooks.answers import StreamPosition
from edit_hooks.request import EditRequest
from lm_eval_tasks.common.asking.probes import Probe, case_doc, question_doc
from lm_eval_tasks.common.records.cases import Case
from lm_eval_tasks.common.task.stages import StreamStages

FIRST, SECOND = (
    EditRequest(prompt="{} lies in", subject=subject, target_new=target, case_id="7")
    for subject, target in (("Velm", "Osteria"), ("Osteria", "Arlandia"))
)
PROBE = Probe(kind="multi_hop", prompt="Which continent is Velm in?", generate=True, gold="Arlandia")


def test_a_document_holds_all_edits_of_its_case() -> None:
    case = Case(request=FIRST, further_requests=[SECOND])
    doc = case_doc(case, [PROBE], generate=True)
    assert case.requests == (FIRST, SECOND)
    assert [EditRequest.from_dict(record) for record in doc["edit_requests"]] == [FIRST, SECOND]
    assert doc["case_id"] == "7"


def test_a_question_about_no_edit_is_scored_at_checkpoints_and_at_the_end() -> None:
    doc = question_doc("3", [PROBE], {"origin": "neutral"})
    assert (doc["case_id"], doc["edit_requests"], doc["origin"]) == ("3", [], "neutral")
    assert Probe.from_json(doc["probes"][0]) == Probe.from_json(PROBE.to_json())
    position = StreamPosition(edited=True, step=None, num_edits=5, cases_before=0, num_cases=5)
    stages = StreamStages(immediate=True, checkpoints=(2,))
    assert not position.not_in_stream
    assert [stages.applies_to(stage, position) for stage in stages.columns] == [False, True]
