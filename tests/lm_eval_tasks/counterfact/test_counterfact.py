"""CounterFact: both layouts are read, checked, and asked the right way round."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path

import pytest
from paths import RECORDS
from record_files import invented_records, published_data, with_field, write_jsonl
from scripted import ScriptedLM
from task_runs import from_nlls, metrics_of, run

from edit_hooks.lm.options.edit_sources import load_edits
from edit_hooks.utils.errors import EditingError
from lm_eval_tasks.counterfact.benchmark import COUNTERFACT, COUNTERFACT_FLAT
from lm_eval_tasks.counterfact.references import load_references

FILE, NESTED = "counterfact_flat.jsonl", "counterfact.jsonl"
TASKS = ("counterfact_es", "counterfact_gs", "counterfact_ls", "counterfact_s")


def test_a_record_is_one_edit_one_paraphrase_one_neighbor() -> None:
    case = COUNTERFACT_FLAT.load({"data": str(RECORDS / FILE)}).records[0]
    request = case.request
    assert (request.text, request.subject) == ("The mother tongue of Ona Brell is", "Ona Brell")
    assert (request.target_new, request.target_true, request.case_id) == ("Polish", "Danish", "0")
    assert list(case.paraphrases) == [("Ona Brell grew up speaking", "Polish", "Danish")]
    assert list(case.neighbors) == [("Ivo Tarn is a native speaker of", "Danish", "Polish")]  # keeps the true object


def test_neighbors_with_another_object_are_counted(tmp_path: Path) -> None:
    changed = with_field(invented_records(FILE)[0], "locality_ground_truth", "Finnish")
    path = write_jsonl(tmp_path / FILE, [changed, *invented_records(FILE)[1:]])
    loaded = COUNTERFACT_FLAT.load({"data": str(path)})
    assert loaded.source["neighbors_with_another_object"] == 1
    assert loaded.records[0].neighbors[0].wanted == "Finnish"


def test_neighbors_that_another_row_edits_and_paraphrases_without_a_change_are_counted(tmp_path: Path) -> None:
    first, second, *others = invented_records(FILE)
    path = write_jsonl(tmp_path / FILE, [first, second, *others])
    source = COUNTERFACT_FLAT.load({"data": str(path)}).source
    assert (source["neighbors_that_are_edits"], source["paraphrases_equal_to_prompt"]) == (0, 0)
    first = with_field(first, "locality_prompt", second["prompt"])
    write_jsonl(path, [first, with_field(second, "rephrase_prompt", second["prompt"]), *others])
    source = COUNTERFACT_FLAT.load({"data": str(path)}).source
    assert (source["neighbors_that_are_edits"], source["paraphrases_equal_to_prompt"]) == (1, 1)


@pytest.mark.parametrize("field", ["prompt", "target_new", "locality_prompt", "locality_ground_truth"])
def test_a_missing_field_is_named(tmp_path: Path, field: str) -> None:
    path = write_jsonl(tmp_path / FILE, [with_field(invented_records(FILE)[0], field, None)])
    with pytest.raises(EditingError, match=field):
        COUNTERFACT_FLAT.load({"data": str(path)})


def test_records_of_the_other_layout_name_its_tasks(tmp_path: Path) -> None:
    for file, other, group in ((FILE, COUNTERFACT, "counterfact_field"), (NESTED, COUNTERFACT_FLAT, "counterfact")):
        path = write_jsonl(tmp_path / "records.jsonl", invented_records(file))
        with pytest.raises(EditingError, match=rf"it is a record of CounterFact.*Use the tasks of .*{group}\."):
            other.load({"data": str(path)})


def test_a_nested_record_has_all_its_prompts(tmp_path: Path) -> None:
    loaded = COUNTERFACT.load({"data": str(RECORDS / NESTED)})
    case = loaded.records[1]
    request = case.request
    assert (request.text, request.subject) == ("The mother tongue of Ona Brell is", "Ona Brell")
    assert (request.target_new, request.target_true, request.case_id) == ("Polish", "Danish", "1")
    assert (case.relation_id, case.target_id, case.extras["source_id"]) == ("P103", "Q809", "8")
    assert list(case.paraphrases) == [("Ona Brell grew up speaking", "Polish", "Danish")]
    assert list(case.neighbors) == [
        ("Ivo Tarn is a native speaker of", "Danish", "Polish"),  # keeps the true object
        ("The mother tongue of Mira Sol is", "Danish", "Polish"),
    ]
    assert list(case.generation_prompts) == ["Ona Brell speaks"]
    counts = {name: loaded.source[name] for name in COUNTS}
    assert counts == COUNTS and "unknown_fields" not in loaded.source


COUNTS = {  # of the invented records, by hand
    "without_paraphrases": 1,
    "without_neighbors": 1,
    "without_generation_prompts": 1,
    "blank_prompts": 2,
    "paraphrase_prompts": 5,
    "neighborhood_prompts": 7,
    "generation_prompts": 5,
    "attribute_prompts": 4,
    "neighbors_that_are_edits": 0,
}


def test_neighbors_that_are_edits_are_counted(tmp_path: Path) -> None:
    first, second, *others = invented_records(NESTED)
    edited = second["requested_rewrite"]["prompt"].format(second["requested_rewrite"]["subject"])
    first["neighborhood_prompts"] = [edited, *first["neighborhood_prompts"], edited]
    loaded = COUNTERFACT.load({"data": str(write_jsonl(tmp_path / NESTED, [first, second, *others]))})
    assert loaded.source["neighbors_that_are_edits"] == 2


@pytest.mark.parametrize("answer", [None, "", " ", "absent"])
def test_a_nested_record_of_a_new_event_has_no_old_answer_and_no_neighbors(tmp_path: Path, answer: str | None) -> None:
    record = with_field(invented_records(NESTED)[0], "neighborhood_prompts", None)
    record["requested_rewrite"]["target_true"] = {"str": answer} if answer != "absent" else None
    loaded = COUNTERFACT.load({"data": str(write_jsonl(tmp_path / NESTED, [record]))})
    assert loaded.records[0].request.target_true is None and loaded.source["without_old_answer"] == 1
    record["requested_rewrite"]["target_true"] = "Norvania"
    with pytest.raises(EditingError, match=r"field 'requested_rewrite.target_true' is 'Norvania' \(str\); an object"):
        COUNTERFACT.load({"data": str(write_jsonl(tmp_path / NESTED, [record]))})


@pytest.mark.parametrize(
    "field",
    ["prompt", "subject", "relation_id", "target_new.str", "target_new.id", "target_true.str"],
)
def test_a_missing_field_of_a_nested_record_is_named(tmp_path: Path, field: str) -> None:
    record = with_field(invented_records(NESTED)[0], f"requested_rewrite.{field}", None)
    with pytest.raises(EditingError, match=f"requested_rewrite.{field}"):
        COUNTERFACT.load({"data": str(write_jsonl(tmp_path / NESTED, [record]))})


def test_scores_of_a_nested_case_by_hand() -> None:
    """Means over the prompts of a case first, then over cases; S from rounded percentages."""
    table = {
        # edit prompts: two of five prefer the new object
        ("Port Elna is the capital of", "Denmark"): (1.0, 2.0),
        ("The mother tongue of Ona Brell is", "Polish"): (1.5, 2.0),
        # paraphrases: 1 of 2 of the first case, 1 of 1 of the second, 0 of 1 of the fourth and the fifth
        ("Travelers reach Port Elna, the capital of", "Denmark"): (0.5, 2.0),
        ("Ona Brell grew up speaking", "Polish"): (1.0, 2.0),
        # neighbors keep the true object: 2 of 3 of the first case, 1 of 2 of the second, 0 of 1 of the third and fifth
        ("The Ossel hills rise in", "Norvania"): (1.0, 2.0),
        ("Lake Vorun lies in", "Norvania"): (1.0, 2.0),
        ("Ivo Tarn is a native speaker of", "Danish"): (1.0, 2.0),
    }
    lm = ScriptedLM(likelihoods=from_nlls(table))
    found = {task: metrics_of(run(task, lm, {"generate": False}), task) for task in TASKS}
    assert found["counterfact_es"]["efficacy_prob"] == 2 / 5
    # magnitudes of the released code: exp(-NLL) differences; others are ties at 2.0
    em = (math.exp(-1) - math.exp(-2) + math.exp(-1.5) - math.exp(-2)) / 5
    assert found["counterfact_es"]["efficacy_magnitude"] == pytest.approx(em)
    assert found["counterfact_gs"]["paraphrase_prob"] == (1 / 2 + 1 + 0 + 0) / 4
    assert found["counterfact_ls"]["neighborhood_prob"] == pytest.approx((2 / 3 + 1 / 2 + 0 + 0) / 4)
    assert found["counterfact_ls"]["neighborhood_prob_n"] == 4
    # 40.00, 37.50, and 29.1666... rounded to 29.17
    assert found["counterfact_s"]["edit_score_prob"] == pytest.approx(
        3 / (1 / 40 + 1 / 37.5 + 1 / 29.17) / 100, abs=1e-12
    )


def test_the_sample_answers_every_task() -> None:
    """Every case of the embedded sample has all kinds of prompts, and reference texts of its new object."""
    loaded, flat = COUNTERFACT.load({"data": "mini"}), COUNTERFACT_FLAT.load({"data": "mini"})
    assert loaded.source["records"] == flat.source["records"] >= 24
    references = load_references().texts
    for nested, short in zip(loaded.records, flat.records, strict=True):
        assert len(nested.paraphrases) == 2 and len(nested.neighbors) >= 2 and len(nested.generation_prompts) == 2
        assert references[nested.relation_id, nested.target_id]
        assert all(nested.request.subject in prompt for prompt in nested.generation_prompts)
        assert (short.request.text, short.paraphrases[0]) == (nested.request.text, nested.paraphrases[0])
    assert not {name for name in loaded.source if name.startswith(("without_", "unknown"))} & {
        name for name, count in loaded.source.items() if count
    }


def test_offline_the_place_of_the_file_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LM_EDIT_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(EditingError, match=r"counterfact-edit\.json.*put it at"):
        COUNTERFACT_FLAT.load({"data": "hub"})
    with pytest.raises(EditingError, match="data_revision='v1' has no meaning for data=hub"):
        COUNTERFACT_FLAT.load({"data": "hub", "data_revision": "v1"})
    for data, file in (("hub", "counterfact.json"), ("hub:multi", "multi_counterfact.json")):
        with pytest.raises(EditingError, match=rf"baulab.info/data/dsets/{file}.*put it at"):
            COUNTERFACT.load({"data": data})


@pytest.mark.realdata
def test_the_published_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    content = (published_data() / "counterfact" / "counterfact-edit.json").read_bytes()
    pinned = COUNTERFACT_FLAT.source.published
    assert pinned is not None and hashlib.sha256(content).hexdigest() == pinned.sha256
    monkeypatch.setenv("LM_EDIT_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    pinned.cached.parent.mkdir(parents=True)
    pinned.cached.write_bytes(content)
    loaded = COUNTERFACT_FLAT.load({"data": "hub"})
    assert loaded.source["records"] == 10000 and loaded.source["neighbors_with_another_object"] == 0
    assert (loaded.source["neighbors_that_are_edits"], loaded.source["paraphrases_equal_to_prompt"]) == (214, 15)
    assert all(str(case.request.subject) in case.request.text for case in loaded.records)
    assert [edit.key for edit in load_edits("counterfact_flat", {"data": "hub"}, 3)] == [
        case.request.key for case in loaded.records[:3]
    ]
