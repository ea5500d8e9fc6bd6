"""KnowEdit: edits with portability and locality questions by kind.

Its parts share one layout. ``wiki_counterfact`` and ``wiki_recent`` have no rephrased question, and ``wiki_recent``
adds facts that had no answer before; gold answers of ``wiki_recent`` are objects, each a list of its aliases. A record
of ``WikiBio`` has a passage (``text``), the sentence that follows it (``labels``) and its subject (``concept``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from edit_hooks.prompt_context import content_of
from edit_hooks.request import EditRequest
from edit_hooks.utils.settings.numbers import shorten
from edit_hooks.utils.storage.pinned_file import PinnedFile
from lm_eval_tasks.common.records.benchmark import Benchmark
from lm_eval_tasks.common.records.cases import Question, count_missing
from lm_eval_tasks.common.records.dataset import Source
from lm_eval_tasks.common.records.fields import Fields
from lm_eval_tasks.common.records.published import HubFile
from lm_eval_tasks.protocols.fluency import FLUENCY_SETTINGS
from lm_eval_tasks.protocols.portability import ALIASING, LOGICAL, REASONING, PortabilityCase

PORTABILITY = (REASONING, LOGICAL, ALIASING)
LOCALITY = ("Relation_Specificity", "Forgetfulness")
PASSAGE, SENTENCE, CONCEPT = "text", "labels", "concept"  # of WikiBio


@dataclass(frozen=True)
class KnowEditCase(PortabilityCase):
    """A case of KnowEdit.

    Attributes:
        unanswered: number of questions without a gold answer, which are left out.
    """

    unanswered: int = 0


def parse(fields: Fields, row: int) -> KnowEditCase:
    """Check and convert a record: an edit, and questions by kind.

    Raises:
        EditingError: if the record violates the schema.
    """
    true = _answers(fields, "ground_truth")
    request = EditRequest.from_dict(
        {**_edit(fields), "target_true": true[0] if true else None, "case_id": str(row)}, where=fields.where
    )
    fields.optional("cond")
    portability, further = _questions(fields, "portability", PORTABILITY)
    unrelated, without = _questions(fields, "locality", LOCALITY)
    return KnowEditCase(
        request=request,
        paraphrases=[
            Question(text, request.target_new, request.target_true) for text in fields.one_or_more("rephrase_prompt")
        ],
        neighbors=[question for of_kind in unrelated.values() for question in of_kind],
        extras={"answers": true},
        portability=portability,
        unrelated=unrelated,
        unanswered=further + without,
    )


def _edit(fields: Fields) -> dict[str, str]:
    """Prompt, subject and target; in a passage the subject is spelled as it is there."""
    if not fields.has(CONCEPT):
        return {name: fields.text(name) for name in ("prompt", "subject", "target_new")}
    passage, concept = fields.text(PASSAGE), fields.text(CONCEPT)
    found = re.search(re.escape(concept), passage, re.IGNORECASE)
    if found is None:
        raise fields.error(CONCEPT, f"is {concept!r}, which does not occur in the passage {PASSAGE!r}")
    return {"prompt": passage, "subject": found.group(), "target_new": fields.text(SENTENCE)}


def _questions(fields: Fields, name: str, kinds: Sequence[str]) -> tuple[dict[str, list[Question]], int]:
    """The questions of each kind that the record has, and the number of those without a gold answer.

    The first gold answer is the wanted one.
    """
    if not isinstance(value := fields.record.get(name), (Mapping, type(None))):
        raise fields.error(name, f"is {shorten(value)}; an object with {', '.join(kinds)} is needed")
    found: dict[str, list[Question]] = {}
    unanswered = 0
    for kind in kinds:
        for item in fields.objects(f"{name}.{kind}", required=False):
            item.require("ground_truth")
            prompt, answers = item.text("prompt"), _answers(item, "ground_truth")
            if answers:
                found.setdefault(kind, []).append(Question(prompt, answers[0]))
            unanswered += not answers
    return found, unanswered


def _answers(fields: Fields, name: str) -> list[str]:
    """Gold answers without blank ones: a text, a list of texts, or a list of objects, each a list of its aliases."""
    value = fields.optional(name)
    objects = value if isinstance(value, list) else [] if value is None else [value]
    texts = [text for one in objects for text in (one if isinstance(one, list) else [one])]
    if not all(isinstance(text, str) for text in texts):
        accepted = "a text, a list of texts, or a list of lists of texts (objects with their aliases) is needed"
        raise fields.error(name, f"is {shorten(value)}; {accepted}")
    return [content_of(text) for text in texts if text.strip()]


def count_odd(cases: Sequence[KnowEditCase]) -> dict[str, int]:
    """Counts of edits that write a true answer, of missing parts, and of cases by kind of portability question."""
    return {
        "target_is_true": sum(case.request.target_new in case.extras["answers"] for case in cases),
        "several_true_answers": sum(len(case.extras["answers"]) > 1 for case in cases),
        **count_missing(cases),
        "questions_without_answer": sum(case.unanswered for case in cases),
    } | {f"portability_{kind.lower()}": sum(kind in case.portability for case in cases) for kind in PORTABILITY}


REPOSITORY, REVISION = "zjunlp/KnowEdit", "c3a6bccb5fc37a59dea3197ac36526d44606acd0"
PARTS = {  # the other parts, as data=hub:<name>
    "wiki_counterfact": "benchmark/wiki_counterfact/test_cf.json",
    "wiki_recent": "benchmark/wiki_recent/recent_test.json",
    "wikibio": "benchmark/WikiBio/wikibio-test-all.json",
}


def _part(path: str) -> HubFile:
    return HubFile(repository=REPOSITORY, paths=(path,), revision=REVISION)


KNOWEDIT = Benchmark(
    name="knowedit",
    source=Source(
        title="KnowEdit",
        files=(
            "ZsRE-test-all.json",
            *("test_cf.json", "train_cf.json"),
            *("recent_test.json", "recent_train.json"),
            *("wikibio-test-all.json", "wikibio-train-all.json"),
            "knowedit.jsonl",
        ),
        mini=Path(__file__).parent / "data" / "mini_zsre.jsonl",
        published=HubFile(
            repository=REPOSITORY,
            paths=("benchmark/ZsRE/ZsRE-test-all.json",),
            revision=REVISION,
            sha256=("0e0214dda853a906ef02bef58c7ce2978af5a962e91fc4a10827e0125459905c",),
        ),
        # The file of February 2024, with three rows that the present one lacks.
        sets={
            "1304": PinnedFile(
                repository="YJiangcm/LTE",
                commit="b8fb59b90d54e5e77095dc06f0b5e0da9a2d5340",
                path="EasyEdit/data/knowedit/ZsRE/ZsRE-test-all.json",
                sha256="701add2223886ada5f6b5c2aa18b69109a2e33928ef41adc69dde7b95b22b3ab",
            ),
            **{name: _part(path) for name, path in PARTS.items()},
        },
        notes=("provenance",),
    ),
    parse=parse,
    settings=FLUENCY_SETTINGS,
    count_odd=count_odd,
)

BENCHMARKS = (KNOWEDIT,)
