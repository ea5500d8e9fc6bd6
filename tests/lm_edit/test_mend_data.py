"""Training edits of hyper-networks: from files of both layouts and from benchmarks."""

from __future__ import annotations

import json

import pytest
from paths import RECORDS

from edit_hooks import EditingError
from edit_hooks.training.edit_data import EditExample
from lm_edit.mend_data import load_edit_data
from lm_eval_tasks.common.records.benchmark import find_benchmark


def test_data_from_files_of_both_layouts_and_from_benchmarks(tmp_path):
    ours = tmp_path / "ours.jsonl"
    lines = [
        {"prompt": "{} lies in", "subject": "Velm", "target_new": "Rome", "rephrase_prompt": ["Velm is in"]},
        {"prompt": "a b", "target_new": "c", "locality_prompt": "d", "locality_ground_truth": "e"},
        {"prompt": "x y", "target_new": "z"},
    ]
    ours.write_text("\n".join(map(json.dumps, lines)))
    data = load_edit_data(str(ours), {}, validation_share=0.34)
    assert data.train[0] == EditExample(prompt="Velm lies in", target="Rome", paraphrases=("Velm is in",))
    assert data.train[1].locality == (("d", "e"),) and [e.prompt for e in data.validation] == ["x y"]
    assert data.report["num_edits"] == 2 and data.report["without_paraphrase"] == 1 and len(data.report["sha256"]) == 64
    zsre = tmp_path / "zsre.json"
    record = {"src": "Who?", "alt": "Ada", "rephrase": "Which one?", "loc": "nq question: when", "loc_ans": "then"}
    zsre.write_text(json.dumps([record, record]))
    (example,) = load_edit_data(str(zsre), {}, validation=str(ours)).train[:1]
    assert example == EditExample(
        prompt="Who?", target="Ada", paraphrases=("Which one?",), locality=(("when", "then"),)
    )
    for benchmark in ("bake", "qaedit"):
        data = load_edit_data(benchmark, {"data": "mini"}, num_edits=20)
        assert len(data.train) == 18 and len(data.validation) == 2 and data.report["without_locality"] == 0


def test_bad_data_is_named(tmp_path):
    with pytest.raises(EditingError, match="Did you mean 'bake'"):
        load_edit_data("bakee", {})
    bad = tmp_path / "bad.jsonl"
    for record, message in (
        ({"prompt": "a"}, "target_new"),
        ({"prompt": "a", "target_new": "b", "locality_promt": "c"}, "Did you mean 'locality_prompt'"),
    ):
        bad.write_text("\n".join([json.dumps({"prompt": "a", "target_new": "b"}), json.dumps(record)]))
        with pytest.raises(EditingError, match=message):
            load_edit_data(str(bad), {})
    bad.write_text(json.dumps({"prompt": "a", "target_new": "b"}))
    with pytest.raises(EditingError, match="validation edits"):
        load_edit_data(str(bad), {})


def facts(number):
    return [{"prompt": f"Fact {index} is", "target_new": "so"} for index in range(number)]


@pytest.mark.parametrize("share", [0.05, 0.1, 0.15, 0.33, 0.4, 0.5, 0.75, 0.99])
def test_the_share_asked_for_is_held_out(tmp_path, share):
    file = tmp_path / "edits.json"
    file.write_text(json.dumps(facts(100)))
    data = load_edit_data(str(file), {}, validation_share=share)
    assert len(data.validation) == data.report["num_validation"] == round(100 * share)
    numbers = [int(example.prompt.split()[1]) for example in data.validation]
    assert all(abs(number - (rank + 1) / share) <= 1 for rank, number in enumerate(numbers))  # at even distances


def test_shares_of_one_nth_hold_out_every_nth_edit_as_before(tmp_path):
    file = tmp_path / "edits.json"
    file.write_text(json.dumps(facts(47)))
    for every in (2, 3, 4, 5, 7, 10, 20):
        data = load_edit_data(str(file), {}, validation_share=1 / every)
        assert [one.prompt for one in data.validation] == [one["prompt"] for one in facts(47)][every - 1 :: every]
        assert data.report["validation"] == f"every {every}th edit of the source, held out"
        assert not {"repeated", "left_out_for_validation"} & set(data.report)


