"""IFR and CKP by hand: weights, activity, aliases, repeated questions, clipping, forms, and missing answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from scripted import generated, scored

from edit_hooks.answers import FailedAnswer
from edit_hooks.decoding import Decoding, Sampling
from edit_hooks.request import EditRequest
from edit_hooks.utils.errors import EditingError
from lm_eval_tasks.common.asking.probes import CaseAnswers, case_requests
from lm_eval_tasks.common.scoring.aggregation import pooled_mean, total_scored
from lm_eval_tasks.common.scoring.measures import Score, evaluate
from lm_eval_tasks.knowgic import chains
from lm_eval_tasks.knowgic.case import ChainCase, Hop

REQUEST = EditRequest(prompt="{} is in", subject="Vorun", target_new="Norway", target_true="Kenya", case_id="0")
NO_ALIASES = {"knowgic_aliases": "none"}


def hop(question: str, answer: str = "Orl", subject: str = "S", relation: str = "is near") -> Hop:
    return Hop(question, answer, f"{subject} {relation}", subject, relation)


def case(chain_questions: Sequence[Sequence[str]], context: Sequence[str] = ()) -> ChainCase:
    return ChainCase(
        request=REQUEST, chains=[tuple(map(hop, chain)) for chain in chain_questions], context=list(map(hop, context))
    )


def likelihoods(case: ChainCase, probabilities: dict[str, tuple[float, float]]) -> CaseAnswers:
    """One-token answers with these probabilities (unedited, edited) by question."""
    doc = chains.prob_doc(case, {"knowgic_context": "question_only"})
    answers = []
    for request in case_requests(doc):
        before, after = probabilities[request.probe.prompt]
        known = scored(math.log(before), [0 if before >= 0.5 else 1])
        answers.append(replace(scored(math.log(after), [0]), unedited=known))
    return CaseAnswers(doc, answers)


def responses(
    case: ChainCase,
    texts: Callable[[str], tuple[Sequence[str], Sequence[str]]],
    document: Callable[..., dict[str, Any]] = chains.sampled_doc,
    **settings: Any,
) -> CaseAnswers:
    """Responses by prompt: those of the unedited model, those of the edited one."""
    doc = document(case, {"knowgic_context": "question_only", "knowgic_draws": 2, **NO_ALIASES, **settings})
    answers = []
    for request in case_requests(doc):
        before, after = texts(request.probe.prompt)
        old, new = generated(before[request.draw], "length"), generated(after[request.draw], "length")
        answers.append(replace(new, unedited=old))
    return CaseAnswers(doc, answers)


def scores(answers: CaseAnswers) -> dict[str, Score]:
    return {name: evaluate(measure) for name, measure in chains.score_chains(answers.doc, answers).items()}


def values(answers: CaseAnswers) -> dict[str, Any]:
    return {name: score.value for name, score in scores(answers).items()}


def test_the_examples_of_the_release_by_hand() -> None:
    """R = .9 * .85 * .9 = .6885 before, .7 * .8 * .85 = .476 after: .476 / .6885 = .6914 (the release prints .70).

    CKP: (.7 / .9 + .8 / .85 + .6 / .9 + .5 / .85) / 4 = (.7778 + .9412 + .6667 + .5882) / 4 = .7435 (printed .725).
    """
    given = {"1": (0.9, 0.7), "2": (0.85, 0.8), "3": (0.9, 0.85)}
    given |= {"4": (0.9, 0.7), "5": (0.85, 0.8), "6": (0.9, 0.6), "7": (0.85, 0.5)}
    found = values(likelihoods(case([["1", "2", "3"]], ["4", "5", "6", "7"]), given))
    assert round(found["ifr_prob"]["value"], 4) == round(found["ifr_3_prob"]["value"], 4) == 0.6914
    assert round(found["ckp_prob"]["value"], 4) == 0.7435


def test_chains_weigh_one_over_the_root_of_their_length() -> None:
    """Ratios .5 (one step), 1 (four steps): (.5 * 1 + 1 * .5) / (1 + .5) = 2/3; by length they are .5 and 1."""
    given = {"1": (0.8, 0.4), **dict.fromkeys("abcd", (0.6, 0.6))}
    found = values(likelihoods(case([["1"], ["a", "b", "c", "d"]]), given))
    assert found["ifr_prob"] == {"value": pytest.approx(2 / 3), "weight": 1.5}
    assert found["ifr_1_prob"] == {"value": pytest.approx(0.5), "weight": 1.0}
    assert found["ifr_4_prob"] == {"value": pytest.approx(1.0), "weight": 0.5}
    assert (found["ifr_chains_prob"], found["ifr_active_prob"], found["ifr_4_active_prob"]) == (2, 2, 1)
    assert found["ifr_2_prob"] is None and found["ifr_2_active_prob"] is None


def test_chains_are_pooled_over_edits_and_not_averaged_per_edit() -> None:
    """Three one-step chains of ratio 1/2 in one edit, one of ratio 1 in another: (3 * 1/2 + 1) / 4 = 5/8, not 3/4."""
    first = values(likelihoods(case([["1"], ["2"], ["3"]]), dict.fromkeys("123", (0.8, 0.4))))
    second = values(likelihoods(case([["1"]]), {"1": (0.5, 0.5)}))
    assert pooled_mean([first["ifr_prob"], None, second["ifr_prob"]]) == pytest.approx(5 / 8)
    assert total_scored([first["ifr_active_prob"], None, second["ifr_active_prob"]]) == 4


def test_ratios_above_one_count_as_they_are_and_as_one_in_the_clipped_columns() -> None:
    """Ratios 2 and 1/2: mean 5/4; clipped (1 + 1/2) / 2 = 3/4."""
    given = {"1": (0.4, 0.8), "2": (0.8, 0.4), "3": (0.4, 0.8), "4": (0.8, 0.4)}
    found = values(likelihoods(case([["1"], ["2"]], ["3", "4"]), given))
    for name in ("ifr", "ckp"):
        assert found[f"{name}_prob"]["value"] == pytest.approx(5 / 4)
        assert found[f"{name}_clipped_prob"]["value"] == pytest.approx(3 / 4)


def test_a_context_counts_as_listed_and_once_per_edit_under_another_name() -> None:
    """ "1" three times with ratio 1/2, "2" once with ratio 1: (3/2 + 1) / 4 = 5/8; each once (1/2 + 1) / 2 = 3/4."""
    given = {"0": (0.5, 0.5), "1": (0.8, 0.4), "2": (0.5, 0.5)}
    found = values(likelihoods(case([["0"]], ["1", "1", "2", "1"]), given))
    assert found["ckp_prob"] == {"value": pytest.approx(5 / 8), "weight": 4.0}
    assert found["ckp_prob@distinct"] == {"value": pytest.approx(3 / 4), "weight": 2.0}
    assert found["ckp_questions_prob"] == 4


def test_a_question_of_several_chains_is_asked_once_and_scored_with_each_answer() -> None:
    """Q has the answers a (chain 1) and b (chain 2): .8 -> .4 and .2 -> .1 by targets of one probe."""
    several = replace(
        case([]), chains=[(hop("Q", "a"), hop("end")), (hop("Q", "b"), hop("end"))], context=[hop("Q", "b")]
    )
    doc = chains.prob_doc(several, {})
    assert [probe["targets"] for probe in doc["probes"]] == [["a", "b"], ["Orl"]]
    assert doc["chains"] == [[[0, "a"], [1, "Orl"]], [[0, "b"], [1, "Orl"]]] and doc["context"] == [[0, "b"]]
    pairs = iter([(0.8, 0.4), (0.2, 0.05), (0.5, 0.5)])
    answers = []
    for before, after in pairs:
        answers.append(replace(scored(math.log(after), [0]), unedited=scored(math.log(before), [0])))
    found = values(CaseAnswers(doc, answers))
    assert found["ifr_prob"]["value"] == pytest.approx((1 / 2 + 1 / 4) / 2)
    assert found["ckp_prob"]["value"] == pytest.approx(1 / 4)


def test_shares_of_responses_and_inactive_chains_by_hand() -> None:
    """Two responses. 1: 2/2 -> 1/2; 2: 1/2 -> 1/2; 3: never before, so every chain with it is inactive.

    Chain 1-2: (1/2 * 1/2) / (1 * 1/2) = 1/2, weight 1/sqrt 2; chain 1: 1/2; chain 2-3 inactive. IFR 1/2, 2 of 3 active.
    Context 2, 3: (1/2) / (1/2) = 1 over the one active question.
    """
    table = {
        "1": (["It is Orl.", "An orl, I think"], ["Orl", "no"]),
        "2": (["Orl", "Bo"], ["Bo", "the ORL!"]),
        "3": (["Bo", "Worlds"], ["Orl", "Orl"]),
    }
    found = values(responses(case([["1", "2"], ["1"], ["2", "3"]], ["2", "3"]), lambda prompt: table[prompt]))
    assert found["ifr_sampled"] == {"value": pytest.approx(1 / 2), "weight": pytest.approx(1 / math.sqrt(2) + 1)}
    assert (found["ifr_chains_sampled"], found["ifr_active_sampled"]) == (3, 2)
    assert [found[f"ifr_{steps}_active_sampled"] for steps in (1, 2, 3)] == [1, 1, None]
    assert found["ifr_active_after_sampled"] == 3
    assert found["ckp_sampled"] == {"value": 1.0, "weight": 1.0}
    assert (found["ckp_questions_sampled"], found["ckp_active_sampled"]) == (2, 1)
    assert found["known_sampled"] == {"value": pytest.approx(2 / 3), "weight": 3.0}


def test_chains_active_after_the_edit_are_counted_by_length() -> None:
    """Two responses. 1 and 2 keep an answer, 3 loses it, 4 has one after the edit only. Before: 1, 1-2, 3-1, not 4."""
    table = {
        "1": (["Orl", "Orl"], ["Orl", "Bo"]),
        "2": (["Orl", "Bo"], ["Bo", "Orl"]),
        "3": (["Orl", "Orl"], ["Bo", "Bo"]),
        "4": (["Bo", "Bo"], ["Orl", "Bo"]),
    }
    asked = case([["1"], ["1", "2"], ["3", "1"], ["4", "1"], ["1"] * 6])
    found = values(responses(asked, lambda prompt: table[prompt]))
    lengths = (1, 2, 3, 4, 5, "longer")
    assert [found[f"ifr_{length}_active_sampled"] for length in lengths] == [1, 2, None, None, None, 1]
    assert [found[f"ifr_{length}_active_after_sampled"] for length in lengths] == [1, 2, None, None, None, 1]
    assert found["ifr_active_sampled"] == found["ifr_active_after_sampled"] == 4
    rows = responses(case([["3"], ["4", "1"]]), lambda prompt: table[prompt])
    assert [values(rows)[f"ifr_{n}_active_after_sampled"] for n in (1, 2)] == [0, 1]


def test_deep_edited_up_to_n_steps_by_hand() -> None:
    """The direct answer is gone, a chain of two steps still leads there: deep edited up to one step, not up to two.

    "N" is a chain that the unedited model cannot follow: alone it leaves the edit unscored, and with others it counts.
    """
    gone, kept, new = (["Orl", "Orl"], ["Bo", "Bo"]), (["Orl", "Bo"], ["Bo", "Orl"]), (["Bo", "Bo"], ["Orl", "Bo"])
    table = {"G": gone, "K": kept, "N": new, "W": (["Bo", "Bo"], ["Bo", "Bo"])}

    def deep(*asked: str) -> list[Any]:
        found = scores(responses(case([list(chain) for chain in asked]), lambda prompt: table[prompt]))
        return [found[f"deep_edited_{name}sampled"] for name in ("1_", "2_", "3_", "4_", "5_", "")]

    def numbers(*asked: str) -> list[Any]:
        return [score.value for score in deep(*asked)]

    assert numbers("G", "KK") == [1, 0, 0, 0, 0, 0]
    assert numbers("G", "KG", "GKK") == [1, 1, 1, 1, 1, 1]
    assert numbers("G", "KKKKKK") == [1, 1, 1, 1, 1, 0]  # a chain of six steps
    assert numbers("GK") == [None, 1, 1, 1, 1, 1] and deep("GK")[0].excluded  # it has no chain of one step
    assert numbers("N") == [None] * 6 and "the unedited model answers none" in str(deep("N")[0].reason)
    assert numbers("W", "GG") == [None, 1, 1, 1, 1, 1]
    assert numbers("G", "N") == [0] * 6  # one response of the edited model names the object


def test_only_inactive_chains_have_no_value_and_a_reason() -> None:
    found = scores(responses(case([["1"]], ["1"]), lambda prompt: (["Bo", "Bo"], ["Orl", "Orl"])))
    assert found["ifr_sampled"].value is None and "answers none of the chains" in str(found["ifr_sampled"].reason)
    assert found["ckp_sampled"].value is None and found["ifr_active_sampled"].value == 0
    assert "no broader context" in str(scores(likelihoods(case([["1"]]), {"1": (0.5, 0.5)}))["ckp_prob"].reason)


def test_short_other_names_of_an_answer_have_their_case() -> None:
    """With some names of the release, "Let us look" counted as the USA: two of three responses instead of one."""
    names = ["USA", "the U.S.", "the US", "U. S.", "U.S.", "US", "United States"]
    assert chains.share_with_answer(["Let us look: it is Canada.", "The USA.", "Canada"], names) == 1 / 3
    for text in ("in the US", "The U.S. is", "US, of course", "U. S.", "usa", "the united states"):
        assert chains.share_with_answer([text], names) == 1
    for text in ("us", "tell us a.", "u s", "the USSR"):
        assert chains.share_with_answer([text], names) == 0
    assert chains.share_with_answer(["by Ms. Orl", "by MS", "by Microsoft"], ["Microsoft", "MS"]) == 2 / 3


def test_other_names_of_an_answer_count(tmp_path: Any) -> None:
    path = tmp_path / "aliases.json"
    path.write_text('{"KENYA": {"answer_alias": ["Republic of Kenya", "KE"]}}', encoding="utf-8")
    asked = replace(case([]), chains=[(hop("1", "Kenya"),)])
    texts = ["Near KE, they say", "the republic-of kenya"]
    named = responses(asked, lambda prompt: (texts, ["keen", texts[0]]), knowgic_aliases=str(path))
    assert named.doc["aliases"] == {"Kenya": ["Republic of Kenya", "KE"]}
    # "the republicof kenya" has no alias after normalization but the answer; "keen" has "ke" only inside of a word
    assert values(named)["ifr_sampled"]["value"] == pytest.approx(1 / 2)
    assert values(responses(asked, lambda prompt: (texts, texts)))["ifr_sampled"]["value"] == 1.0
    assert values(responses(asked, lambda prompt: (texts, ["KE", "KE"])))["ifr_sampled"]["value"] == 0.0


def test_responses_end_at_the_next_question() -> None:
    doc = chains.sampled_doc(case([["1"]]), {"generation_seed": 3, **NO_ALIASES})
    (probe,) = CaseAnswers(doc, [generated("", "length")] * 5).probes
    assert probe.probe.prompt == "Please answer the question:\n\nQ: 1\nA:"
    assert (probe.probe.num_draws, probe.probe.ask) == (5, "both")
    sampling = Sampling(temperature=0.7, seed=3)
    assert probe.probe.decoding == Decoding(max_new_tokens=64, until=("\nQ:",), sampling=sampling)


def test_yes_or_no_is_the_share_of_yes() -> None:
    """p(yes) .6 and p(no) .2 before: 3/4; .3 and .3 after: 1/2. Ratio 2/3. Sampled: the first word."""
    doc = chains.yes_no_prob_doc(case([["1"]]), {"knowgic_context": "question_only"})
    assert doc["probes"][0]["prompt"] == 'Is it true that "S is near Orl"? Answer with yes or no.'
    assert doc["probes"][0]["targets"] == ["Yes", "No"]
    pairs = [(0.6, 0.3), (0.2, 0.3)]
    answers = [replace(scored(math.log(after), [0]), unedited=scored(math.log(before), [0])) for before, after in pairs]
    found = values(CaseAnswers(doc, answers))
    assert found["ifr_yes_no_prob"]["value"] == pytest.approx(2 / 3) and found["known_yes_no_prob"]["value"] == 1.0
    sampled = responses(
        case([["1"]]), lambda prompt: (["Yes!", "yes, Orl"], ["No, yes", "yes"]), chains.yes_no_sampled_doc
    )
    assert values(sampled)["ifr_yes_no_sampled"]["value"] == pytest.approx(1 / 2)


def test_an_answer_that_is_yes_is_an_ordinary_answer_to_a_question_for_the_object() -> None:
    asked = replace(case([]), chains=[(hop("1", "Yes"),)])
    found = values(responses(asked, lambda prompt: (["well, yes", "no"], ["well, yes", "yes"])))
    assert found["ifr_sampled"]["value"] == pytest.approx(2.0)


def test_other_forms_ask_for_the_object_by_a_statement_and_for_the_relation() -> None:
    cloze = chains.cloze_prob_doc(case([["1"]]), {})["probes"][0]
    assert (cloze["prompt"], cloze["targets"]) == ("S is near", ["Orl"])
    relation = chains.relation_prob_doc(case([["1"]]), {"knowgic_context": "question_only"})["probes"][0]
    assert (relation["prompt"], relation["targets"]) == ('Which words link "S" to "Orl"?', ["is near"])


def test_known_chains_are_those_that_the_unedited_model_answers_throughout() -> None:
    """The scripted argmax is right from p = .5: chain 1 is known (ratio 1/2), chain 1-2 is not."""
    found = values(likelihoods(case([["1"], ["1", "2"]]), {"1": (0.8, 0.4), "2": (0.4, 0.4)}))
    assert found["ifr_prob@known"] == {"value": pytest.approx(1 / 2), "weight": 1.0}
    assert found["known_prob"] == {"value": pytest.approx(1 / 2), "weight": 2.0}


def test_one_answer_that_is_missing_leaves_its_means_unscored() -> None:
    answers = likelihoods(case([["1"], ["2", "3"]], ["3"]), dict.fromkeys("123", (0.5, 0.5)))
    answers.probes[1] = replace(answers.probes[1], targets=[FailedAnswer("no room")])
    found = scores(answers)
    assert found["ifr_prob"].reason == found["ifr_2_prob"].reason == "no room" and found["ifr_prob"].failed
    assert found["ifr_1_prob"].value["value"] == found["ckp_prob"].value["value"] == 1.0


def by_logs(chain_questions: Sequence[Sequence[str]], logs: dict[str, tuple[float, float]]) -> dict[str, Score]:
    """Scores of one-token answers with these log-probabilities (unedited, edited) by question; also the context."""
    asked = case(chain_questions, sorted(logs))
    doc = chains.prob_doc(asked, {"knowgic_context": "question_only"})
    answers = [
        replace(scored(logs[one.probe.prompt][1], [0]), unedited=scored(logs[one.probe.prompt][0], [0]))
        for one in case_requests(doc)
    ]
    return scores(CaseAnswers(doc, answers))


def test_probabilities_below_the_smallest_float_keep_their_ratio() -> None:
    """e^-800 -> e^-801: both are 0 as floats, their ratio is e^-1. In a chain, e^-400 * e^-400 = e^-800 likewise."""
    found = by_logs([["1"], ["2", "3"]], {"1": (-800.0, -801.0), "2": (-400.0, -400.0), "3": (-400.0, -401.0)})
    for name in ("ifr_prob", "ifr_1_prob", "ifr_2_prob"):
        assert found[name].value["value"] == pytest.approx(math.exp(-1)), name
    assert found["ifr_active_prob"].value == 2 and found["ckp_active_prob"].value == 3
    assert found["ckp_prob"].value["value"] == pytest.approx((2 * math.exp(-1) + 1) / 3)


def test_a_ratio_that_no_float_holds_is_unscored_and_1_if_clipped() -> None:
    found = by_logs([["1"], ["2", "2"]], {"1": (-800.0, 0.0), "2": (-1.0, -1.0)})
    assert found["ifr_prob"].reason == "a ratio is e^800, which is too large to average" and found["ifr_prob"].failed
    assert found["ifr_clipped_prob"].value["value"] == found["ifr_2_prob"].value["value"] == 1.0
    assert found["ckp_prob"].value is None and found["ifr_active_prob"].value == 2


def test_many_large_ratios_stay_finite_in_the_pooled_mean() -> None:
    one = by_logs([["1"], ["1", "1"]], {"1": (-340.0, 0.0)})["ifr_prob"].value
    assert math.isfinite(pooled_mean([one] * 5000) or math.inf)


def test_improbable_yes_against_improbable_no_has_its_share() -> None:
    """Yes e^-900 against no e^-900: 1/2 before; e^-900 against e^-1000 after: about 1. Ratio 2."""
    doc = chains.yes_no_prob_doc(case([["1"]]), {})
    pairs = [(-900.0, -900.0), (-900.0, -1000.0)]  # of yes, of no: (unedited, edited)
    answers = [replace(scored(after, [0]), unedited=scored(before, [0])) for before, after in pairs]
    found = scores(CaseAnswers(doc, answers))
    assert found["ifr_yes_no_prob"].value["value"] == pytest.approx(2.0) and found["known_yes_no_prob"].value == {
        "value": 0.0,
        "weight": 1.0,
    }


def test_longer_chains_have_a_column_of_their_own() -> None:
    """Six steps with ratio (1/2)^6 = 1/64, weight 1/sqrt 6, and seven with 1/128, weight 1/sqrt 7; and one step."""
    given = dict.fromkeys("abcdefg", (0.8, 0.4))
    found = values(likelihoods(case([list("abcdef"), list("abcdefg"), ["a"]]), given))
    first, second = 1 / math.sqrt(6), 1 / math.sqrt(7)
    wanted = (first / 64 + second / 128) / (first + second)
    assert found["ifr_longer_prob"] == {"value": pytest.approx(wanted), "weight": pytest.approx(first + second)}
    assert found["ifr_longer_active_prob"] == 2 and found["ifr_1_active_prob"] == 1
    short = scores(likelihoods(case([["a"]]), given))["ifr_longer_prob"]
    assert short.excluded and short.value is short.reason is None  # the record has no such chain


@pytest.mark.parametrize(
    ("name", "value"),
    [("knowgic_draws", 0), ("knowgic_temperature", 0), ("knowgic_max_tokens", 1.5), ("knowgic_context", "x")],
)
def test_settings_are_checked(name: str, value: Any) -> None:
    with pytest.raises(EditingError, match=name):
        chains.KNOWGIC.check_settings({name: value})


def test_a_chain_with_an_unknown_question_is_unknown_whatever_its_other_answers() -> None:
    """ "2" has no answer. Chain 2-3: "3" is unknown (p .4), so it is not in ifr@known; chain 1 is, with ratio 1/2."""
    given = {"1": (0.8, 0.4), "2": (0.5, 0.5), "3": (0.4, 0.4)}
    answers = likelihoods(case([["2", "3"], ["1"]]), given)
    answers.probes[0] = replace(answers.probes[0], targets=[FailedAnswer("no room")])
    found = scores(answers)
    assert found["ifr_prob@known"].value == {"value": pytest.approx(1 / 2), "weight": 1.0}
    assert found["ifr_prob"].reason == "no room"


def after_a_failed_edit(answers: CaseAnswers) -> CaseAnswers:
    """The same questions; of the edited model there is no answer."""

    def failed(answer: Any) -> FailedAnswer:
        return FailedAnswer("edit failed: no layer", unedited=answer.unedited)

    for number, one in enumerate(answers.probes):
        targets, generations = list(map(failed, one.targets)), list(map(failed, one.generations))
        answers.probes[number] = replace(one, targets=targets, generations=generations)
    return answers


def test_columns_of_the_unedited_model_keep_their_value_beside_a_failed_edit() -> None:
    """Counts of all chains and of the active ones are over the same edits then."""
    table = {"1": (["Orl", "Bo"], ["Bo", "Bo"]), "2": (["Bo", "Bo"], ["Orl", "Bo"])}
    asked = case([["1"], ["1", "2"], ["1", "1"]], ["1", "2"])
    given = {"1": (0.8, 0.4), "2": (0.4, 0.4)}
    of_unedited = {"known", "ifr_chains", "ifr_active", "ckp_questions", "ckp_active"}
    of_unedited |= {f"ifr_{length}_active" for length in (1, 2, 3, 4, 5, "longer")}
    for ending, make in (
        ("sampled", lambda: responses(asked, lambda prompt: table[prompt])),
        ("prob", lambda: likelihoods(asked, given)),
    ):
        made, failed = scores(make()), scores(after_a_failed_edit(make()))
        for name in of_unedited:
            assert failed[f"{name}_{ending}"] == made[f"{name}_{ending}"], name
        of_edited = ["ifr", "ifr_2", "ifr_active_after", "ifr_1_active_after", "ckp", "deep_edited"]
        for name in [f"ifr_{ending}@known", *(f"{name}_{ending}" for name in of_edited)]:
            score = failed[name]
            assert score.failed and score.reason == "edit failed: no layer", name
    assert failed["ifr_active_prob"].value == 3 and failed["known_prob"].value["value"] == 1 / 2


def test_chains_that_the_unedited_model_cannot_follow_are_no_failures_of_an_edit() -> None:
    found = scores(after_a_failed_edit(responses(case([["1"]], ["1"]), lambda prompt: (["Bo", "Bo"], ["Bo", "Bo"]))))
    for name in ("ifr_sampled", "deep_edited_sampled", "ckp_sampled"):
        assert not found[name].failed and "the unedited model answers none" in str(found[name].reason)
