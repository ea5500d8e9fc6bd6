"""Documents and scores of RippleEdits.

Source: Cohen et al., Evaluating the Ripple Effects of Knowledge Editing in Language Models (TACL 2024), and its
released runner. A query is answered if the greedy text of 30 tokens after its prompt has every object, by its label or
an alias, as a substring in the same case. A test counts if the unedited model answers all of its conditions; it is
passed if the edited model answers one (``OR``) or all (``AND``) of its queries. A record has the share of its tests
that are passed, where the edit itself is answered; a kind has the mean over the records with a test of it that counts.

The release matches prompt and answer together, so that an object in the prompt is always found, and stops after
``len(prompt)`` + 30 tokens with the length in characters. Here the answer alone is matched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from edit_hooks.decoding import AskedModel, Decoding
from lm_eval_tasks.common.asking.probes import CaseAnswers, Probe, ProbeAnswers, case_doc
from lm_eval_tasks.common.records.cases import EFFICACY
from lm_eval_tasks.common.scoring import measures
from lm_eval_tasks.common.scoring.measures import Excluded, Measure, Unscored, all_true, any_true
from lm_eval_tasks.common.settings import Settings
from lm_eval_tasks.ripple_edits.benchmark import ALL, KINDS, Query, RippleCase

DECODING = Decoding(max_new_tokens=30, until=())
TESTED, CONDITION = "tested", "condition"


def effects_doc(case: RippleCase, settings: Settings) -> dict[str, Any]:
    """The edit prompt and all queries of a case; equal ones of one model are asked once.

    ``tests`` has a list per kind: the numbers of a test's queries and conditions among the probes. ``objects`` are the
    wanted names of each probe.
    """
    request = case.request
    probes = [Probe(kind=EFFICACY, prompt=request.text, generate=True, gold=request.target_new, decoding=DECODING)]
    objects: list[list[list[str]]] = [[[request.target_new]]]
    known: dict[tuple[AskedModel, Query], int] = {}

    def ask(query: Query, kind: str, model: AskedModel) -> int:
        key = (model, query)
        if key not in known:
            known[key] = len(probes)
            gold = query.objects[0][0]
            probe = Probe(kind=kind, prompt=query.prompt, generate=True, gold=gold, ask=model, decoding=DECODING)
            probes.append(probe)
            objects.append([list(names) for names in query.objects])
        return known[key]

    tests = {
        name: [
            {
                "condition": test.condition,
                "queries": [ask(query, TESTED, "edited") for query in test.queries],
                "conditions": [ask(query, CONDITION, "unedited") for query in test.conditions],
            }
            for test in of_kind
        ]
        for name, of_kind in case.tests.items()
    }
    return case_doc(case, probes, generate=True) | {"tests": tests, "objects": objects}


def score_effects(doc: Mapping[str, Any], answers: CaseAnswers) -> dict[str, Measure]:
    """Whether the edit is answered, the tests passed by kind, and how many tests count."""
    probes = answers.probes

    def answered(number: int) -> bool:
        asked = probes[number]
        return names_all(_text(asked), doc["objects"][number])

    def counts(test: Mapping[str, Any]) -> bool:
        return all_true(test["conditions"], answered)

    def passes(test: Mapping[str, Any]) -> bool:
        return (all_true if test["condition"] == ALL else any_true)(test["queries"], answered)

    def share(tests: Sequence[Mapping[str, Any]], *, released: bool) -> float:
        if not tests:
            raise Excluded
        if released:
            tests = [test for test in tests if counts(test)]
            if not tests:
                raise Excluded
            if not answered(0):
                raise Unscored("the edit prompt is not answered with the new object, so no test of it is scored")
        return measures.case_mean([float(passes(test)) for test in tests], "tests")

    def executed() -> float:
        every = [test for tests in doc["tests"].values() for test in tests]
        if not every:
            raise Unscored("the record has no tests")
        return measures.case_mean([float(counts(test)) for test in every], "tests")

    found: dict[str, Measure] = {"efficacy_named": lambda: float(answered(0)), "ripple_executed": executed}
    for name in KINDS.values():
        tests = doc["tests"].get(name, [])
        found[f"ripple_{name}_passed"] = partial(share, tests, released=True)
        found[f"ripple_{name}_passed_all"] = partial(share, tests, released=False)
    return found


def _text(asked: ProbeAnswers) -> str:
    return measures.generated_text(asked.generation, unedited=asked.probe.only_unedited).text


def names_all(text: str, objects: Sequence[Sequence[str]]) -> bool:
    """Whether every object is in a text, by one of its names."""
    return all(any(name in text for name in names) for names in objects)