def test_all_edits_of_a_case_are_used_each_distinct_one_on_one_side(tmp_path):
    cases = find_benchmark("mquake").load({"data": "mini"}).records
    edits = [(request.text, request.target_new) for case in cases for request in case.requests]
    data = load_edit_data("mquake", {"data": "mini"})
    used = [(example.prompt, example.target) for example in [*data.train, *data.validation]]
    assert len(used) == len(set(used)) and set(used) == set(edits)
    assert len(edits) > len(cases) and data.report.get("repeated", 0) == len(edits) - len(used)
    file = tmp_path / "edits.json"
    again = {**facts(3)[2], "rephrase_prompt": ["Thus"]}
    file.write_text(json.dumps([*facts(3), facts(1)[0], again]))
    data = load_edit_data(str(file), {}, validation_share=1 / 3)
    assert [example.paraphrases for example in data.validation] == [(), ("Thus",)]
    assert len(data.train) == 2 and data.report["repeated"] == 1


def test_prompts_of_a_validation_file_are_not_trained_on(tmp_path):
    train, validation = tmp_path / "train.json", tmp_path / "validation.json"
    train.write_text(json.dumps(facts(5)))
    validation.write_text(json.dumps(facts(2)))
    data = load_edit_data(str(train), {}, validation=str(validation))
    assert (len(data.train), len(data.validation), data.report["left_out_for_validation"]) == (3, 2, 2)


def test_a_zsre_file_gives_the_edits_of_the_benchmark(caplog):
    """Its last record has no counterfactual answer, which used to stop the command; EasyEdit leaves it out, too."""
    file = str(RECORDS / "zsre_mend_eval.json")
    ours = load_edit_data(file, {}, validation_share=0.25)
    benchmark = load_edit_data("zsre", {"data": file}, validation_share=0.25)
    for mine, theirs in zip([*ours.train, *ours.validation], [*benchmark.train, *benchmark.validation], strict=True):
        assert (mine.prompt, mine.target, mine.paraphrases) == (theirs.prompt, theirs.target, theirs.paraphrases)
    assert ours.report["left_out"] == {"the counterfactual answer (alt) is empty": 1} == benchmark.report["left_out"]
    assert "zsre_mend_eval.json: records left out: 1 (the counter" in caplog.text


def test_a_zsre_record_without_a_paraphrase_has_none(tmp_path):
    record = {"src": "Who?", "alt": "Ada", "loc": "nq question: when", "loc_ans": "then"}
    file = tmp_path / "zsre.json"
    records = [record, {**record, "src": "What?", "rephrase": " "}, {**record, "src": "Why?", "rephrase": "How come?"}]
    file.write_text(json.dumps(records))
    data = load_edit_data(str(file), {}, validation_share=0.4)
    assert [one.paraphrases for one in [*data.train, *data.validation]] == [(), (), ("How come?",)]
    assert data.report["without_paraphrase"] == 2


def test_a_source_too_small_for_the_share_names_one_that_fits(tmp_path):
    file = tmp_path / "edits.json"
    file.write_text(json.dumps(facts(7)))
    with pytest.raises(EditingError, match=r"a share of 0\.1 of 7 prompts .* --validation-share 0\.15 or more"):
        load_edit_data(str(file), {})
    assert len(load_edit_data(str(file), {}, validation_share=0.15).validation) == 1
    file.write_text(json.dumps(facts(1)))
    with pytest.raises(EditingError, match=r"1 training and 0 validation edits; add edits, or .* --validation"):
        load_edit_data(str(file), {})


def test_a_file_of_a_benchmarks_records_gives_its_edits():
    file = str(RECORDS / "counterfact_flat.jsonl")
    ours = load_edit_data(file, {}, validation_share=0.5)
    named = load_edit_data("counterfact_flat", {"data": file}, validation_share=0.5)
    assert (ours.train, ours.validation) == (named.train, named.validation)
    assert ours.report["benchmark"] == "counterfact_flat"


def test_the_separator_of_training_edits_is_that_of_record_setting_or_script(tmp_path):
    path = tmp_path / "facts.jsonl"
    lines = [
        {"prompt": "挪威的首都是", "target_new": "利马"},
        {"prompt": "Call qulib.", "target_new": "open_pane", "separator": ""},
        {"prompt": "x y", "target_new": "z"},
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    found = {}
    for setting in ("auto", "space"):
        data = load_edit_data(str(path), {"separator": setting}, validation_share=0.34)
        found[setting] = [example.statement for example in [*data.train, *data.validation]]
    assert found["auto"] == ["挪威的首都是利马", "Call qulib.open_pane", "x y z"]
    assert found["space"] == ["挪威的首都是 利马", "Call qulib.open_pane", "x y z"]
