"""UnKEBench and AKEW: edits whose target is a text of a hundred words, with questions about its details.

AKEW has its texts beside the facts they were written about, in the layouts of CounterFact, MQuAKE-CF (a list of edits,
of which the first one counts) and WikiUpdate. What is edited here is the text, not the fact.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from edit_hooks.request import EditRequest
from edit_hooks.utils.storage.pinned_file import PinnedFile, UrlFile
from lm_eval_tasks.common.records.benchmark import Benchmark
from lm_eval_tasks.common.records.cases import Case, Question
from lm_eval_tasks.common.records.dataset import Source
from lm_eval_tasks.common.records.fields import Fields, source_id

REWRITE, TRIPLETS = "requested_rewrite", "unsfact_triplets_GPT"
MAX_TRIPLETS = 5  # of AKEW, as in the release
DATA = Path(__file__).parent / "data"


@dataclass(frozen=True, kw_only=True)
class TextCase(Case):
    """An edit whose target is a text.

    Attributes:
        sub_questions: questions about details of the text.
    """

    sub_questions: Sequence[Question] = ()


def parse_unke(fields: Fields, row: int) -> TextCase:
    """Check and convert a record of UnKEBench; it names no subject."""
    question, answer = fields.text("question"), fields.text("answer")
    if "{}" in question:
        raise fields.error("question", "has {}, the place of a subject, and these records name none")
    request = EditRequest.from_dict({"prompt": question, "target_new": answer, "case_id": str(row)}, where=fields.where)
    return TextCase(
        request=request,
        paraphrases=[Question(prompt, answer) for prompt in fields.one_or_more("para_question")],
        extras={"source_id": source_id(fields, "id", row)},
        sub_questions=[Question(*pair) for pair in fields.pairs("sub_question", "sub_answer")],
    )


def parse_akew(fields: Fields, row: int) -> TextCase:
    """Check and convert a record of AKEW.

    The question is that of the record, in CounterFact the whole prompt; a paraphrase is one of CounterFact's.
    """
    edit = _edit(fields)
    target = edit.text("fact_new_uns")
    prompt = edit.text_or_none("prompt_full") or edit.text("question")
    subject = edit.text_or_none("subject")
    request = EditRequest.from_dict(
        {
            "prompt": prompt,
            "subject": subject if subject and subject in prompt else None,
            "target_new": target,
            "case_id": str(row),
        },
        where=fields.where,
    )
    triplets = edit.objects(TRIPLETS, required=False)[:MAX_TRIPLETS]
    asked = [
        Question(item.text("prompt").replace("{}", item.text("subject")), item.text("target")) for item in triplets
    ]
    return TextCase(
        request=request,
        paraphrases=[Question(text, target) for text in fields.texts("paraphrase_prompts")[:1] if text],
        extras={"source_id": source_id(fields, "case_id", row)},
        sub_questions=asked,
    )


def _edit(fields: Fields) -> Fields:
    """The fields of the edit: an object, or the first of a list."""
    value = fields.record.get(REWRITE)
    if isinstance(value, Mapping):
        inside = f"{fields.prefix}{REWRITE}."
        return Fields(value, fields.where, fields.accessed, fields.lacking, inside, fields.declared)
    return fields.objects(REWRITE)[0]


def count_odd(cases: Sequence[TextCase]) -> dict[str, int]:
    """Counts of absent parts, and the longest target in words, for the results."""
    return {
        "without_subject": sum(case.request.subject is None for case in cases),
        "without_paraphrases": sum(not case.paraphrases for case in cases),
        "without_sub_questions": sum(not case.sub_questions for case in cases),
        "sub_questions": sum(len(case.sub_questions) for case in cases),
        "longest_target_in_words": max((len(case.request.target_new.split()) for case in cases), default=0),
    }


def _unke(version: str, sha256: str) -> PinnedFile:
    return PinnedFile(
        repository="TrustedLLM/UnKE",
        commit="ae24801d8331919f0d31e170558ab00e7ed49f61",
        path=f"data/final_data_{version}.json",
        sha256=sha256,
    )


UNKE_BENCH = Benchmark(
    name="unke_bench",
    source=Source(
        title="UnKEBench",
        published=_unke("v2", "fa18c971b4c4cbdc0657977f941bbfcab2afa7c7ca16540e72ef00d043bc0052"),
        files=("final_data_v2.json", "final_data_v3.json", "unke_bench.jsonl"),
        mini=DATA / "mini.jsonl",
        notes=("provenance",),
    ),
    parse=parse_unke,
    count_odd=count_odd,
)


def _akew(name: str) -> UrlFile:
    """A file of the release; the digests of two of them are not known."""
    commit, path = "75fdc23f63cc06673bf75e3e39b12597ce18fec7", f"datasets/{name}.json"
    return UrlFile.at_commit("BobXWu/AKEW", commit, path, AKEW_DIGESTS.get(name))


AKEW_DIGESTS = {"MQuAKE-CF": "8469d4a0b8a4ff4168de987576e7ecea4754202627cd3ab3181339ffc411ddc5"}
AKEW_SETS = {"counterfact": _akew("CounterFact"), "mquake_cf": _akew("MQuAKE-CF"), "wikiupdate": _akew("WikiUpdate")}
# The facts behind the texts, and the questions about them, which the text tasks do not use.
IN_EDIT = (
    *(
        "prompt",
        "prompt_full",
        "question",
        "relation_id",
        "target_new",
        "target_true",
        "fact_new",
        "verify_unsfact_GPT",
    ),
    *("answer_new", "answer_new_aliases", "answer_true", "time_true", "time_new", "loc", "loc_ans"),
)
AKEW_NOTES = (
    *(f"{REWRITE}{kind}.{name}" for kind in ("", "[]") for name in IN_EDIT),
    *("paraphrase_prompts", "neighborhood_prompts", "attribute_prompts", "generation_prompts", "pararel_idx"),
    *(
        "questions",
        "answer",
        "answer_alias",
        "new_answer",
        "new_answer_alias",
        "single_hops",
        "new_single_hops",
        "orig",
    ),
)
AKEW = Benchmark(
    name="akew",
    source=Source(
        title="AKEW (texts)",
        published=AKEW_SETS["counterfact"],
        sets=AKEW_SETS,
        files=("CounterFact.json", "MQuAKE-CF.json", "WikiUpdate.json", "akew.jsonl"),
        mini=DATA / "mini_akew.jsonl",
        notes=("provenance", *AKEW_NOTES),
    ),
    parse=parse_akew,
    count_odd=count_odd,
)

BENCHMARKS = (UNKE_BENCH, AKEW)
