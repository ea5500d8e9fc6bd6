"""Documents and scores of MQuAKE: single edits, chains of facts, and multi-hop questions.

- ``efficacy_*``: the edited facts as cloze prompts, without demonstrations, mean over the edits of a case.
- ``instance_wise_*``: every fact of the chain after the edits is right. An edited fact is asked as its cloze
  prompt and is right if greedy decoding writes the new object; any other as a question with demonstrations.
- ``multi_hop_*``, ``multi_hop_cot_*``: one of the wordings of the multi-hop question is answered right,
  after demonstrations of answers or of chains of thought.

``_alias_exact``: the answer equals a gold answer or an alias after :func:`plain`. ``_alias_contains``: one of them
occurs in it as whole words, aliases of up to three characters in their own case (:func:`judges.match.has_answer`).
``_old_*_unedited``: the unedited model and the answer before the edits.

Source: Zhong et al., MQuAKE: Assessing Knowledge Editing in Language Models via Multi-Hop Questions (EMNLP 2023).
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

from edit_hooks.decoding import AskedModel, Decoding
from edit_hooks.utils.text.scripts import PERIODS
from judges.match import has_answer
from lm_eval_tasks.common.asking.probes import CaseAnswers, Probe, ProbeAnswers, case_doc
from lm_eval_tasks.common.records.cases import EFFICACY, Question
from lm_eval_tasks.common.scoring import measures
from lm_eval_tasks.common.scoring.measures import Excluded, Measure, Unscored, all_true, any_true, mean_over
from lm_eval_tasks.common.settings import Settings, switch_setting
from lm_eval_tasks.mquake.case import ChainFact, MultiHopCase
from lm_eval_tasks.mquake.demonstrations import Demonstrations, find_demonstrations
from lm_eval_tasks.protocols.likelihood import contrast_doc, contrast_measures

PRE_EDIT = switch_setting(
    "pre_edit", "also ask the unedited model, for the *_unedited columns; false: half the answers", default=True
)

HOP, EDITED_HOP, OLD_HOP, MULTI_HOP = "hop", "edited_hop", "old_hop", "multi_hop"
EDIT_PROMPTS, WORDINGS = "edit prompts", "multi-hop questions"
ANSWER = "Answer:"  # of a chain of thought
# Length limits are ours; the release has no code of this evaluation. A block of demonstrations ends with a blank line.
DIRECT = Decoding(max_new_tokens=50, until=("\n",))
THOUGHT = Decoding(max_new_tokens=200, until=("\n\n", "\nQuestion:"))

# (answer, gold answer and aliases) -> right
Match: TypeAlias = Callable[[str, Sequence[str]], bool]


# ------------------------------------------------------------------------ documents


def edit_wise_doc(case: MultiHopCase, settings: Settings) -> dict[str, Any]:
    """Document of all edit prompts of a case: new against true object."""
    prompts = [Question(one.text, one.target_new, one.target_true) for one in case.requests]
    return contrast_doc(case, settings, EFFICACY, prompts)


def instance_wise_doc(case: MultiHopCase, settings: Settings) -> dict[str, Any]:
    """Document of the chain of facts after the edits, and of that before them for the unedited model.

    ``accepted`` are the gold answer and aliases of each probe. A fact whose relation has no demonstrations is not
    asked; ``without_demonstrations`` names it.
    """
    shown = find_demonstrations(settings)
    edits = {request.bare_text: request for request in case.requests}
    chains: list[tuple[str, AskedModel, Sequence[ChainFact]]] = [(HOP, "edited", case.hops)]
    if PRE_EDIT.read(settings):
        chains.append((OLD_HOP, "unedited", case.old_hops))
    probes, accepted, lacking = [], [], []
    for kind, ask, hops in chains:
        for hop in hops:
            prompt = shown.relation_prompt(hop.relation_id, hop.question)
            if kind == HOP and hop.edited:
                request = edits[hop.cloze]
                probes.append(Probe(kind=EDITED_HOP, prompt=request.text, targets=[request.target_new]))
            elif prompt is not None:
                probes.append(_answer_probe(kind, prompt, hop.question, hop.answers[0], ask, DIRECT))
            else:
                lacking.append([kind, hop.relation_id or "(none)"])
                continue
            accepted.append(list(hop.answers))
    return case_doc(case, probes, generate=False) | {
        "demonstrations": shown.origin,
        "accepted": accepted,
        "without_demonstrations": lacking,
    }


def multi_hop_doc(case: MultiHopCase, settings: Settings) -> dict[str, Any]:
    """Document of the multi-hop question in all wordings, answered directly."""
    shown = find_demonstrations(settings)
    return _multi_hop_doc(case, settings, shown, shown.question_prompt, DIRECT)


def multi_hop_cot_doc(case: MultiHopCase, settings: Settings) -> dict[str, Any]:
    """Document of the multi-hop question in all wordings, answered after a chain of thought."""
    shown = find_demonstrations(settings)
    return _multi_hop_doc(case, settings, shown, shown.thought_prompt, THOUGHT)


def _multi_hop_doc(
    case: MultiHopCase, settings: Settings, shown: Demonstrations, prompt: Callable[[str], str], decoding: Decoding
) -> dict[str, Any]:
    ask: AskedModel = "both" if PRE_EDIT.read(settings) else "edited"
    probes = [
        _answer_probe(MULTI_HOP, prompt(wording), wording, case.answers[0], ask, decoding) for wording in case.wordings
    ]
    return case_doc(case, probes, generate=True) | {
        "demonstrations": shown.origin,
        "answers": list(case.answers),
        "old_answers": list(case.old_answers),
    }


def _answer_probe(kind: str, prompt: str, question: str, gold: str, ask: AskedModel, decoding: Decoding) -> Probe:
    return Probe(kind=kind, prompt=prompt, generate=True, gold=gold, question=question, ask=ask, decoding=decoding)


# -------------------------------------------------------------------------- scoring


def plain(text: str) -> str:
    """A text without outer white space, a final period of any script, and differences of case and of spaces."""
    plain_text = " ".join(unicodedata.normalize("NFC", text).casefold().split())
    return plain_text[:-1].rstrip() if plain_text.endswith(PERIODS) else plain_text


def equals(answer: str, accepted: Sequence[str]) -> bool:
    """Whether an answer is one of the accepted ones after :func:`plain`."""
    return plain(answer) in {plain(one) for one in accepted} - {""}


MATCHES: Mapping[str, Match] = {"alias_exact": equals, "alias_contains": partial(has_answer, whole_words=True)}


def final_answer(text: str) -> str:
    """The answer after a chain of thought: the rest of the line of the last "Answer:"; empty if there is none."""
    _, found, rest = text.rpartition(ANSWER)
    return rest.strip().partition("\n")[0] if found else ""


def score_edit_wise(doc: Mapping[str, Any], answers: CaseAnswers) -> dict[str, Measure]:
    """Success at the case's edit prompts, by likelihoods and by free generation."""
    probes = answers.of_kind(EFFICACY)

    def generated(answered: ProbeAnswers, *, match: Match) -> float:
        return float(match(measures.generated_text(answered.generation).text, [answered.probe.gold]))

    return contrast_measures(EFFICACY, probes, EDIT_PROMPTS) | {
        f"{EFFICACY}_gen_{name}": mean_over(probes, EDIT_PROMPTS, partial(generated, match=match))
        for name, match in MATCHES.items()
    }


