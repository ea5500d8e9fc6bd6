"""The words of column names: which question is asked, how it is answered, and how the answer is scored.

A column is ``<question>_<score>``, as in ``efficacy_match``, in every benchmark; :data:`FAMILIES` have definitions of
their own. A score names how the answer is obtained, too. ``_unedited`` is the same of the unedited model, ``_change``
the edited value minus that; ``@`` begins a population. docs/benchmarks/columns.md shows this module.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

QUESTIONS: Mapping[str, str] = {
    "efficacy": "the edit prompt; papers: efficacy, reliability, edit success, rewrite accuracy, edit-wise, ES",
    "paraphrase": "reworded edit prompts; papers: generalization, rephrase, GS, PS",
    "neighborhood": "prompts about other facts; papers: locality, specificity, LS, NS",
    "portability": "consequences of the edit, the mean over their kinds",
    "portability_reasoning": "consequences of the edit: one or more hops",
    "portability_logical_generalization": "consequences of the edit: the reversed relation and other logic",
    "portability_subject_aliasing": "consequences of the edit: the subject under another name",
    "portability_persona": "the edit question in the words of a persona",
    "portability_multi_hop": "consequences of the edit: a question one hop further",
    "sub_question": "questions about details of an edited text",
    "ripple": "tests of consequences, of all kinds",
    "ripple_logical_generalization": "consequences of the edit: what its logic demands of other facts",
    "ripple_compositionality_1": "consequences of the edit: a hop from its new object",
    "ripple_compositionality_2": "consequences of the edit: a hop to its subject",
    "ripple_subject_aliasing": "tests of the edited fact with another name of its subject",
    "ripple_forgetfulness": "what stays: other objects of the same subject and relation",
    "ripple_relation_specificity": "what stays: other relations of the subject",
    "reverse_qa": "the question back from the new object; RQS, RQM",
    "reverse_qa_answer_in_prompt": "the same after the reversed fact with its answer, a control",
    "reverse_locality": "reverse questions of the same relation about other objects; RLS",
    "reverse_judgment": "the reversed fact as a yes-or-no question; RJS, RJM",
    "edit_score": "the harmonic mean of efficacy, paraphrase and neighborhood; S",
    "edit_score_reverse": "the harmonic mean of these and of the mean of the reverse scores; S of BAKE and BIRD",
    "instance_wise": "all facts of the chain after the edits",
    "instance_wise_kept": "those of them that no edit makes",
    "instance_wise_old": "all facts of the chain before the edits",
    "multi_hop": "the question over all facts of a chain, one of its wordings, the answer after the edits",
    "multi_hop_old": "the same, the answer before the edits",
    "multi_hop_cot": "as multi_hop, after a chain of thought",
    "multi_hop_cot_old": "as multi_hop_old, after a chain of thought",
}
SCORES: Mapping[str, str] = {
    "prob": "likelihood per token of the wanted target strictly above that of the other one",
    "prob_agree": "as prob, with agree_tf for the neighborhood",
    "magnitude": "the difference of the two per-token probabilities; EM, PM, NM, RQM, RJM",
    "argmax": "teacher forcing: every target token is the argmax",
    "match": "teacher forcing: share of target tokens that are the argmax; syn. of WILD",
    "logprob_new": "mean log-probability per token of the wanted target, in nats",
    "logprob_true": "mean log-probability per token of the other target, in nats",
    "token_acc": "as match, with a prompt of its own for every target token, as in MEMIT's evaluation of ZsRE",
    "agree_tf": "share of positions along the gold answer at which edited and unedited model have the same argmax",
    "overlap": "one minus the total variation of both models' next-token distributions after the prompt",
    "within_10": "share of prompts after which the overlap is at least 0.90",
    "within_1": "share of prompts after which the overlap is at least 0.99",
    "agree_gen": "edited and unedited model generate the same token ids after the prompt alone",
    "agree_ar": "greedy, as many tokens as the gold answer has by itself: share of the unedited model's tokens",
    "ar_match": "greedy, as many tokens as the gold answer has after the prompt: share of its tokens",
    "ar_match_unspaced": "the same with the tokens that it has by itself, without the space before it; GRACE's syn.",
    "ar_em": "greedy to the gold answer's length: exact match after normalization",
    "ar_judge": "greedy to the gold answer's length: a judge's verdict",
    "tf_em": "the teacher-forced answer as a text: exact match after normalization",
    "tf_judge": "the teacher-forced answer as a text: a judge's verdict",
    "qa_match": "match in the QA instruction",
    "qa_ar_match": "ar_match in the QA instruction",
    "qa_ar_em": "ar_em in the QA instruction",
    "qa_ar_judge": "ar_judge in the QA instruction",
    "qa_tf_em": "tf_em in the QA instruction",
    "qa_tf_judge": "tf_judge in the QA instruction",
    "gen_em": "free generation after the prompt alone up to the natural stop: exact match after normalization",
    "gen_judge": "the same generation: a judge's verdict",
    "gen_goes_on": "the same generation: it begins with the gold answer and goes on",
    "gen_repeats": "the same generation: the gold answer follows itself",
    "gen_yes": "the same generation: its first word is yes",
    "gen_desired": "the same generation: it names the edited subject only",
    "gen_original": "the same generation: it names the original subject only",
    "gen_ambiguous": "the same generation: it names both subjects",
    "gen_other": "the same generation: it names neither subject",
    "gen_alias_exact": "the same generation: equal to the answer up to case, spaces and a final period",
    "gen_alias_contains": "the same generation: the answer occurs as whole words",
    "wild_em": "free generation in the QA instruction (or what wild_context sets) up to the natural stop: exact match",
    "wild_contains": "the same generation as wild_em: the gold answer occurs as whole words after normalization",
    "wild_judge": "the same generation as wild_em: a judge's verdict",
    "wild_goes_on": "the same generation as wild_em: it begins with the gold answer and goes on",
    "wild_repeats": "the same generation as wild_em: the gold answer follows itself",
    "wild_agree_gen": "the same generation as wild_em: the token ids of the unedited model's",
    "wild_both_empty": "the same generation as wild_em: neither model writes anything",
    "alias_exact": "free generation after demonstrations: an accepted answer up to case, spaces and a final period",
    "alias_contains": "free generation after demonstrations: an accepted answer occurs as whole words",
    "text_rouge_l": "greedy, up to 512 tokens: F1 of ROUGE-L with the target text",
    "text_rouge_l_recall": "the same text: recall of ROUGE-L",
    "text_rouge_l_precision": "the same text: precision of ROUGE-L",
    "text_bleu": "the same text: sacreBLEU of one sentence",
    "text_char_bleu": "the same text: BLEU of n-grams of characters, as UnKE prints it",
    "text_contains": "the same text: the gold answer occurs as whole words after normalization",
    "text_judge": "the same text: a judge's verdict",
    "named": "greedy, 30 tokens: every object is in the text, by its label or an alias",
    "passed": "as named: share passed of the tests whose conditions the unedited model meets, where the edit took",
    "passed_all": "as named: share of all tests passed",
    "executed": "share of the tests whose conditions the unedited model meets",
    "answered": "free generation after demonstrations: an answer follows the thought",
}
# First words of the columns with definitions of their own, and the document that has them.
FAMILIES: Mapping[str, str] = {
    "negation": "docs/benchmarks/questions.md",
    "truth": "docs/benchmarks/questions.md",
    "mcq": "docs/benchmarks/questions.md",
    "revert": "docs/benchmarks/revert.md",
    "ifr": "docs/benchmarks/knowgic-details.md",
    "ckp": "docs/benchmarks/knowgic-details.md",
    "known": "docs/benchmarks/knowgic-details.md",
    "deep": "docs/benchmarks/knowgic-details.md",
    "evk": "docs/benchmarks/counterfact-details.md",
    "fluency": "docs/benchmarks/counterfact-details.md",
    "ngram": "docs/benchmarks/counterfact-details.md",
    "reference": "docs/benchmarks/counterfact-details.md",
    "consistency": "docs/benchmarks/counterfact-details.md",
}
ENDINGS = ("_unedited", "_change", "_micro")


class Protocol(NamedTuple):
    """What a column measures."""

    question: str
    score: str


def protocols_of(column: str) -> list[Protocol]:
    """All readings of a column's name as question and score; one, for a name that follows the scheme."""
    name = column.partition("@")[0]
    for ending in ENDINGS:
        name = name.removesuffix(ending)
    return [
        Protocol(question, name.removeprefix(f"{question}_"))
        for question in QUESTIONS
        if name.startswith(f"{question}_") and name.removeprefix(f"{question}_") in SCORES
    ]
