"""MQuAKE: up to four edits behind one multi-hop question, in the original layout and that of MQuAKE-Remastered."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from edit_hooks.request import EditRequest
from edit_hooks.utils.storage.pinned_file import UrlFile
from lm_eval_tasks.common.records.benchmark import Benchmark
from lm_eval_tasks.common.records.dataset import Source
from lm_eval_tasks.common.records.fields import Fields, source_id
from lm_eval_tasks.mquake.case import ChainFact, MultiHopCase
from lm_eval_tasks.mquake.demonstrations import COMMIT, DEMONSTRATIONS, REPOSITORY
from lm_eval_tasks.mquake.multi_hop import PRE_EDIT
from lm_eval_tasks.protocols.likelihood import GENERATE

REWRITE = "requested_rewrite"
SPLITS = ("split", "6334_split")
CHAINS = {  # triples of Wikidata ids along the chain of facts, after and before the edits: nested or flattened
    "new_single_hops": ("orig.new_triples", "new_triples"),
    "single_hops": ("orig.triples", "orig_triples"),
}


def parse(fields: Fields, row: int) -> MultiHopCase:
    """Check and convert a record."""
    requests = [_request(item, row) for item in fields.objects(REWRITE)]
    wordings = [text for text in fields.texts("questions", required=True) if text]
    if not wordings:
        raise fields.error("questions", "has no question; give one or drop the record")
    edited = {request.bare_text for request in requests}
    hops, old_hops = (_hops(fields, name, edited) for name in ("new_single_hops", "single_hops"))
    old_answers = _answers(fields, "answer") + [text for text in fields.texts("answer_extended") if text]
    return MultiHopCase(
        request=requests[0],
        further_requests=requests[1:],
        wordings=wordings,
        answers=_answers(fields, "new_answer"),
        old_answers=list(dict.fromkeys(old_answers)),
        hops=hops,
        old_hops=old_hops,
        extras={
            "source_id": source_id(fields, "case_id", row),
            "num_hops": str(len(hops)),
            "num_edits": str(len(requests)),
            **_splits(fields),
        },
    )


def _request(item: Fields, row: int) -> EditRequest:
    """One edit, with the objects as ``target_new.str`` (original) or ``target_new_str`` (Remastered)."""
    new, true = (f"{name}_str" if item.has(f"{name}_str") else f"{name}.str" for name in ("target_new", "target_true"))
    record = {
        "prompt": item.text("prompt"),
        "subject": item.text("subject"),
        "target_new": item.text(new),
        "target_true": item.text_or_none(true),
        "case_id": str(row),
        "relation_id": item.text("relation_id"),
    }
    return EditRequest.from_dict(record, where=item.where)


def _answers(fields: Fields, name: str) -> list[str]:
    """An answer and its aliases, without blank ones."""
    return list(dict.fromkeys([fields.text(name), *filter(None, fields.texts(f"{name}_alias"))]))


def _hops(fields: Fields, name: str, edited: set[str]) -> list[ChainFact]:
    """The facts of a chain; the relations come from its triples, their labels from the labeled ones.

    Raises:
        EditingError: if there are triples, but not one for each fact.
    """
    items = fields.objects(name)
    path = next((path for path in CHAINS[name] if fields.has(path)), None)
    triples = fields.optional(path) if path else [["", "", ""]] * len(items)
    if not isinstance(triples, list) or len(triples) != len(items) or any(not _is_triple(one) for one in triples):
        raise fields.error(str(path), f"is no list of {len(items)} triples of texts, one for each of {name!r}")
    labeled = fields.optional(f"{path}_labeled") if path else None
    if not isinstance(labeled, list) or len(labeled) != len(items) or any(not _is_triple(one) for one in labeled):
        labeled = [["", "", ""]] * len(items)  # no score depends on labels, so a record without them is as good
    return [
        ChainFact(
            question=item.text("question"),
            cloze=(cloze := item.text("cloze")),
            answers=_answers(item, "answer"),
            relation_id=triple[1],
            edited=cloze in edited,
            relation=label[1],
        )
        for item, triple, label in zip(items, triples, labeled, strict=True)
    ]


def _is_triple(value: object) -> bool:
    return isinstance(value, list) and len(value) == 3 and all(isinstance(part, str) for part in value)


def _splits(fields: Fields) -> dict[str, str]:
    """Labels of MQuAKE-Remastered by number of edits, as ``split_1000: edited``, for ``score_by``."""
    labels = {}
    for name in SPLITS:
        splits = fields.optional(name)
        if not isinstance(splits, Mapping | None):
            raise fields.error(name, "is no object: number of edits -> labels")
        for number, value in (splits or {}).items():
            texts = [value] if isinstance(value, str) else value or []
            if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
                raise fields.error(f"{name}.{number}", "is neither a label nor a list of labels")
            labels[f"split_{number}"] = "+".join(sorted(texts)) or "(none)"
    return labels


def count_odd(cases: Sequence[MultiHopCase]) -> dict[str, int]:
    """Counts of edits, hops, and inconsistent records, for the results."""
    targets: dict[str, set[str]] = {}
    for case in cases:
        for request in case.requests:
            targets.setdefault(request.text, set()).add(request.target_new)
    in_conflict = {text for text, wanted in targets.items() if len(wanted) > 1}
    edits = Counter(len(case.requests) for case in cases)
    return {
        "edits": sum(len(case.requests) for case in cases),
        "distinct_edit_prompts": len(targets),
        # An answer to an edit prompt ends at its first period, so it cannot be one of these in full.
        "targets_with_inner_period": sum("." in edit.target_new[:-1] for case in cases for edit in case.requests),
        "edit_prompts_in_conflict": len(in_conflict),
        "cases_in_conflict": sum(any(request.text in in_conflict for request in case.requests) for case in cases),
        "edits_outside_the_chain": sum(
            sum(hop.edited for hop in case.hops) != len({request.text for request in case.requests}) for case in cases
        ),
        "answer_is_not_the_last_hop": sum(case.answers[0] != case.hops[-1].answers[0] for case in cases),
        "new_answer_is_old": sum(case.answers[0] in case.old_answers for case in cases),
        "without_new_alias": sum(len(case.answers) == 1 for case in cases),
        "not_three_questions": sum(len(case.wordings) != 3 for case in cases),
    } | {f"cases_of_{number}_edits": edits[number] for number in sorted(edits)}


def _original(name: str) -> UrlFile:
    """A file of the release, whose digest is not known."""
    return UrlFile.at_commit(REPOSITORY, COMMIT, f"datasets/MQuAKE-{name}.json")


def _remastered(name: str) -> UrlFile:
    path = f"datasets/MQuAKE-Remastered-{name}.json"
    return UrlFile.at_commit("henryzhongsc/MQuAKE-Remastered", "59eb58c35deb267bb796fc9883d37f8070f6faf2", path)


SETS = {
    "cf_3k_v2": _original("CF-3k-v2"),
    "cf_3k": _original("CF-3k"),
    "cf_9k": _original("CF"),
    "t": _original("T"),
    "remastered_cf_3k": _remastered("CF-3k"),
    "remastered_cf_9k": _remastered("CF-9k"),
    "remastered_cf_6334": _remastered("CF-6334"),
    "remastered_t": _remastered("T"),
}

MQUAKE = Benchmark(
    name="mquake",
    source=Source(
        title="MQuAKE",
        published=SETS["cf_3k_v2"],
        sets=SETS,
        files=(*(file.name for file in SETS.values()), "mquake.jsonl"),
        mini=Path(__file__).parent / "data" / "mini.jsonl",
        notes=(
            f"{REWRITE}[].question",
            f"{REWRITE}[].target_new.id",
            f"{REWRITE}[].target_true.id",
            f"{REWRITE}[].target_new_id",
            f"{REWRITE}[].target_true_id",
            "orig",
            *(f"{name}_{ending}" for name in ("orig", "new") for ending in ("triples", "triples_labeled")),
            "edit_triples",
            "edit_triples_idx",
            "provenance",
        ),
    ),
    parse=parse,
    settings=(GENERATE, DEMONSTRATIONS, PRE_EDIT),
    count_odd=count_odd,
)

BENCHMARKS = (MQUAKE,)
