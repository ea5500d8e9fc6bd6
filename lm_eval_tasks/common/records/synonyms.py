"""Names that people give to the fields of an edit, for hints about a field that is missing or ignored."""

from __future__ import annotations

from collections.abc import Iterable

from edit_hooks.utils.errors import near_misses

# Each line holds names of one thing, in the form of _plain.
_SAME = tuple(
    frozenset(names.split())
    for names in (
        "prompt question query cloze sentence template text input src edit_prompt edit_question",
        "target_new new_target target_edit edit_target new_answer answer_new new_object object_new new_value answer "
        "ans target object obj new value output completion label alt tail",
        "ground_truth target_true true_target target_old old_target old_answer answer_old true_answer answer_true "
        "old_object object_old old_value original_answer old_label true old original",
        "subject subj subject_label entity head",
        "rephrase_prompt rephrase rephrased rephrasing rephrased_prompt rephrased_question paraphrase "
        "paraphrase_prompt paraphrased_prompt paraphrase_question paraphrased_question generalization "
        "generalization_prompt rewording",
        "locality_prompt locality locality_question loc loc_prompt neighbor neighborhood neighbor_prompt "
        "neighborhood_prompt neighborhood_question unrelated unrelated_prompt unrelated_question specificity "
        "specificity_prompt",
        "locality_ground_truth locality_answer loc_ans loc_answer locality_target neighbor_answer "
        "neighborhood_answer neighborhood_target unrelated_answer specificity_answer",
        "portability portability_prompt portability_question one_hop multi_hop two_hop ripple",
    )
)
SUBJECTS = frozenset(["subject", "subj", "subject_label", "entity", "head", "h", "s", "sub"])
RELATIONS = frozenset(["relation", "relation_label", "rel", "predicate", "pred", "property", "p", "r"])
OBJECTS = frozenset(["object", "obj", "object_label", "tail", "t", "o", "target", "value", "target_new"])


def similar(name: str, others: Iterable[str], cutoff: float = 0.6) -> str:
    """``" Did you mean 'rephrase_prompt'?"`` if another name is spelled similarly or means the same, else ``""``."""
    others = list(others)
    if hint := near_misses(name, others, cutoff):
        return hint
    meant = _meanings(name)
    same = [other for other in others if meant and _meanings(other) & meant]
    return f" Did you mean {' or '.join(map(repr, same[:3]))}?" if same else ""


def find_triple(names: Iterable[str]) -> tuple[str, str, str] | None:
    """The names of subject, relation and object, if the fields of a record are those of a triple and not of an edit."""
    names = list(names)
    found = [[name for name in names if _plain(name) in words] for words in (SUBJECTS, RELATIONS, OBJECTS)]
    if [len(one) for one in found] != [1, 1, 1]:
        return None
    (subject,), (relation,), (obj,) = found
    edit = [name for name in names if name not in (subject, relation, obj) and _meanings(name)]
    return None if edit else (subject, relation, obj)


def _meanings(path: str) -> frozenset[int]:
    """The lines of :data:`_SAME` with the last name of a dotted path."""
    name = _plain(path.rpartition(".")[2])
    return frozenset(line for line, names in enumerate(_SAME) if name in names)


def _plain(name: str) -> str:
    """A name in lower case with underscores, in American spelling, each word in the singular."""
    words = name.lower().replace("-", "_").replace(" ", "_").replace("neighbour", "neighbor").split("_")
    return "_".join(word if word in ("ans", "s") else word.removesuffix("s") for word in words)
