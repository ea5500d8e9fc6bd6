"""Growth of a knowledge graph with people who decide, correct, refine and add."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from graph_world import ROUND_1, ROUND_2, ROUND_3, SEED, World, facts_of, parse_prompt, seeds_of

from edit_hooks.utils.errors import EditingError
from lm_edit.builders.facts import Fact
from lm_edit.builders.knowgic import growth as rules
from lm_edit.builders.knowgic.growth import Grower, GrowthLimits
from lm_edit.builders.knowgic.review import ChainFailure, ChainLine, Failure, Line, Review, read_review, triplet_id
from lm_edit.builders.knowgic.validation import UNKNOWN


def decided(growth: Any, keep: bool) -> list[Line]:
    return [Line(triplet_id(one.fact), one.round, one.fact, keep) for one in growth.waiting]


def seen(growth: Any) -> tuple[list[Line], list[ChainLine]]:
    """The lines of what failed, as the program writes them."""
    triplets = [
        Line(one.id, one.round, one.fact, False, one.question, one.statement)
        for one in growth.failures
        if isinstance(one, Failure)
    ]
    chains = [ChainLine(one.id, one.path, one.question) for one in growth.failures if isinstance(one, ChainFailure)]
    return triplets, chains


class Reader:
    """People who look at everything that is shown, keep all valid triplets and change what a function changes."""

    def __init__(self, folder: Path, world: World, **limits: Any) -> None:
        self.grower: Any = None
        self.folder, self.world, self.limits = folder, world, GrowthLimits(**limits)
        self.lines: list[Line] = []
        self.chains: list[ChainLine] = []

    def grow(self, change: Any = lambda line: line, seeds: dict[str, Any] | None = None) -> Any:
        """Run until nothing waits; returns the growth."""
        for _ in range(9):
            review = Review([change(line) for line in self.lines], [change(line) for line in self.chains])
            self.grower = Grower(seeds_of(self.folder, **(seeds or {})), self.world.ask, self.limits, review)
            growth = self.grower.grow()
            if not (growth.waiting or growth.failures):
                return growth
            assert growth.stopped == rules.WAITING
            triplets, chains = seen(growth)
            self.lines += [*decided(growth, True), *triplets]
            self.chains += chains
        raise AssertionError("it never ends")


FRIEND = Fact("Ada Moss", "friend", "Zed Orr")


def test_failed_triplets_and_questions_are_shown_once(tmp_path: Path) -> None:
    reader = Reader(tmp_path, World(), rounds=9)
    growth = reader.grow()
    failed = [line for line in reader.lines if line.is_failed]
    assert [(line.fact, line.round, line.keep, line.is_own) for line in failed] == [(FRIEND, 1, False, False)]
    assert (failed[0].question, failed[0].statement) == (
        "What is the friend of Ada Moss?", "The friend of Ada Moss is Zed Orr"
    )  # fmt: skip
    assert len(reader.chains) == len({line.path for line in reader.chains}) == len(growth.chain_questions) > 1
    assert not any(line.is_own for line in reader.chains) and len({line.id for line in reader.lines}) == 7
    alone = Grower(seeds_of(tmp_path), World().ask, GrowthLimits(rounds=9)).grow()
    assert facts_of(growth) == facts_of(alone) and growth.discarded == alone.discarded


def corrected(**changes: Any) -> Any:
    """A change of the line about the friend, the first time that it is shown."""

    def change(line: Any) -> Any:
        is_first = isinstance(line, Line) and line.is_failed and line.question == "What is the friend of Ada Moss?"
        return line._replace(**{"keep": True, **changes}) if is_first and line.fact == FRIEND else line

    return change


def test_a_corrected_failed_triplet_is_validated_again(tmp_path: Path) -> None:
    """Its old question is not that of people: the triplet gets the wording of its relation."""
    town = Fact("Elmwood", "town", "Fenn")
    reader = Reader(tmp_path, World(), rounds=1)
    growth = reader.grow(corrected(fact=town))
    assert town in facts_of(growth) and FRIEND in dict(growth.discarded)
    assert reader.grower.graph().relations["town"].question == "What is the town of {}?"
    other = Reader(tmp_path, World(), rounds=1)
    wrong = Fact("Elmwood", "town", "Bo Reed")
    growth = other.grow(corrected(fact=wrong))
    assert dict(growth.discarded)[wrong] == UNKNOWN
    assert [line.fact for line in other.lines if line.is_failed] == [FRIEND, wrong]  # people see that it failed


def test_a_question_of_people_is_the_wording_of_its_relation_or_of_its_triplet_alone(tmp_path: Path) -> None:
    """ "friend" has no wording before; "school" has one, with which the triplet of Gus Ray failed."""
    asked = {"Who is Ada Moss fond of?": "Zed Orr", "Which school had Gus Ray?": "Elmwood"}
    world = World({"question": lambda question: asked.get(question)})
    change = corrected(question="Who is  Ada Moss fond of?", statement="Ada Moss is fond of Zed Orr")
    reader = Reader(tmp_path, world, rounds=1)
    growth = reader.grow(change)
    assert FRIEND in facts_of(growth) and FRIEND not in dict(growth.discarded)
    graph = reader.grower.graph()
    assert graph.relations["friend"] == ("{} is fond of", "Who is {} fond of?") and not graph.wordings

    gus = Fact("Gus Ray", "school", "Elmwood")

    def ask_gus(line: Any) -> Any:
        if isinstance(line, Line) and line.is_failed and line.fact == gus and line.question.startswith("What"):
            return line._replace(keep=True, question="Which school had Gus Ray?", statement="Gus Ray was in Elmwood")
        return line

    reader = Reader(tmp_path, world, rounds=1)
    growth = reader.grow(ask_gus, {"facts": [list(gus)]})
    graph = reader.grower.graph()
    assert gus in facts_of(growth)[:2] and graph.wordings == {gus: ("{} was in", "Which school had {}?")}
    assert graph.relations["school"].question == "What is the school of {}?"
    assert graph.wording(gus) != graph.wording(SEED) == graph.relations["school"]


def test_a_seed_that_failed_is_asked_with_the_question_of_people(tmp_path: Path) -> None:
    """Nothing else is valid, so nothing would grow without it; the seed keeps its edit."""
    world = World({"question": lambda question: "Elmwood" if question == "Where was Ada Moss?" else "To bed."})

    def change(line: Any) -> Any:
        if isinstance(line, Line) and line.fact == SEED and line.question != "Where was Ada Moss?":
            return line._replace(keep=True, question="Where was Ada Moss?", statement="Ada Moss was in Elmwood")
        return line

    reader = Reader(tmp_path, world, rounds=1)
    with pytest.raises(EditingError, match="no seed triplet was validated"):
        reader.grow()
    assert [(line.fact, line.round) for line in reader.lines] == [(SEED, 0)]
    growth = reader.grow(change)
    assert facts_of(growth)[0] == SEED and growth.facts[0].candidate.origin == "seed"
    assert [edit.fact for edit in reader.grower.graph().edits] == [SEED]
    with pytest.raises(EditingError, match="corrects a seed triplet; correct it in the file of seeds"):
        reader.grow(lambda line: line._replace(keep=True, fact=Fact("Ada Moss", "school", "Pine")))


def test_an_undecided_failed_line_waits(tmp_path: Path) -> None:
    reader = Reader(tmp_path, World(), rounds=1)
    reader.grow()
    lines = [line._replace(keep=None) if line.is_failed else line for line in reader.lines]
    growth = Grower(seeds_of(tmp_path), World().ask, GrowthLimits(rounds=1), Review(lines, reader.chains)).grow()
    assert growth.stopped == rules.WAITING and growth.num_own_waiting == 1 and not growth.waiting


def test_a_triplet_that_becomes_valid_is_proposed_in_a_line_of_its_own(tmp_path: Path) -> None:
    """keep: false of the failed one is no decision about the valid one, as after a new alias in the file of seeds."""
    reader = Reader(tmp_path, World(), rounds=1)
    reader.grow()
    aliases = {"Elmwood": ["Elm College"], "Zed Orr": ["not know"]}
    growth = Grower(
        seeds_of(tmp_path, aliases=aliases), World().ask, GrowthLimits(rounds=1), Review(reader.lines)
    ).grow()
    assert [one.fact for one in growth.waiting] == [FRIEND] and Review(reader.lines).lacks(growth.waiting[0])


def test_questions_of_people_are_tried_in_turn_and_each_failure_is_shown(tmp_path: Path) -> None:
    questions = [f"Whom did Ada Moss like {n}?" for n in range(3)]
    world = World({"question": lambda question: "Zed Orr" if question == questions[2] else None})
    reader = Reader(tmp_path, world, rounds=1)
    tried: list[str] = []

    def change(line: Any) -> Any:
        """Whatever failed about the friend gets the next question; what has one keeps it."""
        if not (isinstance(line, Line) and line.is_failed and line.fact == FRIEND):
            return line
        if line.question not in tried:
            tried.append(line.question)
        return line._replace(
            keep=True, question=questions[tried.index(line.question)], statement="Ada Moss has Zed Orr"
        )

    growth = reader.grow(change)
    assert FRIEND in facts_of(growth)
    assert tried == ["What is the friend of Ada Moss?", *questions[:2]]
    assert reader.grower.graph().relations["friend"].question == "Whom did {} like 2?"


def test_a_question_of_people_about_a_chain_is_reasoned_about(tmp_path: Path) -> None:
    question = "Where does the house of Ada Moss belong?"
    world = World({"question": lambda text: "To Elmwood." if text == question else None})
    reader = Reader(tmp_path, world, rounds=2)

    def change(line: Any) -> Any:
        is_it = isinstance(line, ChainLine) and [fact.relation for fact in line.path] == ["house", "home"]
        return line._replace(question=question) if is_it else line

    growth = reader.grow(change)
    (asked,) = [one for one in growth.chain_questions if len(one.path) == 2 and one.path[0].relation == "house"]
    assert (asked.question, asked.problem) == (question, "")
    assert ("reasoning", question) in map(parse_prompt, world.prompts)
    review = Review(reader.lines, [change(line) for line in reader.chains])
    paths = {one.path for one in growth.chain_questions}
    assert review.num_unmet(growth.proposed, growth.rounds, paths) == 0
    assert review.num_unmet(growth.proposed, growth.rounds) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"question": "Who is she fond of?", "statement": "Ada Moss is fond of Zed Orr"}, "the subject does not occur"),
        ({"question": "Who is Ada Moss fond of?", "statement": ""}, "empty, too long, or has brackets"),
        ({"question": "Is Ada Moss fond of Zed Orr?", "statement": "Ada Moss has Zed Orr"}, "the object occurs in"),
        ({"question": "Who is Ada Moss fond of?", "statement": "Zed Orr"}, "does not end with the object"),
    ],
)
def test_texts_of_people_are_checked_before_any_request(change: Any, message: str, tmp_path: Path) -> None:
    reader = Reader(tmp_path, World(), rounds=1)
    reader.grow()
    num_prompts = reader.world.prompts.total()
    with pytest.raises(EditingError, match=message):
        reader.grow(corrected(**change))
    with pytest.raises(EditingError, match="cannot be asked about the chain: the last object occurs in the question"):
        path = (Fact("Ada Moss", "house", "Larkhall"), Fact("Larkhall", "home", "Elmwood"))
        Grower(
            seeds_of(tmp_path),
            reader.world.ask,
            GrowthLimits(),
            Review([], [ChainLine(None, path, "Is Ada Moss in Elmwood?")]),
        )
    assert reader.world.prompts.total() == num_prompts


def test_decisions_are_asked_round_by_round(tmp_path: Path) -> None:
    lines: list[Line] = []
    chains: list[ChainLine] = []
    waited = []
    for _ in range(9):
        growth = Grower(seeds_of(tmp_path), World().ask, GrowthLimits(rounds=9), Review(lines, chains)).grow()
        if not (growth.waiting or growth.failures):
            break
        assert rules.REJECTED not in growth.reasons()
        waited.append({proposal.fact for proposal in growth.waiting})
        failed, questions = seen(growth)
        lines += [*decided(growth, True), *failed]
        chains += questions
    assert waited == [ROUND_1, ROUND_2, ROUND_3]
    alone = Grower(seeds_of(tmp_path), World().ask, GrowthLimits(rounds=9)).grow()
    assert facts_of(growth) == facts_of(alone) and growth.discarded == alone.discarded


def test_what_people_reject_correct_and_add(tmp_path: Path) -> None:
    def grow(lines: list[Line]) -> Any:
        """Twice: with the lines of what failed, which people leave as they are."""
        shown: list[Line] = []
        for _ in range(3):
            growth = Grower(seeds_of(tmp_path), World().ask, GrowthLimits(rounds=1), Review([*lines, *shown])).grow()
            shown += seen(growth)[0]
        return growth

    classmate, house, home = (Fact("Ada Moss", "classmate", "Bo Reed"), Fact("Ada Moss", "house", "Larkhall"),
                              Fact("Larkhall", "home", "Elmwood"))  # fmt: skip
    lines = [
        Line(triplet_id(classmate), 1, classmate, False),
        Line(triplet_id(house), 1, Fact("Elmwood", "town", "Fenn"), True),  # a correction
        Line(triplet_id(home), 1, home, True),
        Line(None, 1, Fact("Bo Reed", "School", "Elm College"), True),  # an addition, in other spellings
        Line(None, 1, Fact("Bo Reed", "school", "Larkhall"), True),  # the model has another answer
        Line(None, 0, Fact("Fenn", "pupil", "Ada Moss"), True),  # without a round: from the start
        Line(None, 7, Fact("Fenn", "mayor", "Ada Moss"), True),
        Line("0" * 12, 1, Fact("Fenn", "mayor", "Bo Reed"), True),
    ]
    growth = grow(lines)
    assert not growth.waiting and facts_of(growth)[:2] == [SEED, Fact("Fenn", "pupil", "Ada Moss")]
    assert set(facts_of(growth)[2:]) == {home, Fact("Elmwood", "town", "Fenn"), Fact("Bo Reed", "school", "Elmwood")}
    assert [fact for fact, reason in growth.discarded if reason == rules.REJECTED] == [classmate, house]
    assert (Fact("Bo Reed", "school", "Larkhall"), UNKNOWN) in growth.discarded
    assert Review(lines).num_unmet(growth.proposed, growth.rounds) == 1
    undecided = grow([*lines[:2], Line(triplet_id(home), 1, home, None), Line(None, 1, house, None)])
    assert [one.fact for one in undecided.waiting] == [home] and undecided.num_own_waiting == 1
    assert not Review(lines).lacks(undecided.waiting[0])


def test_a_correction_without_decision_waits_and_a_given_triplet_of_the_model_is_kept(tmp_path: Path) -> None:
    house = Fact("Ada Moss", "house", "Larkhall")
    other = Fact("Elmwood", "town", "Fenn")
    assert Review([Line(triplet_id(house), 1, other, None)]).decision(house) is None
    assert Review([Line(triplet_id(house), 1, other, True)]).decision(house) is False
    assert Review([Line(triplet_id(house), 1, other, False)]).decision(house) is False
    assert Review([Line(None, 0, house, True)]).decision(house) is True


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[]", "JSON list"),
        ("3", "is no JSON object"),
        ("{", "line 1, column 2: not valid JSON"),
        ('{"subject": "a", "relation": "b"}', "'object' is missing"),
        ('{"subject": "a", "relation": "b", "object": "c", "keep": "yes"}', "true, false or null is needed"),
        ('{"subject": "a", "relation": "b", "object": "c", "kep": true}', "Did you mean 'keep'"),
        ('{"subject": "a", "relation": "b", "object": "c{}"}', "without brackets"),
        ('{"subject": "a", "relation": "b", "object": "c", "round": -1}', "a whole number is needed"),
        ('{"subject": "a", "relation": "b", "object": "c", "id": 3}', "is no text"),
        ('{"id": "i", "subject": "a", "relation": "b", "object": "c"}\n' * 2, "a second line with id 'i'"),
        ('{"subject": "a", "relation": "b", "object": "c", "question": 3}', "a text is needed"),
        ('{"chain": [["a", "b"]], "question": "q"}', "three texts are needed"),
        ('{"chain": [], "question": "q"}', "must be a list"),
        ('{"chain": [["a", "b", "c"]], "keep": true}', "key in"),
    ],
)
def test_bad_review_files_are_errors(line: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "review.jsonl"
    path.write_text(line, encoding="utf-8")
    with pytest.raises(EditingError) as error:
        read_review(path)
    assert message in str(error.value)