def score_instance_wise(doc: Mapping[str, Any], answers: CaseAnswers) -> dict[str, Measure]:
    """All facts of the chain are right: after the edits, those that no edit makes, and before the edits."""
    chains = {"": (EDITED_HOP, HOP), "_kept": (HOP,)}
    scores: dict[str, Measure] = {}
    for name, match in MATCHES.items():
        for ending, kinds in chains.items():
            scores[f"instance_wise{ending}_{name}"] = partial(_all_right, doc, answers, kinds, match)
        scores[f"instance_wise_old_{name}_unedited"] = partial(_all_right, doc, answers, (OLD_HOP,), match)
    return scores


def _all_right(doc: Mapping[str, Any], answers: CaseAnswers, kinds: Sequence[str], match: Match) -> float:
    """1 if all facts of some kinds are right; a wrong one decides, whether the others have an answer or not.

    Raises:
        Unscored: no answer to one of them and no other is wrong, or no demonstrations for its relation, which does not
            depend on the model: such cases could only score 0.
        Excluded: there are no such facts.
    """
    if lacking := [relation for kind, relation in doc["without_demonstrations"] if kind in kinds]:
        raise Unscored(f"there are no demonstrations of relation {', '.join(dict.fromkeys(lacking))}")
    facts = [
        (answered, accepted)
        for answered, accepted in zip(answers.probes, doc["accepted"], strict=False)
        if answered.probe.kind in kinds
    ]
    if not facts:
        raise Excluded

    def right(fact: tuple[ProbeAnswers, Sequence[str]]) -> object:
        answered, accepted = fact
        if answered.probe.kind == EDITED_HOP:
            return measures.tf_exact(answered.wanted)
        return match(_text(answered, unedited=answered.probe.only_unedited), accepted)

    return float(all_true(facts, right))


def score_multi_hop(doc: Mapping[str, Any], answers: CaseAnswers) -> dict[str, Measure]:
    """One of the wordings is answered right."""
    return _multi_hop_measures("multi_hop", doc, answers, str)


def score_multi_hop_cot(doc: Mapping[str, Any], answers: CaseAnswers) -> dict[str, Measure]:
    """One of the wordings is answered right after its thoughts; the share of wordings with an answer."""
    probes = answers.of_kind(MULTI_HOP)

    def wrote_answer(answered: ProbeAnswers) -> float:
        return float(bool(final_answer(_text(answered))))

    return _multi_hop_measures("multi_hop_cot", doc, answers, final_answer) | {
        "multi_hop_cot_answered": mean_over(probes, WORDINGS, wrote_answer)
    }


def _multi_hop_measures(
    prefix: str, doc: Mapping[str, Any], answers: CaseAnswers, extract: Callable[[str], str]
) -> dict[str, Measure]:
    """Any wording right: new answer and old answer of the edited model, old answer of the unedited one."""
    probes = answers.of_kind(MULTI_HOP)

    def right(answered: ProbeAnswers, *, accepted: str, match: Match, unedited: bool) -> bool:
        return match(extract(_text(answered, unedited=unedited)), doc[accepted])

    columns = {
        f"{prefix}_{{}}": ("answers", False),
        f"{prefix}_old_{{}}": ("old_answers", False),
        f"{prefix}_old_{{}}_unedited": ("old_answers", True),
    }
    return {
        column.format(name): partial(
            _any_right, probes, partial(right, accepted=accepted, match=match, unedited=unedited)
        )
        for name, match in MATCHES.items()
        for column, (accepted, unedited) in columns.items()
    }


def _any_right(probes: Sequence[ProbeAnswers], right: Callable[[ProbeAnswers], bool]) -> float:
    """1 if one wording is answered right."""
    return float(any_true(probes, right))


def _text(answered: ProbeAnswers, *, unedited: bool = False) -> str:
    return measures.generated_text(answered.generation, unedited=unedited).text
