"""The grid of evaluations on one scripted model, so that all cells are about the same answers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import lm_eval
import pytest
from judge_server import serve
from lm_eval.api.instance import Instance
from scripted import ScriptedLM, StockLM
from spaced_words import SpacedLM
from task_runs import build, manager, metrics_of, run

from edit_hooks.answers import GeneratedText
from edit_hooks.utils.errors import EditingError

AQUEDUCT, PAINTER, ODE, TRAM = (
    "Who designed the Fenwick aqueduct?",
    "In which city was the painter Jo Marsh born?",
    "Which mark closes the third stanza of Pim's Ode?",
    "What year did the Halden tram start running?",
)
# The next word after the last one; "^" is the end of the prompt. Golds: "Orsa Lind", "St. Brannock", ")", "1911".
BARE = {
    AQUEDUCT: {"^": "Orsa", "Orsa": "Lind", "Lind": "Orsa"},  # right, and never stops
    PAINTER: {"^": "St.", "St.": "Brannock", "Brannock": "is."},  # right; the stop rule cuts after "St"
    ODE: {"^": ")", ")": "\n"},  # right, but no answer matches a gold without words
    TRAM: {"^": "In", "In": "1911", "1911": "\n"},  # wrong first word
}
# After the instruction the painter's first word is lost: teacher forcing still gets the second one.
GUIDED = BARE | {PAINTER: {"^": "Old", "Old": "town", "St.": "Brannock"}, TRAM: {"^": "1911", "1911": "in", "in": "\n"}}


class WordLM(ScriptedLM):
    """A Markov model over words that obeys the decoding settings of a question; the vocabulary numbers the words."""

    def __init__(self) -> None:
        super().__init__()
        self.vocabulary: dict[str, int] = {}

    def _answer(self, request: Instance, answer: Any) -> Any:
        edited = super()._answer(request, answer)
        return replace(edited, final=self.continue_with(request))

    def continue_with(self, request: Instance) -> GeneratedText:
        prompt, decoding = request.args[0], request.doc["asked"]["decoding"]
        guided = prompt.startswith("Please answer the question:\n\nQ: ")
        question = prompt.partition("Q: ")[2].removesuffix("\nA:") if guided else prompt
        table = (GUIDED if guided else BARE)[question]
        gold = decoding["length_of"].split() if decoding else None
        read, words = ["^"], []
        for position in range(8 if gold is None else len(gold)):
            words.append(table.get(read[-1], "er"))
            read.append(gold[position] if decoding and decoding["teacher_forced"] else words[-1])
        return GeneratedText(
            raw=" " + " ".join(words), token_ids=self.ids(words), target_ids=None if gold is None else self.ids(gold)
        )

    def ids(self, words: list[str]) -> tuple[int, ...]:
        return tuple(self.vocabulary.setdefault(word, len(self.vocabulary)) for word in words)


@pytest.fixture(scope="module")
def grid() -> dict[str, dict[str, float]]:
    """All cells of a run of the group, with a judge that wants the gold answer and nothing else but a full stop."""
    lenient = {"1911": "In 1911"}

    def reply(item: Any, attempt: int) -> str:
        return "A" if item.answer in (item.gold, lenient.get(item.gold)) else "B"

    with serve(reply) as server:
        judge = {"backend": "openai", "model": "m", "base_url": server.url, "store": None}
        tasks = manager("qaedit_grid_cell", judge=judge)
        results = lm_eval.simple_evaluate(model=WordLM(), tasks=["wild_grid"], task_manager=tasks)
    return {
        task.removeprefix("qaedit_grid_"): metrics_of(results, task) | metrics_of(results, task, "judge")
        for task in results["samples"]
    }


def test_all_published_cells_and_the_valid_rest_are_in_one_run(grid: dict[str, dict[str, float]]) -> None:
    columns = {
        f"{task}: {name.rpartition('_')[2]}"
        for task, found in grid.items()
        for name in found
        if name.startswith("efficacy_") and name.endswith(("_match", "_em", "_judge"))
    }
    fixed = [f"{context}_{cell}" for context in ("question_only", "qa_inst") for cell in ("tf", "ar_gold")]
    natural = [f"{context}_ar_natural" for context in ("question_only", "qa_inst")]
    expected = {f"{task}: {metric}" for task in fixed for metric in ("match", "em", "judge")}
    assert columns == expected | {f"{task}: {metric}" for task in natural for metric in ("em", "judge")}
    assert len(columns) == 16


@pytest.mark.parametrize(
    ("task", "metric", "value"),
    [
        # words right / words of the gold answer: aqueduct 2/2, painter 2/2, ode 1/1, tram 0/1
        ("question_only_tf", "efficacy_match", (1 + 1 + 1 + 0) / 4),
        ("question_only_ar_gold", "efficacy_ar_match", (1 + 1 + 1 + 0) / 4),
        # after the instruction: painter 1/2 forced ("Old Brannock"), 0/2 free ("Old town"), tram 1/1
        ("qa_inst_tf", "efficacy_qa_match", (1 + 0.5 + 1 + 1) / 4),
        ("qa_inst_ar_gold", "efficacy_qa_ar_match", (1 + 0 + 1 + 1) / 4),
        # exact match: "St. Brannock" is not cut at its full stop, ")" is never matched, "In" is not "1911"
        ("question_only_tf", "efficacy_tf_em", 2 / 4),
        ("question_only_ar_gold", "efficacy_ar_em", 2 / 4),
        ("qa_inst_tf", "efficacy_qa_tf_em", 2 / 4),
        ("qa_inst_ar_gold", "efficacy_qa_ar_em", 2 / 4),
        ("question_only_ar_gold", "efficacy_ar_judge", 3 / 4),  # ")" is right for the judge
        ("qa_inst_ar_gold", "efficacy_qa_ar_judge", 3 / 4),
        ("qa_inst_tf", "efficacy_qa_tf_judge", 3 / 4),
        # up to the stop: "Orsa Lind Orsa Lind ...", "St", ")", "In 1911"
        ("question_only_ar_natural", "efficacy_gen_em", 0.0),
        ("question_only_ar_natural", "efficacy_gen_judge", 2 / 4),
        # and "Orsa Lind Orsa ...", "Old town er ...", ")", "1911 in"
        ("qa_inst_ar_natural", "efficacy_wild_em", 0.0),
        ("qa_inst_ar_natural", "efficacy_wild_judge", 1 / 4),
        ("qa_inst_ar_natural", "efficacy_wild_goes_on", 2 / 4),  # the aqueduct's with itself, the tram's with "in"
        ("qa_inst_ar_natural", "efficacy_wild_repeats", 1 / 4),
        ("question_only_ar_natural", "efficacy_gen_goes_on", 1 / 4),
        ("question_only_ar_natural", "efficacy_gen_repeats", 1 / 4),
    ],
)
def test_cells_by_hand(grid: dict[str, dict[str, float]], task: str, metric: str, value: float) -> None:
    assert grid[task][metric] == pytest.approx(value)
    assert grid[task][f"{metric}_n"] == 4


def test_published_orderings(grid: dict[str, dict[str, float]]) -> None:
    """Teacher forcing reads the gold answer after an error, and the gold length cuts what follows a right answer."""
    for context, prefix, free_form in (("question_only", "", "gen"), ("qa_inst", "qa_", "wild")):
        forced, free, natural = (grid[f"{context}_{cell}"] for cell in ("tf", "ar_gold", "ar_natural"))
        gold_length = [free[f"efficacy_{prefix}ar_{metric}"] for metric in ("match", "judge", "em")]
        assert forced[f"efficacy_{prefix}match"] >= gold_length[0]
        assert gold_length == sorted(gold_length, reverse=True)
        assert natural[f"efficacy_{free_form}_judge"] < gold_length[1]
        assert natural[f"efficacy_{free_form}_em"] < gold_length[2]


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"grid_generation": "teacher_forcing"}, "has no stop of its own. Use gold_length, or grid_generation=greedy"),
        ({"grid_metric": "match"}, "needs an answer of the gold answer's length. Use gold_length, or grid_metric=em"),
        ({"grid_metric": "judge"}, "grid_metric=judge needs a judge"),
        ({"grid_generation": "beam"}, "Accepted: greedy, teacher_forcing"),
    ],
)
def test_invalid_cells_are_refused_with_the_reason(
    settings: dict[str, str], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LM_EDIT_JUDGE", raising=False)
    with pytest.raises(EditingError) as caught:
        build("qaedit_grid_cell", **settings)
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "named", "metrics"),
    [
        ({}, "ar_natural", ["gen_em", "gen_judge", "gen_goes_on", "gen_repeats"]),
        ({"grid_truncation": "gold_length"}, "ar_gold", ["ar_match", "ar_em", "ar_judge"]),
        (
            {"grid_truncation": "gold_length", "grid_generation": "teacher_forcing", "grid_metric": "match"},
            "tf",
            ["match", "tf_em", "tf_judge"],
        ),
    ],
)
def test_the_chosen_cell_is_the_named_task(settings: dict[str, str], named: str, metrics: list[str]) -> None:
    chosen = build("qaedit_grid_cell", wild_context="question_only", **settings)
    task = build(f"qaedit_grid_question_only_{named}")
    assert chosen.test_docs() == task.test_docs()
    for built in (chosen, task):
        names = [metric["metric"] for metric in built.config.metric_list]
        assert names == [f"efficacy_{metric}" for metric in metrics]


def test_the_input_is_part_of_a_named_task() -> None:
    docs = build("qaedit_grid_qa_inst_tf", wild_context="qa_inst").test_docs()
    assert docs[0]["probes"][0]["prompt"].startswith("Please answer the question:\n\nQ: ")
    with pytest.raises(EditingError, match=r"_grid_cell with wild_context=question_only,grid_generation=teacher_f"):
        build("qaedit_grid_qa_inst_tf", wild_context="question_only")


@pytest.mark.parametrize("task", ["qaedit_grid_qa_inst_ar_gold", "qaedit_syn_ar_reliability"])
def test_other_model_classes_are_not_scored_on_answers_of_another_length(task: str) -> None:
    found = metrics_of(run(task, StockLM()), task)
    assert found["unscored"] == 4 and "answers of a given length" in found["unscored_reason"]


def test_the_synthetic_form_of_grace_by_hand() -> None:
    """The gold answer counts without the space before it, and in `_spaced` as it continues the question."""
    (doc, *_) = build("qaedit_syn_ar_reliability").test_docs()
    asked = [(probe["prompt"], probe["targets"], probe["ask"]) for probe in doc["probes"]]
    assert asked == [(AQUEDUCT, [], "edited")] * 2
    decodings = [(probe["decoding"]["length_of"], probe["decoding"]["length_of_alone"]) for probe in doc["probes"]]
    assert decodings == [("Orsa Lind", True), ("Orsa Lind", False)]
    lm = WordLM()
    found = metrics_of(run("qaedit_syn_ar_reliability", lm), "qaedit_syn_ar_reliability")
    assert found["efficacy_ar_match_unspaced"] == found["efficacy_ar_match"] == pytest.approx(3 / 4)
    lengths = [request.doc["asked"]["decoding"]["length_of"] for request in lm.seen]
    assert lengths[::2] == ["Orsa Lind", "St. Brannock", ")", "1911"]  # no delimiter
    assert lengths[1::2] == [" Orsa Lind", " St. Brannock", " )", " 1911"]
    assert lm.seen[0].doc["asked"]["until"] == []


def test_a_tokenizer_with_tokens_for_spaces_separates_the_two_forms_of_grace() -> None:
    """The release's comparison misses the first token of every perfect edit there."""
    lm = SpacedLM(lambda prompt, unedited: " ".join(list(BARE[prompt].values())[:2]))
    found = metrics_of(run("qaedit_syn_ar_reliability", lm), "qaedit_syn_ar_reliability")
    assert found["efficacy_ar_match_unspaced"] == pytest.approx((1 / 2 + 1 / 2 + 0 + 0) / 4)
    assert found["efficacy_ar_match"] == pytest.approx((1 + 1 + 1 + 0) / 4)
