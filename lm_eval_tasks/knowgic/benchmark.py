"""KnowGIC: its files in two layouts, and the cases: an edit with all of its chains.

The current release has a row for every chain, in mixed order, the earlier one a row for every edit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from edit_hooks.request import EditRequest
from edit_hooks.utils.storage.pinned_file import PinnedFile
from edit_hooks.utils.text.slots import fill_slots, split_slots
from lm_eval_tasks.common.records.benchmark import Benchmark
from lm_eval_tasks.common.records.cases import Question
from lm_eval_tasks.common.records.dataset import Source
from lm_eval_tasks.common.records.fields import Fields, source_id
from lm_eval_tasks.knowgic.aliases import KNOWGIC_ALIASES
from lm_eval_tasks.knowgic.case import Chain, ChainCase, Hop, distinct
from lm_eval_tasks.knowgic.forms import FORM_SETTINGS
from lm_eval_tasks.protocols.likelihood import GENERATE

REPOSITORY = "manitbaser/KnowGIC"
LISTS = ("questions", "answers", "prompts", "subjects")


def parse(fields: Fields, row: int) -> ChainCase:
    """Check and convert a row of either layout: one chain, or all chains of an edit.

    Raises:
        EditingError: for a row that violates the schema, and for a chain that does not lead from the edited subject to
            the original object; case is ignored, as the published file needs.
    """
    rewrites = fields.objects("requested_rewrite")
    if len(rewrites) != 1:
        raise fields.error("requested_rewrite", f"has {len(rewrites)} edits; one is needed")
    rewrite = rewrites[0]
    true = rewrite.text("target_true.str")
    request = EditRequest.from_dict(
        {
            "prompt": rewrite.text("prompt"),
            "subject": rewrite.text("subject"),
            "target_new": rewrite.text("target_new.str"),
            "target_true": true,
            "case_id": str(row),
        },
        where=rewrite.where,
    )
    several = fields.has("chains")
    found = [_hops(chain) for chain in fields.objects("chains")] if several else [_hops(fields, "chain.")]
    for number, chain in enumerate(found):
        name = f"chains[{number}]" if several else "chain"
        if not chain:
            raise fields.error(name, "has no step; give one or drop the chain")
        start, end = chain[0].subject, chain[-1].answer
        if not _same(start, str(request.subject)) or not _same(end, true):
            raise fields.error(
                name, f"leads from {start!r} to {end!r}; it must lead from the edited subject to target_true"
            )
    context = _hops(fields, "broader_context.")
    for hop in context:
        if _same(hop.subject, str(request.subject)):
            raise fields.error("broader_context", f"has a fact about the edited subject ({hop.statement!r}); drop it")
    extras = {"source_id": source_id(fields, "case_id", row)}
    return ChainCase(request=request, extras=extras, chains=found, context=context)


def _hops(fields: Fields, prefix: str = "") -> Chain:
    """The facts of four lists of one length; for ``chain`` and ``broader_context`` these are inside of that field."""
    questions, answers, prompts, subjects = (fields.texts(prefix + name, required=True) for name in LISTS)
    if len({len(questions), len(answers), len(prompts), len(subjects)}) > 1:
        counts = ", ".join(map(str, map(len, (questions, answers, prompts, subjects))))
        raise fields.error(f"{prefix}questions", f"and {', '.join(LISTS[1:])} have {counts} entries; give one per step")
    hops = []
    for question, answer, prompt, subject in zip(questions, answers, prompts, subjects, strict=True):
        if not question or not answer or not subject or len(split_slots(prompt)) != 2:
            raise fields.error(
                f"{prefix}prompts",
                f"has {prompt!r} for question {question!r}, subject {subject!r} and answer {answer!r}; "
                "three texts and a prompt with one {} are needed",
            )
        if not (relation := relation_words(prompt)):
            raise fields.error(f"{prefix}prompts", f"has {prompt!r}; a statement with words around {{}} is needed")
        hops.append(Hop(question, answer, fill_slots(prompt, subject), subject, relation))
    return tuple(hops)


def relation_words(prompt: str) -> str:
    """The words of a statement between subject and object; ``{}`` is the subject."""
    return " ".join(prompt.replace("{}", " ").split()).removeprefix("'s").strip()


def _same(left: str, right: str) -> bool:
    return left.casefold() == right.casefold()


def join(rows: Sequence[ChainCase]) -> list[ChainCase]:
    """One case per edit, in the order of their first rows, with the chains and the broader context of all its rows."""
    by_edit: dict[str, list[ChainCase]] = {}
    for row in rows:
        by_edit.setdefault(f"{row.request.key}\0{row.request.target_true}", []).append(row)
    return [_joined(str(number), parts) for number, parts in enumerate(by_edit.values())]


def _joined(case_id: str, parts: Sequence[ChainCase]) -> ChainCase:
    joined = replace(
        parts[0],
        request=replace(parts[0].request, case_id=case_id),
        chains=[chain for part in parts for chain in part.chains],
        context=[hop for part in parts for hop in part.context],
    )
    return replace(joined, neighbors=_neighbors(joined))


def _neighbors(case: ChainCase) -> list[Question]:
    """The facts of the chains with another subject and the original object, each once.

    They have the form of CounterFact's neighborhood prompts; the file has none of its own.
    """
    true, new = str(case.request.target_true), case.request.target_new
    hops = [chain[-1] for chain in case.chains if not _same(chain[-1].subject, str(case.request.subject))]
    return [Question(statement, true, new) for statement in dict.fromkeys(hop.statement for hop in hops)]


def count_odd(cases: Sequence[ChainCase]) -> Mapping[str, int]:
    """Counts of chains, in all and by length, and of repeated facts, for the results."""
    chains = [chain for case in cases for chain in case.chains]
    lengths = sorted({len(chain) for chain in chains})
    return {
        "chains": len(chains),
        **{f"chains_of_{length}": sum(len(chain) == length for chain in chains) for length in lengths},
        "context_facts": sum(len(case.context) for case in cases),
        "context_facts_distinct": sum(len(distinct(case.context)) for case in cases),
        "repeated_chains": sum(len(case.chains) - len(set(case.chains)) for case in cases),
        "ends_in_other_case": sum(
            chain[-1].answer != case.request.target_true for case in cases for chain in case.chains
        ),
        "without_context": sum(not case.context for case in cases),
        "without_neighbors": sum(not case.neighbors for case in cases),
    }


CURRENT = PinnedFile(
    repository=REPOSITORY,
    commit="bd157255f0d48b032a92afbb4e72a23db8a3daab",
    path="chains.json",
    sha256="ce0d43768a50a9831d4c172219f7c7e06d7d44c3c24765de6d238d151ede0817",
)

KNOWGIC = Benchmark(
    name="knowgic",
    source=Source(
        title="KnowGIC",
        files=("chains.json", "chains_v1_21cases_558.json", "knowgic.jsonl"),
        published=CURRENT,
        sets={
            "current": CURRENT,
            # An earlier release, which is close to the 566 chains of ThinkEdit's tables.
            "v1": PinnedFile(
                repository=REPOSITORY,
                commit="b83d6651a07b8aa4994c633d39175465be95c8fc",
                path="chains.json",
                sha256="59943e08bea25878d176a0b29bc5e9a345e78e33cbaf8d2703bd237a633c2cb2",
            ),
        },
        mini=Path(__file__).parent / "data" / "mini.jsonl",
        notes=("provenance",),
    ),
    parse=parse,
    settings=(KNOWGIC_ALIASES, *FORM_SETTINGS, GENERATE),
    count_odd=count_odd,
    join=join,
)

BENCHMARKS = (KNOWGIC,)
