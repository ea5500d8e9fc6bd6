"""Validation of a benchmark's records and of files of edit requests."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest
from paths import RECORDS
from record_files import invented_records, with_field, write_jsonl

from edit_hooks.utils.errors import EditingError
from lm_edit.cli.main import main
from lm_edit.validate import validate

REQUEST = {"prompt": "{} lies in", "subject": "Velm", "target_new": "Karsk"}


def test_a_benchmark_is_validated_under_any_of_its_names() -> None:
    for name in ("qaedit", "qaedit_wild"):
        validation = validate(name, {"data": str(RECORDS / "qaedit.jsonl")})
        assert (validation.num_good, validation.problems, validation.repeated) == (4, {}, [])
        assert validation.source["duplicate_ids"] == 1


def test_bad_and_repeated_records_of_a_benchmark_are_listed(tmp_path: Path) -> None:
    records = invented_records("qaedit.jsonl")
    path = write_jsonl(tmp_path / "x.jsonl", [*records, records[0], with_field(records[1], "target", None)])
    validation = validate("qaedit", {"data": str(path)})
    assert validation.num_good == 5 and validation.repeated == [("case 0", "case 4")]
    ((place, reason),) = validation.problems.items()
    assert place == "x.jsonl, record 5 (line 6)" and "field 'target' is missing" in reason
    assert "skipped" not in validation.source


def test_bad_and_repeated_requests_of_a_file_are_listed(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", [REQUEST, {"prompt": "a"}, {**REQUEST, "case_id": "other"}])
    validation = validate(str(path), {})
    assert validation.num_good == 2 and validation.source == {"file": str(path)}
    assert list(validation.problems) == ["x.jsonl, record 1 (line 2)"]
    assert validation.repeated == [("x.jsonl, record 0 (line 1)", "x.jsonl, record 2 (line 3)")]


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("bakee", "Did you mean 'bake'.*use --data"),
        ("absent.jsonl", "absent.jsonl cannot be read: there is no such file"),
    ],
)
def test_unknown_targets_are_errors(target: str, message: str) -> None:
    with pytest.raises(EditingError, match=message):
        validate(target, {})


@pytest.mark.parametrize(
    "changed, words",
    [
        ({"target_new": "Ostmark"}, "wants another answer than x.jsonl, record 0 (line 1) to the same prompt"),
        ({"target_true": "Karsk"}, "has the old answer as the new one; comparisons of the two are unscored"),
        ({"prompt": "In \u202e{} lies"}, "in its prompt: U+202E RIGHT-TO-LEFT OVERRIDE"),
        ({"target_new": "Karsk and " * 300}, "has a target_new of 600 words"),
        ({"target_new": "罗马在意大利" * 100 + " and more"}, "has a target_new of 602 words"),
        ({"target_new": "\ufeffKarsk\x00"}, "in its target_new: U+FEFF ZERO WIDTH NO-BREAK SPACE, U+0000"),
    ],
)
def test_valid_records_that_are_probably_mistakes_are_noted(
    changed: dict[str, str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    emoji = {"prompt": "{} waves", "subject": "Velm", "target_new": "👩\u200d👧, क्\u200cष"}
    path = write_jsonl(tmp_path / "x.jsonl", [REQUEST, {**REQUEST, **changed}, emoji])
    assert main(["validate", str(path)]) == 0, "no error: some records mean it"
    notes = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note: x.jsonl, record 1")]
    assert any(words in note for note in notes) and len(validate(str(path), {}).notes) == len(notes) <= 2


def test_prompts_whose_end_is_not_the_place_of_the_answer_are_noted(tmp_path: Path) -> None:
    prompts = ["{} lies in ____ .", "{}\u4f4d\u4e8e\uff08\uff09", "[MASK] has {}", "{} is big.", "{}.__init__() is"]
    path = write_jsonl(tmp_path / "x.jsonl", [{**REQUEST, "prompt": prompt} for prompt in prompts])
    blank, stop = validate(str(path), {}).notes
    assert blank.startswith("3 of 5 prompts have a blank (the first: '____' in x.jsonl, record 0")
    assert stop.startswith("1 of 5 prompts end with a full stop (the first: x.jsonl, record 3")
    write_jsonl(path, [{**REQUEST, "prompt": "call {}.", "separator": ""}])
    assert validate(str(path), {}).notes == []


def test_records_without_a_subject_are_counted(tmp_path: Path) -> None:
    without = {"prompt": "Velm lies in", "target_new": "Karsk"}
    path = write_jsonl(tmp_path / "x.jsonl", [REQUEST, without, {**without, "prompt": "Karsk lies in"}])
    (note,) = validate(str(path), {}).notes
    assert note.startswith(f"2 of 3 records have no subject (the first: {path.name}, record 1 (line 2)); editors")


@pytest.mark.parametrize(("name", "separator"), [("a.csv", ","), ("b.csv", ";"), ("c.tsv", "\t")])
def test_the_command_that_a_table_is_refused_with_converts_it(
    name: str, separator: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NA is a country, and a spreadsheet writes a byte order mark."""
    pd = pytest.importorskip("pandas")
    rows = [["prompt", "subject", "target_new", "ground_truth"], ["The flag of {} is of", "Velm", "NA", ""]]
    (tmp_path / name).write_text("".join(separator.join(row) + "\r\n" for row in rows), encoding="utf-8-sig")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(EditingError, match="columns prompt, subject, target_new, ground_truth;") as error:
        validate(name, {})
    path, separated, *_ = re.findall(
        r"read_csv\((.*?), sep=(.*?), dtype=str, keep_default_na=False\)", str(error.value)
    )[0]
    assert (ast.literal_eval(path), ast.literal_eval(separated)) == (name, separator)
    table = pd.read_csv(name, sep=separator, dtype=str, keep_default_na=False)
    table.to_json("facts.jsonl", orient="records", lines=True, force_ascii=False)
    assert validate("facts.jsonl", {}).num_good == 1
    assert json.loads(Path("facts.jsonl").read_text())["target_new"] == "NA"


def test_facts_in_a_yaml_file_are_refused_as_such(tmp_path: Path) -> None:
    for text in ("- {prompt: a b, subject: a, target_new: c}\n", "prompt: [\n"):
        (tmp_path / "facts.yaml").write_text(text)
        with pytest.raises(EditingError, match=r"facts\.yaml: it is a YAML file; a JSON list of records"):
            validate(str(tmp_path / "facts.yaml"), {})


def test_half_a_surrogate_pair_is_a_bad_record(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"prompt": "Velm lies in", "target_new": "\\ud83d"}\n')
    ((_, reason),) = validate(str(path), {}).problems.items()
    assert "half of a surrogate pair" in reason
