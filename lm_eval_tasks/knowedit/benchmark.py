"""KnowEdit's ZsRE: edits with portability and locality questions by kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from edit_hooks.request import EditRequest
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.pinned_file import PinnedFile
from lm_eval_tasks.common.benchmark import Benchmark
from lm_eval_tasks.common.cases import Question
from lm_eval_tasks.common.dataset import Source
from lm_eval_tasks.common.fields import Fields
from lm_eval_tasks.common.published import HubFile
from lm_eval_tasks.protocols.fluency import FLUENCY_SETTINGS
from lm_eval_tasks.protocols.portability import ALIASING, LOGICAL, REASONING, PortabilityCase

PORTABILITY = (REASONING, LOGICAL, ALIASING)
LOCALITY = ("Relation_Specificity", "Forgetfulness")


def parse(fields: Fields, row: int) -> PortabilityCase:
    """Check and convert a record: an edit, a rephrased question, and questions by kind.

    Raises:
        EditingError: if the record violates the schema, or has no unrelated question.
    """
    target = fields.text("target_new")
    true = _answers(fields, "ground_truth")
    request = EditRequest.from_dict(
        {
            "prompt": fields.text("prompt"),
            "subject": fields.text("subject"),
            "target_new": target,
            "target_true": true[0],
            "case_id": str(row),
        },
        where=fields.where,
    )
    fields.optional("cond")
    unrelated = _questions(fields, "locality", LOCALITY)
    if not unrelated:
        raise EditingError(f"{fields.where}: field 'locality' has no question; {' or '.join(LOCALITY)} is needed.")
    return PortabilityCase(
        request=request,
        paraphrases=[Question(fields.text("rephrase_prompt"), target, true[0])],
        neighbors=[question for of_kind in unrelated.values() for question in of_kind],
        extras={"answers": true},
        portability=_questions(fields, "portability", PORTABILITY),
        unrelated=unrelated,
    )


def _questions(fields: Fields, name: str, kinds: Sequence[str]) -> Mapping[str, list[Question]]:
    """The questions of each kind that the record has; the first gold answer is the wanted one."""
    found = {
        kind: [
            Question(item.text("prompt"), _answers(item, "ground_truth")[0])
            for item in fields.objects(f"{name}.{kind}")
        ]
        for kind in kinds
        if fields.has(f"{name}.{kind}")
    }
    if not found:
        fields.optional(name)  # an empty object is known
    return found


def _answers(fields: Fields, name: str) -> list[str]:
    """One or more answers: a text, or a list of texts."""
    if not isinstance(fields.optional(name), list):
        return [fields.text(name)]
    answers = fields.texts(name)
    if not answers or not answers[0]:
        raise EditingError(f"{fields.where}: field {name!r} has no first answer; add it.")
    return answers


def count_odd(cases: Sequence[PortabilityCase]) -> dict[str, int]:
    """Counts of edits that write a true answer, and of cases by kind of portability question."""
    return {
        "target_is_true": sum(case.request.target_new in case.extras["answers"] for case in cases),
        "several_true_answers": sum(len(case.extras["answers"]) > 1 for case in cases),
    } | {f"portability_{kind.lower()}": sum(kind in case.portability for case in cases) for kind in PORTABILITY}


KNOWEDIT_ZSRE = Benchmark(
    name="knowedit_zsre",
    source=Source(
        title="KnowEdit (ZsRE)",
        files=("ZsRE-test-all.json", "knowedit_zsre.jsonl"),
        mini=Path(__file__).parent / "data" / "mini_zsre.jsonl",
        published=HubFile(
            repository="zjunlp/KnowEdit",
            paths=("benchmark/ZsRE/ZsRE-test-all.json",),
            revision="c3a6bccb5fc37a59dea3197ac36526d44606acd0",
            sha256=("0e0214dda853a906ef02bef58c7ce2978af5a962e91fc4a10827e0125459905c",),
        ),
        # The file of February 2024, with three rows that the present one lacks.
        sets={
            "1304": PinnedFile(
                repository="YJiangcm/LTE",
                commit="b8fb59b90d54e5e77095dc06f0b5e0da9a2d5340",
                path="EasyEdit/data/knowedit/ZsRE/ZsRE-test-all.json",
                sha256="701add2223886ada5f6b5c2aa18b69109a2e33928ef41adc69dde7b95b22b3ab",
            )
        },
        notes=("provenance",),
    ),
    parse=parse,
    settings=FLUENCY_SETTINGS,
    count_odd=count_odd,
)

BENCHMARKS = (KNOWEDIT_ZSRE,)
