"""Templates of relations, read off records of BAKE-Q&J and BAKE-J.

The release has no file of templates, but its records were made with some: a name of a record becomes a slot where it
occurs once, as whole words, and templates that several records of a relation share are those of the relation. What a
single record has may be a template with a name left in it, so that it is reported and not kept.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from edit_hooks.utils.errors import EditingError
from lm_edit.builders.bake.templates import OBJECT, SUBJECT, WHETHER, RelationTemplates
from lm_edit.builders.replies import template_of
from lm_eval_tasks.bake.benchmark import BAKE_J, BAKE_QJ, REWRITE, BakeCase
from lm_eval_tasks.common.records.fields import Fields

KINDS = PROMPTS, REVERSE, JUDGE = RelationTemplates._fields
MIN_RECORDS, MIN_SHARE = 2, 0.1

# Reasons
NO_SUBJECT = "the subject does not occur exactly once"
NO_OBJECT = "the new object does not occur exactly once"
NO_NAMES = "subject and new object do not occur exactly once each"
NO_WORDS = "it has no words beside the slot, or braces"
NOT_WHETHER = "it does not begin with 'Whether ' and end with a question mark"

_MARKS = ("\x00", "\x01")  # slots while names are replaced, so that a name like "object" is not found in a slot


class Unread(NamedTuple):
    """A text of a record that is no template.

    Attributes:
        where: place of the record. kind: field of a wording.
    """

    where: str
    kind: str
    text: str
    reason: str


@dataclass
class RelationCounts:
    """Number of records by template.

    Attributes:
        num_records: of the relation.
        found: kind -> template -> records that have it; a record counts once for each of its templates.
    """

    num_records: int = 0
    found: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))


@dataclass
class DerivedTemplates:
    """Templates of relations, and what was not kept.

    Attributes:
        wordings: of the relations with some.
        counts: of every relation.
        kept, rest: relation -> kind -> template -> number of records, of those in ``wordings`` and of the others.
        unread: texts that are no template.
    """

    wordings: dict[str, RelationTemplates] = field(default_factory=dict)
    counts: dict[str, RelationCounts] = field(default_factory=dict)
    kept: dict[str, dict[str, dict[str, int]]] = field(default_factory=dict)
    rest: dict[str, dict[str, dict[str, int]]] = field(default_factory=dict)
    unread: list[Unread] = field(default_factory=list)


def derive(
    rows: Iterable[tuple[str, Any]], *, min_records: int = MIN_RECORDS, min_share: float = MIN_SHARE
) -> DerivedTemplates:
    """Read the templates of every relation off its records.

    A record shows a few of the templates of its relation, drawn from a pool of unknown size. So the frequency of a
    template is compared with that of the most frequent one of its kind, not with the number of records. Of judge
    questions, of which a relation has one, the most frequent is kept.

    Args:
        rows: records, each after its location.
        min_records: smallest number of records with a kept template.
        min_share: the same, as a share of the records with the most frequent template of this kind.

    Raises:
        EditingError: for records that the tasks would refuse, and those without a relation.
    """
    derived = DerivedTemplates()
    for where, record in rows:
        relation, texts = _read(where, record)
        counts = derived.counts.setdefault(relation, RelationCounts())
        counts.num_records += 1
        templates: set[tuple[str, str]] = set()
        for kind, text, template, reason in texts:
            if reason:
                derived.unread.append(Unread(where, kind, text, reason))
            else:
                templates.add((kind, template))
        for kind, template in sorted(templates):
            counts.found[kind][template] += 1
    for relation, counts in derived.counts.items():
        _keep(derived, relation, counts, min_records, min_share)
    return derived


def _keep(derived: DerivedTemplates, relation: str, counts: RelationCounts, min_records: int, min_share: float) -> None:
    kept, rest = (dict[str, dict[str, int]](), dict[str, dict[str, int]]())
    for kind in KINDS:
        ranked = sorted(counts.found[kind].items(), key=lambda item: (-item[1], item[0]))
        least = max(min_records, min_share * ranked[0][1]) if ranked else 0
        enough = [(template, count) for template, count in ranked if count >= least]
        kept[kind] = dict(enough[:1] if kind == JUDGE else enough)
        rest[kind] = {template: count for template, count in ranked if template not in kept[kind]}
    wording = RelationTemplates(tuple(kept[PROMPTS]), tuple(kept[REVERSE]), next(iter(kept[JUDGE]), None))
    if wording != RelationTemplates():
        derived.wordings[relation] = wording
    derived.kept[relation], derived.rest[relation] = kept, rest


def _read(where: str, record: Any) -> tuple[str, Sequence[tuple[str, str, str, str]]]:
    """The relation of a record, and its texts: kind, text, template, and the reason if it has no template."""
    if not isinstance(record, Mapping):
        raise EditingError(f"{where}: the record is a {type(record).__name__}; an object is needed.")
    fields = Fields(record, where)
    benchmark = BAKE_QJ if fields.has("reverse_qa") else BAKE_J
    case: BakeCase = benchmark.layout.read(fields, 0)
    relation = record.get("relation") or record[REWRITE].get("relation_id")
    if not isinstance(relation, str):
        raise EditingError(f"{where}: the record names no relation; {REWRITE}.relation_id or relation is needed.")
    subject, object = fields.text(f"{REWRITE}.subject"), case.request.target_new
    prompt = fields.text(f"{REWRITE}.prompt")
    texts = [_one_name(PROMPTS, prompt, subject, NO_SUBJECT, is_template=prompt.count("{}") == 1)]
    texts += [_one_name(PROMPTS, question.prompt, subject, NO_SUBJECT) for question in case.paraphrases]
    if case.reverse_qa is not None:
        texts.append(_one_name(REVERSE, case.reverse_qa.prompt, object, NO_OBJECT))
    return relation, [*texts, _judge(case.reverse_judge.prompt, subject, object)]


def _one_name(kind: str, text: str, name: str, missing: str, *, is_template: bool = False) -> tuple[str, str, str, str]:
    marked = text.replace("{}", _MARKS[0]) if is_template else template_of(text, name, _MARKS[0])
    if marked is None:
        return kind, text, "", missing
    words = marked.replace(_MARKS[0], "")
    if not any(map(str.isalpha, words)) or "{" in words or "}" in words:
        return kind, text, "", NO_WORDS
    return kind, text, marked.replace(_MARKS[0], "{}"), ""


def _judge(text: str, subject: str, object: str) -> tuple[str, str, str, str]:
    """The judge question; the longer name is replaced first, as it may contain the other one."""
    marked: str | None = text
    for name, mark in sorted(((subject, _MARKS[0]), (object, _MARKS[1])), key=lambda pair: -len(pair[0])):
        marked = None if marked is None else template_of(marked, name, mark)
    if marked is None:
        return JUDGE, text, "", NO_NAMES
    words = marked.replace(_MARKS[0], "").replace(_MARKS[1], "")
    if "{" in words or "}" in words:
        return JUDGE, text, "", NO_WORDS
    if not (words.startswith(WHETHER) and text.endswith("?")):
        return JUDGE, text, "", NOT_WHETHER
    return JUDGE, text, marked.replace(_MARKS[0], SUBJECT).replace(_MARKS[1], OBJECT), ""
