"""WikiBigEdit: facts of Wikidata that changed between two dumps, in eight increments.

A record has the edit question (``update``), a rephrased one, the same in the words of a persona, a nearby fact that did
not change, and often a question one hop further. The layout of LocFT-BF's 3,000 records is read, too, and NaN in the
place of an absent text, which pandas writes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from edit_hooks.request import EditRequest
from lm_eval_tasks.common.records.benchmark import Benchmark
from lm_eval_tasks.common.records.cases import Question, count_missing
from lm_eval_tasks.common.records.dataset import Source
from lm_eval_tasks.common.records.fields import Fields
from lm_eval_tasks.common.records.published import HubFile
from lm_eval_tasks.common.scoring.population import POPULATION
from lm_eval_tasks.protocols.portability import MULTI_HOP, PERSONA, PortabilityCase
from lm_eval_tasks.protocols.published_sets import LOCFT_3K, locft_file
from lm_eval_tasks.protocols.wild import WILD_CONTEXT

REPOSITORY = "lukasthede/WikiBigEdit"
DATES = ("20240201", "20240220", "20240301", "20240320", "20240401", "20240501", "20240601", "20240620", "20240701")
INCREMENTS = tuple(f"{first}_{last}" for first, last in itertools.pairwise(DATES))
PLACEHOLDER = "Reformulated Question:"  # of the model that made the rephrased questions, in place of one
UNRELATED = "nearby_fact"


@dataclass(frozen=True)
class WikiBigEditCase(PortabilityCase):
    """A case of WikiBigEdit.

    Attributes:
        change: ``new`` or ``update``; "" where the record does not say.
        odd: problem of the record -> 1, for the counts.
    """

    change: str = ""
    odd: Sequence[str] = ()


def parse(fields: Fields, row: int) -> WikiBigEditCase:
    """Check and convert a record of the published layout, or of LocFT's."""
    published = fields.has("update") or not fields.has("target_new")
    prompt, target = (fields.text(name) for name in (("update", "ans") if published else ("prompt", "target_new")))
    subject, odd = _text(fields, "subject"), []
    if subject is not None and subject not in prompt:
        subject = None  # an editor that needs one says so for this edit
        odd.append("subject_not_in_prompt")
    request = EditRequest.from_dict(
        {"prompt": prompt, "subject": subject, "target_new": target, "case_id": str(row)}, where=fields.where
    )
    rephrased = _text(fields, "rephrase" if published else "rephrase_prompt")
    if rephrased == PLACEHOLDER:
        rephrased = None
        odd.append("placeholder_rephrases")
    nearby = _question(fields, "loc", "loc_ans") if published else None
    if not published:
        nearby = _question(fields, "locality_prompt", "locality_ground_truth")
    portability = {}
    if persona := _text(fields, "personas"):
        portability[PERSONA] = [Question(persona, target)]
    if hop := _question(fields, "mhop", "mhop_ans"):
        portability[MULTI_HOP] = [hop]
    return WikiBigEditCase(
        request=request,
        paraphrases=[Question(rephrased, target)] if rephrased else [],
        neighbors=[nearby] if nearby else [],
        extras={},
        portability=portability,
        unrelated={UNRELATED: [nearby]} if nearby else {},
        change=_text(fields, "tag") or "",
        odd=odd,
    )


def _text(fields: Fields, name: str) -> str | None:
    """A text that may be absent, null, blank or NaN."""
    value = fields.optional(name)
    return None if isinstance(value, float) and math.isnan(value) else fields.text_or_none(name)


def _question(fields: Fields, prompt: str, answer: str) -> Question | None:
    """A question with its answer; none if either is absent."""
    asked, wanted = _text(fields, prompt), _text(fields, answer)
    return Question(asked, wanted) if asked and wanted else None


def count_odd(cases: Sequence[WikiBigEditCase]) -> dict[str, int]:
    """Counts of absent parts, of odd texts, and of cases by kind of change and of question."""
    facts = [(case.request.text, case.request.target_new) for case in cases]
    problems = [problem for case in cases for problem in case.odd]
    return {
        **count_missing(cases),
        "new_facts": sum(case.change == "new" for case in cases),
        "updated_facts": sum(case.change == "update" for case in cases),
        "with_persona": sum(PERSONA in case.portability for case in cases),
        "with_multi_hop": sum(MULTI_HOP in case.portability for case in cases),
        "repeated_edits": len(facts) - len(set(facts)),
        "subject_not_in_prompt": problems.count("subject_not_in_prompt"),
        "placeholder_rephrases": problems.count("placeholder_rephrases"),
        # No exact match is possible after a stop at a period.
        "targets_with_inner_period": sum("." in case.request.target_new[:-1] for case in cases),
    }


def _files(*increments: str) -> HubFile:
    return HubFile(repository=REPOSITORY, paths=[f"wiki_big_edit_{increment}.json" for increment in increments])


WIKIBIGEDIT = Benchmark(
    name="wikibigedit",
    other_names=("wikibigedit_field", "wikibigedit_tf"),
    source=Source(
        title="WikiBigEdit",
        files=(*_files(*INCREMENTS).paths, "wikibigedit_3k.json", "wikibigedit.jsonl"),
        published=_files(*INCREMENTS),
        sets={
            **{increment: _files(increment) for increment in INCREMENTS},
            LOCFT_3K: locft_file("wikibigedit", "0d8bd37239f9c6c0c2e34d4f95f59e749ab8cb9dccbf2517622da16386d9ca82"),
        },
        mini=Path(__file__).parent / "data" / "mini.jsonl",
        notes=(
            "provenance",
            *("subject_id", "relation_id", "object_id"),
            *("relation", "object", "subject_label", "relation_label", "object_label"),
        ),
        has_nan=True,
    ),
    parse=parse,
    settings=(POPULATION, WILD_CONTEXT),
    count_odd=count_odd,
)

BENCHMARKS = (WIKIBIGEDIT,)
