"""The parts of a passport that are tasks: which columns answer which question."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from lm_edit.passport.asking import TaskColumn


class Questions(NamedTuple):
    """A part whose scores are columns of tasks.

    Attributes:
        question: what the part asks, for readers.
        columns: of tasks that read facts of any source.
        of_benchmark: benchmark -> columns of tasks that read its own records.
        needs: kind of question that facts must have, "" if the edit prompt is enough.
    """

    question: str
    columns: Sequence[TaskColumn] = ()
    of_benchmark: Mapping[str, Sequence[TaskColumn]] = {}
    needs: str = ""


QUESTIONS: dict[str, Questions] = {
    "efficacy": Questions(
        "Does the edit prompt give the new answer, by likelihood and in a free answer?",
        [
            TaskColumn("counterfact_flat_es", "efficacy_prob"),
            TaskColumn("counterfact_flat_es", "efficacy_argmax"),
            TaskColumn("counterfact_flat_es", "efficacy_gen_em"),
            TaskColumn("counterfact_wild_reliability", "efficacy_wild_em"),
            TaskColumn("counterfact_wild_reliability", "efficacy_wild_contains"),
        ],
    ),
    "generalizes": Questions(
        "Do rewordings of the edit prompt give the new answer?",
        [
            TaskColumn("counterfact_flat_gs", "paraphrase_prob"),
            TaskColumn("counterfact_flat_gs", "paraphrase_argmax"),
            TaskColumn("counterfact_flat_gs", "paraphrase_gen_em"),
            TaskColumn("counterfact_wild_generalization", "paraphrase_wild_em"),
        ],
        needs="paraphrases",
    ),
    "reverses": Questions(
        "Does the fact hold when it is asked from the new answer's side, and do other objects keep their subjects?",
        of_benchmark={
            "bake": [
                TaskColumn("bake_rq", "reverse_qa_prob"),
                TaskColumn("bake_rq", "reverse_locality_prob"),
                TaskColumn("bake_rj", "reverse_judgment_prob"),
            ],
            "bake_j": [TaskColumn("bake_j_rj", "reverse_judgment_prob")],
            "bake_concept": [TaskColumn("bake_concept_rj", "reverse_judgment_prob")],
        },
    ),
    "questions": Questions(
        "Does it survive negation, true-or-false questions and multiple choice?",
        [
            TaskColumn("counterfact_flat_negation", "negation_pair_prob"),
            TaskColumn("counterfact_flat_negation", "negation_verdict"),
            TaskColumn("counterfact_flat_truth", "truth_acc"),
            TaskColumn("counterfact_flat_mcq", "mcq_new"),
        ],
    ),
    "hops": Questions(
        "Does what follows from the fact in one or two steps hold?",
        of_benchmark={
            "mquake": [TaskColumn("mquake_multi_hop", "multi_hop_alias_exact")],
            "knowgic": [
                TaskColumn("knowgic_prob", "ifr_prob"),
                TaskColumn("knowgic_prob", "ifr_1_prob"),
                TaskColumn("knowgic_prob", "ifr_2_prob"),
                TaskColumn("knowgic_prob", "ckp_prob"),
            ],
            "zsre_portability": [TaskColumn("zsre_portability_one_hop", "portability_match")],
            "knowedit": [TaskColumn("knowedit_portability", "portability_match")],
            "wikibigedit": [TaskColumn("wikibigedit_tf_portability", "portability_multi_hop_match")],
            "ripple_edits": [
                TaskColumn("ripple_edits_effects", "ripple_compositionality_1_passed"),
                TaskColumn("ripple_edits_effects", "ripple_compositionality_2_passed"),
                TaskColumn("ripple_edits_effects", "ripple_logical_generalization_passed"),
            ],
        },
    ),
    "neighbors": Questions(
        "Do other facts keep their answers?",
        [
            TaskColumn("counterfact_flat_ls", "neighborhood_prob"),
            TaskColumn("counterfact_flat_ls", "neighborhood_agree_tf"),
            TaskColumn("counterfact_wild_locality", "neighborhood_wild_agree_gen"),
        ],
        needs="neighbors",
    ),
}
CHAT_COLUMNS = (
    TaskColumn("counterfact_wild_reliability", "efficacy_wild_em"),
    TaskColumn("counterfact_wild_reliability", "efficacy_wild_contains"),
)
# Asked again after a change of the edited model.
LASTING_COLUMNS = (
    TaskColumn("counterfact_flat_es", "efficacy_prob"),
    TaskColumn("counterfact_flat_es", "efficacy_argmax"),
    TaskColumn("counterfact_flat_gs", "paraphrase_prob"),
    TaskColumn("counterfact_wild_reliability", "efficacy_wild_em"),
)
# Classification with embedded samples, generated labels and likelihoods.
ABILITY_COLUMNS = tuple(TaskColumn(f"editglue_{name}", "f1_new") for name in ("sst2", "mrpc", "cola", "rte", "mmlu"))
