"""ZsRE in MEND's layout: two flavors with different targets, and the records with a portability question.

The flavors are benchmarks of their own, because the target of the edit differs: ``zsre_memit`` writes the true answer,
``zsre`` and ``zsre_portability`` the counterfactual one (``alt``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from edit_hooks.request import EditRequest
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.storage.pinned_file import PinnedFile, UrlFile
from lm_eval_tasks.common.records.benchmark import Benchmark
from lm_eval_tasks.common.records.cases import Case, OmittedRecord, Question
from lm_eval_tasks.common.records.dataset import Source
from lm_eval_tasks.common.records.fields import Fields
from lm_eval_tasks.common.records.published import PublishedFile
from lm_eval_tasks.common.scoring.population import POPULATION
from lm_eval_tasks.protocols.portability import PortabilityCase
from lm_eval_tasks.protocols.published_sets import LOCFT_3K, locft_file
from lm_eval_tasks.protocols.token_accuracy import TOKEN_PROMPTS
from lm_eval_tasks.protocols.wild import WILD_CONTEXT

DATA = Path(__file__).parent / "data"

LOCALITY_PREFIX = "nq question: "  # of every unrelated question; the releases refuse a file without it
ONE_HOP = "one_hop"


def parse_memit(fields: Fields, row: int) -> Case:
    """Check and convert a record of MEMIT's flavor: the edit writes the true answer.

    The unrelated question gets a question mark, as in the release.
    """
    answers = _true_answers(fields)
    return _case(fields, row, target=answers[0], true=None, mark="?")


def parse_alt(fields: Fields, row: int) -> Case:
    """Check and convert a record of EasyEdit's flavor: the edit writes the counterfactual answer.

    Raises:
        OmittedRecord: the counterfactual answer is empty.
    """
    answers = _texts(fields, "answers")
    return _case(fields, row, target=counterfactual_answer(fields), true=answers[0] if answers else None, mark="")


def counterfactual_answer(fields: Fields) -> str:
    """The target of EasyEdit's flavor, in evaluation and in training.

    Raises:
        OmittedRecord: it is empty.
    """
    if target := fields.text_or_empty("alt"):
        return target
    raise OmittedRecord("the counterfactual answer (alt) is empty")


def parse_portability(fields: Fields, row: int) -> PortabilityCase:
    """Check and convert a record with a question whose answer follows from the counterfactual answer."""
    case = parse_alt(fields, row)
    question = Question(fields.text("portability.New Question"), fields.text("portability.New Answer"))
    return PortabilityCase(
        request=case.request,
        paraphrases=case.paraphrases,
        neighbors=case.neighbors,
        extras={**case.extras, "recalled": fields.optional("portability.Recalled Relation")},
        portability={ONE_HOP: [question]},
    )


def _case(fields: Fields, row: int, *, target: str, true: str | None, mark: str) -> Case:
    request = EditRequest.from_dict(
        {
            "prompt": fields.text("src"),
            "subject": fields.text("subject"),
            "target_new": target,
            "target_true": true,
            "case_id": str(row),
        },
        where=fields.where,
    )
    unrelated = fields.text("loc")
    if not unrelated.startswith(LOCALITY_PREFIX):
        raise EditingError(
            f"{fields.where}: field 'loc' does not begin with {LOCALITY_PREFIX!r}, as all unrelated questions of ZsRE."
        )
    fields.optional("cond")
    return Case(
        request=request,
        paraphrases=[Question(prompt, target, true) for prompt in fields.one_or_more("rephrase", required=True)],
        neighbors=[Question(unrelated + mark, fields.text("loc_ans"))],
        extras={
            "answers": _texts(fields, "answers"),
            "alt": fields.text_or_empty("alt"),
            "pred": fields.text_or_empty("pred"),
        },
    )


def _true_answers(fields: Fields) -> list[str]:
    answers = _texts(fields, "answers")
    if not answers:
        raise EditingError(f"{fields.where}: field 'answers' has no first answer, the true one; add it.")
    return answers


def _texts(fields: Fields, name: str) -> list[str]:
    return [text for text in fields.texts(name) if text]


def count_odd(cases: Sequence[Case]) -> dict[str, int]:
    """Counts of cases whose answers coincide, and of those with several true answers."""
    extras = [case.extras for case in cases]
    return {
        "without_old_answer": sum(not case["answers"] for case in extras),
        "pred_is_true": sum(case["pred"] in case["answers"] for case in extras),
        "alt_is_true": sum(case["alt"] in case["answers"] for case in extras),
        "alt_is_pred": sum(case["alt"] == case["pred"] for case in extras),
        "several_true_answers": sum(len(case["answers"]) > 1 for case in extras),
        "targets_not_ascii": sum(not case.request.target_new.isascii() for case in cases),
    }


def _source(
    title: str, mini: str, published: PublishedFile, *files: str, sets: Mapping[str, PublishedFile] | None = None
) -> Source:
    return Source(
        title=title,
        files=files,
        mini=DATA / mini,
        published=published,
        sets=sets or {},
        notes=("provenance",),
    )


ZSRE_MEMIT = Benchmark(
    name="zsre_memit",
    source=_source(
        "ZsRE (MEMIT)",
        "mini.jsonl",
        UrlFile(
            url="https://rome.baulab.info/data/dsets/zsre_mend_eval.json",
            sha256="8a371d512f8a6ab175db4ef672181d5c0e52da23298cb51e5a2eeea2f89aa9cd",
        ),
        "zsre_mend_eval.json",
        "zsre_memit.jsonl",
    ),
    parse=parse_memit,
    settings=(TOKEN_PROMPTS,),
    count_odd=count_odd,
)

ZSRE = Benchmark(
    name="zsre",
    other_names=("zsre_syn", "zsre_wild", "zsre_field"),
    source=_source(
        "ZsRE (counterfactual)",
        "mini.jsonl",
        # Its digest is in no source that we could read.
        UrlFile.at_commit(
            "WanliYoung/Revisit-Editing-Evaluation",
            "61ccca3c1ecdb3976c9c0924e9352f3e64cc7d48",
            "data/zsre_eval_10000.json",
        ),
        "zsre_eval_10000.json",
        "zsre_mend_eval.json",
        "zsre.jsonl",
        sets={LOCFT_3K: locft_file("zsre", "45431e9b32d2dea71b6697a47433e88551a8bdf8c4fb5756779038fd8d7f82dc")},
    ),
    parse=parse_alt,
    settings=(POPULATION, WILD_CONTEXT),
    count_odd=count_odd,
)

ZSRE_PORTABILITY = Benchmark(
    name="zsre_portability",
    source=_source(
        "ZsRE with portability",
        "mini_portability.jsonl",
        # EasyEdit's data folder is not in its repository; three forks have this file, byte by byte the same.
        PinnedFile(
            repository="shariqahn/EasyEdit",
            commit="216a4cd009eaf5254add0890829fd93077124f77",
            path="data/notebook/zsre_mend_eval_portability_gpt4.json",
            sha256="0cf155da229b2eccae19fcfe5f7a09523363d357f5f15508d1521f495ad5ecd9",
        ),
        "zsre_mend_eval_portability_gpt4.json",
        "zsre_portability.jsonl",
    ),
    parse=parse_portability,
    settings=(POPULATION,),
    count_odd=count_odd,
)

BENCHMARKS = (ZSRE_MEMIT, ZSRE, ZSRE_PORTABILITY)
