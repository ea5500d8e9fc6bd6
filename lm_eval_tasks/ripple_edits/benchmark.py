"""RippleEdits: an edit, and tests of its consequences of six kinds, each with conditions on what the model knew."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from edit_hooks.request import EditRequest
from edit_hooks.utils.storage.pinned_file import UrlFile
from lm_eval_tasks.common.records.benchmark import Benchmark
from lm_eval_tasks.common.records.cases import Case, count_missing
from lm_eval_tasks.common.records.dataset import Source
from lm_eval_tasks.common.records.fields import Fields
from lm_eval_tasks.ripple_edits.relations import read_fact

KINDS: Mapping[str, str] = {  # name in the files -> name in columns
    "Logical_Generalization": "logical_generalization",
    "Compositionality_I": "compositionality_1",
    "Compositionality_II": "compositionality_2",
    "Subject_Aliasing": "subject_aliasing",
    "Forgetfulness": "forgetfulness",
    "Relation_Specificity": "relation_specificity",
}
ANY, ALL = "OR", "AND"
QUERIES = ("test_queries", "condition_queries")


@dataclass(frozen=True)
class Query:
    """A prompt and its objects, each as its label and aliases: all objects are wanted, by one of their names."""

    prompt: str
    objects: Sequence[Sequence[str]]


@dataclass(frozen=True)
class RippleTest:
    """One test.

    Attributes:
        queries: asked of the edited model.
        condition: ``OR``: one query suffices; ``AND``: all are needed.
        conditions: asked of the unedited model; the test counts if it answers all of them.
    """

    queries: Sequence[Query]
    condition: str
    conditions: Sequence[Query]


@dataclass(frozen=True, kw_only=True)
class RippleCase(Case):
    """An edit and its tests.

    Attributes:
        tests: name in columns -> tests; kinds without a test are left out.
        unanswered: number of tests that are left out, because a query has no answer.
    """

    tests: Mapping[str, Sequence[RippleTest]] = field(default_factory=dict)
    unanswered: int = 0


def parse(fields: Fields, row: int) -> RippleCase:
    """Check and convert a record."""
    sentence, relation = fields.text("edit.prompt"), fields.text("edit.relation")
    original = fields.text_or_none("edit.original_fact.prompt")
    new = read_fact(sentence, relation, original)
    if new is None:
        raise fields.error("edit.prompt", f"is {sentence!r}, which does not state the relation {relation!r}")
    old = None if original is None else read_fact(original, relation, sentence)
    request = EditRequest.from_dict(
        {
            "prompt": new.prompt,
            "subject": new.subject,
            "target_new": new.object,
            "target_true": old.object if old else None,
            "case_id": str(row),
            "relation_id": relation,
        },
        where=fields.where,
    )
    tests: dict[str, list[RippleTest]] = {}
    left_out = 0
    for name, column in KINDS.items():
        for item in fields.objects(name, required=False):
            if test := _test(item):
                tests.setdefault(column, []).append(test)
            else:
                left_out += 1
    extras = {"subset": fields.text("example_type"), "relation": relation}
    return RippleCase(request=request, extras=extras, tests=tests, unanswered=left_out)


def _test(item: Fields) -> RippleTest | None:
    """A test; none if a query of it has no answer that could be found in a text."""
    condition = item.text("test_condition")
    if condition not in (ANY, ALL):
        raise item.error("test_condition", f"is {condition!r}; {ANY} or {ALL} is needed")
    queries = [_query(query) for query in item.objects("test_queries")]
    conditions = [_query(query) for query in item.objects("condition_queries", required=False)]
    complete = [query for query in (*queries, *conditions) if query is not None]
    if len(complete) < len(queries) + len(conditions):
        return None
    return RippleTest(complete[: len(queries)], condition, complete[len(queries) :])


def _query(item: Fields) -> Query | None:
    """A query; none if an object has no name that could be found in a text."""
    prompt, objects = item.text("prompt"), []
    for answer in item.objects("answers", required=False):
        names = [answer.text_or_none("value"), *answer.texts("aliases")]
        # As released: names of one character are dropped unless they are digits.
        kept = [name for name in names if name and (len(name) > 1 or name.isdigit())]
        if not kept:
            return None
        objects.append(tuple(dict.fromkeys(kept)))
    return Query(prompt, tuple(objects)) if objects else None


def count_odd(cases: Sequence[RippleCase]) -> dict[str, int]:
    """Counts of edits and tests by kind, for the results."""
    counts = {f"tests_{name}": sum(len(case.tests.get(name, ())) for case in cases) for name in KINDS.values()}
    return {
        "without_old_answer": count_missing(cases)["without_old_answer"],
        "without_tests": sum(not case.tests for case in cases),
        "tests_without_answer": sum(case.unanswered for case in cases),
        **counts,
    }


def _published(subset: str) -> UrlFile:
    """A file of the release, whose digest is not known."""
    commit = "54f3b88af4895a3aacb580ec63ce7ae857185040"
    return UrlFile.at_commit("edenbiran/RippleEdits", commit, f"data/benchmark/{subset}.json")


SETS = {subset: _published(subset) for subset in ("popular", "random", "recent")}
_QUERY = ("query_type", "subject_id", "relation", "target_ids", "phrase", "second_relation", "second_hop_target_ids")
RIPPLE_EDITS = Benchmark(
    name="ripple_edits",
    source=Source(
        title="RippleEdits",
        published=SETS["popular"],
        sets=SETS,
        files=(*(file.name for file in SETS.values()), "ripple_edits.jsonl"),
        mini=Path(__file__).parent / "data" / "mini.jsonl",
        notes=(
            *("edit.subject_id", "edit.target_id", "edit.original_fact", "provenance"),
            *(f"{kind}[].{asked}[].{name}" for kind in KINDS for asked in QUERIES for name in _QUERY),
        ),
    ),
    parse=parse,
    count_odd=count_odd,
)

BENCHMARKS = (RIPPLE_EDITS,)
