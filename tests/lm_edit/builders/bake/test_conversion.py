"""Conversion of invented concepts in the layout of ConceptEdit, through ``lm-edit build-bake-concept``."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from edit_hooks.utils.errors import EditingError
from lm_edit.builders.bake.conversion import MODULES, ConceptWording, ReleasedPrompts, convert
from lm_edit.cli.main import main
from lm_eval_tasks.bake.benchmark import BAKE_CONCEPT


def concept(name: str, definition: str | None, inter: Any, intra: Any) -> dict[str, Any]:
    """A concept of ``concept_data.json``; ``None`` leaves a field out."""
    record = {"concept_name": name, "instances": ["one"], "superclass": "thing"}
    record |= {} if definition is None else {"concept_def": definition}
    modules = zip(MODULES, (inter, intra), strict=True)
    return record | {f"module_{module}": {"replace_def": new} for module, new in modules if new is not None}


CONCEPTS = [
    concept("lantern", "a lamp in a case of glass", "a vessel that carries grain", "a torch of wax"),
    concept("weir", "a low wall across a river", "a person who repairs clocks", "A low wall  across a river."),
    concept("kiosk", None, "a drink of apples", "a small bridge"),  # as if a concept lacked its definition
    concept("tram", "a car on rails", "a kind of bread", "a kind of bread"),
    concept("reed", "a tall grass", None, ""),
    concept("lantern", "a lamp in a case of glass", "a vessel that carries grain", "a lamp on a pole"),
]
FINAL = [
    {
        "label": "lantern",
        "prompt": "What is a lantern? It is",
        "phrase_prompt": "By lantern people mean",
        "target_new_desc": "a vessel that carries grain",
        "instance_prompt": "unused",
        "locality_prompt": "nq question: who painted the green door",
        "locality_answer": "Ola Brandt",
    },
    {
        "label": "tram",
        "prompt": "Trams are",  # the name is not in it
        "phrase_prompt": "By tram people mean",
        "target_new_desc": "a kind of bread",
        "instance_prompt": "unused",
        "locality_prompt": "nq question: who painted the red door",
        "locality_answer": "Ola Brandt",
    },
]


def write(path: Path, content: Any) -> str:
    path.write_text(json.dumps(content), encoding="utf-8")
    return str(path)


def test_every_concept_is_a_record_or_has_a_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "BAKE_concept.json"
    final = write(tmp_path / "final_gpt2_inter.json", FINAL)
    assert main(["build-bake-concept", write(tmp_path / "c.json", CONCEPTS), "--final", final, "--out", str(out)]) == 0
    report = capsys.readouterr().out
    made = [(r["requested_rewrite"]["subject"], r["module"]) for r in json.loads(out.read_text(encoding="utf-8"))]
    assert made == [("lantern", "inter"), ("lantern", "intra"), ("weir", "inter"), ("lantern", "intra")]
    # 6 concepts x 2 = 12 possible records = 4 made + 8 left out
    assert "concepts: 6\npossible_records: 12\nrecords: 4" in report
    for line in (
        "left out, the new definition is the old one: weir",
        "left out, the concept has no definition: kiosk",
        "left out, the released edit prompt does not contain the concept exactly once: tram",
        "left out, the concept has no new definition of this module: reed",
        "left out, an earlier record has the same concept and new definition: lantern",
    ):
        assert line in report
    counts = convert([(str(n), c) for n, c in enumerate(CONCEPTS)]).statistics()
    assert counts["records"] + sum(counts["left_out"].values()) == counts["possible_records"] == 12
    assert counts["records_by_module"] == {"inter": 3, "intra": 2}  # without released prompts one tram is made, too


def test_a_file_without_a_record_replaces_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "earlier.json"
    out.write_text("[1]", encoding="utf-8")
    concepts = write(tmp_path / "c.json", [{"concept_name": "x"}])
    assert main(["build-bake-concept", concepts, "--out", str(out), "--overwrite"]) == 2
    assert "gives no record; nothing is written" in capsys.readouterr().err
    assert out.read_text(encoding="utf-8") == "[1]"


def test_the_command_that_reads_the_file_is_quoted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "with space.json"
    assert main(["build-bake-concept", write(tmp_path / "c.json", CONCEPTS), "--out", str(out)]) == 0
    assert shlex.split(capsys.readouterr().out.splitlines()[-1])[-1] == f"data={out},..."


def test_the_converted_file_is_what_the_tasks_read(tmp_path: Path) -> None:
    out = tmp_path / "BAKE_concept.json"
    final = write(tmp_path / "final_gpt2_inter.json", FINAL)
    main(["build-bake-concept", write(tmp_path / "c.json", CONCEPTS), "--final", final, "--out", str(out)])
    loaded = BAKE_CONCEPT.load({"data": str(out)})
    assert "unknown_fields" not in loaded.source
    first, second = loaded.records[:2]
    # released prompts where the file has the concept with this definition, the wording elsewhere
    assert first.request.text == "What is a lantern? It is" and first.paraphrases[0].prompt == "By lantern people mean"
    assert first.neighbors == [("nq question: who painted the green door", "Ola Brandt", "a vessel that carries grain")]
    assert second.request.text == "lantern is defined as" and second.neighbors == []
    assert second.paraphrases[0] == ("The definition of lantern is", "a torch of wax", "a lamp in a case of glass")
    assert first.reverse_judge == (
        'Whether "a vessel that carries grain" is the definition of lantern?',
        "yes",
        "no",
    )
    assert loaded.source["without_neighbors"] == 3


@pytest.mark.parametrize(
    ("prompt", "template"),
    [
        ("Which part of art is", "Which part of {} is"),  # also inside of "part"
        ("The art's aim is", "The {}'s aim is"),
        ("The start of the word that means", None),
        ("By art, or the art, people mean", None),
    ],
)
def test_a_concept_is_whole_words_of_its_prompt(prompt: str, template: str | None) -> None:
    """The slot was put into other words: "The st{} of the word that means"."""
    released = {("art", "a kind of bread"): ReleasedPrompts(prompt, "Art is", "Who sang it?", "Ola Brandt")}
    made = convert([("c.json, record 0", concept("art", "skill", "a kind of bread", None))], released)
    assert [record["requested_rewrite"]["prompt"] for record in made.records] == ([template] if template else [])
    reason = "the released edit prompt does not contain the concept exactly once"
    assert (("art", "inter", reason) in made.left_out) == (template is None)


def test_the_wording_is_a_setting(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "BAKE_concept.json"
    arguments = ["build-bake-concept", write(tmp_path / "c.json", CONCEPTS[:1]), "--out", str(out)]
    question = "Whether {concept} means {definition}?"
    assert main([*arguments, "--edit-prompt", "A {} is", "--judge-question", question]) == 0
    first = BAKE_CONCEPT.load({"data": str(out)}).records[0]
    assert first.request.text == "A lantern is"
    assert first.reverse_judge.prompt == "Whether lantern means a vessel that carries grain?"
    assert main([*arguments, "--overwrite", "--edit-prompt", "A concept is"]) == 2
    assert "edit='A concept is' needs {} exactly once" in capsys.readouterr().err
    with pytest.raises(EditingError, match=r"needs \{definition\} and \{concept\} exactly once"):
        ConceptWording(judge="Whether {definition}?")
    # a definition that itself looks like a slot stays as it is
    assert ConceptWording().judge_question("x", "a {concept}") == 'Whether "a {concept}" is the definition of x?'


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        ([], "the record is a list; an object is needed"),
        ({"concept_def": "a lamp"}, "field 'concept_name' is missing"),
        (concept("weir", "a wall", ["a list"], None), "'module_inter.replace_def' is"),
        ({"concept_name": "weir", "concept_def": 3}, r"'concept_def' is 3 \(int\); a text is needed"),
    ],
)
def test_malformed_concepts_are_errors(record: Any, problem: str) -> None:
    with pytest.raises(EditingError, match=rf"record 0.*{problem}"):
        convert([("c.json, record 0", record)])


def test_a_file_of_prompts_in_another_layout_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "c.json", CONCEPTS)
    assert main(["build-bake-concept", path, "--final", path, "--out", str(tmp_path / "out.json")]) == 2
    assert "field 'prompt' is missing" in capsys.readouterr().err
    assert not (tmp_path / "out.json").exists()
