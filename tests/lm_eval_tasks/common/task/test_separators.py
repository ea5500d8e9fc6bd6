"""Separator and stops of questions in scripts without spaces between words, by record, setting and benchmark."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import lm_eval
import pytest
from lm_eval.tasks import TaskManager
from record_files import write_jsonl
from scripted import ScriptedLM
from task_managers import FOLDER, task_manager

from edit_hooks.utils.errors import EditingError
from lm_eval_tasks.common.records.benchmark import find_benchmark
from lm_eval_tasks.common.records.fields import Fields

CHINESE = {
    "case_id": 1,
    "prompt": "挪威的首都是",
    "subject": "挪威",
    "ground_truth": "奥斯陆",
    "target_new": "利马",
    "rephrase_prompt": "挪威的首都城市是",
    "locality_prompt": "秘鲁的首都是",
    "locality_ground_truth": "利马",
}
ENGLISH = {
    "case_id": 2,
    "prompt": "The capital of Norway is",
    "subject": "Norway",
    "ground_truth": "Oslo",
    "target_new": "Lima",
    "rephrase_prompt": "Norway's capital is",
    "locality_prompt": "The capital of Peru is",
    "locality_ground_truth": "Lima",
}
TASKS = ("counterfact_flat_es", "counterfact_flat_gs", "counterfact_flat_ls")


def run(tmp_path: Path, tasks: tuple[str, ...], records: list[dict[str, Any]], **settings: Any) -> Any:
    """Results of a scripted run, and the lm-eval instances that it answered."""
    path, lm = write_jsonl(tmp_path / "facts.jsonl", records), ScriptedLM()
    manager = task_manager({"data": str(path), **settings})
    results = lm_eval.simple_evaluate(model=lm, tasks=list(tasks), task_manager=manager, bootstrap_iters=0)
    return results, lm.seen


def scored(seen: list[Any]) -> list[tuple[str, str]]:
    return [request.args for request in seen if request.request_type == "loglikelihood"]


@pytest.mark.parametrize(
    ("record", "settings", "separator"),
    [
        ({}, {}, ""),
        ({}, {"separator": "auto"}, ""),
        ({}, {"separator": "space"}, " "),
        ({"separator": " "}, {}, " "),
        ({"separator": "\u3000"}, {"separator": "empty"}, "\u3000"),  # the record's own has the last word
    ],
)
def test_record_setting_and_script_decide_on_the_separator(
    tmp_path: Path, record: dict[str, str], settings: dict[str, str], separator: str
) -> None:
    results, seen = run(tmp_path, TASKS, [{**CHINESE, **record}], **settings)
    pairs = {(prompt, target) for prompt, target in scored(seen)}
    assert ("挪威的首都是", separator + "利马") in pairs
    assert pairs >= {("挪威的首都城市是", separator + answer) for answer in ("利马", "奥斯陆")}
    assert all(answer.startswith(separator) and answer.strip(separator) == answer.strip() for _, answer in pairs)
    for task in TASKS:
        config = results["configs"][task]
        source = config["metadata"]["data_source"]
        assert source.get("separators") == (None if separator == " " else {separator: 1})
        assert config["settings"].get("separator") == {"space": "space", "empty": "empty"}.get(
            settings.get("separator", "")
        )


def test_english_documents_have_no_trace_of_separators(tmp_path: Path) -> None:
    results, seen = run(tmp_path, TASKS, [ENGLISH])
    assert all(answer.startswith(" ") and answer[1:2].isalpha() for _, answer in scored(seen))
    for task in TASKS:
        config = results["configs"][task]
        assert "separators" not in config["metadata"]["data_source"] and "separator" not in config["settings"]
        assert "stops_by_script" not in config
        for sample in results["samples"][task]:
            assert "separator" not in str(sample["doc"])
    until = [request.args[1]["until"] for request in seen if request.request_type == "generate_until"]
    assert until and all(stops == [".", "\n"] for stops in until)


def test_answers_end_by_script(tmp_path: Path) -> None:
    """Chinese records get the Chinese counterparts of the period, English ones of the same file do not."""
    tasks = ("counterfact_wild_reliability",)
    results, seen = run(tmp_path, tasks, [CHINESE, ENGLISH])
    chinese = [".", "\n", "\u3002", "\uff01", "\uff1f", "\uff0e", "\uff61"]
    expected = {"1": chinese, "0": chinese, "2": [".", "\n"]}
    for request in seen:
        assert request.args[1]["until"] == request.doc["asked"]["until"]
        assert request.doc["asked"]["until"] == (chinese if "挪威" in request.args[0] else expected["2"])
    config = results["configs"][tasks[0]]
    assert config["stops_by_script"] == sorted(chinese[2:])
    assert config["generation_kwargs"]["until"] == [".", "\n"]


def test_stops_of_the_user_are_taken_as_they_are(tmp_path: Path) -> None:
    path, lm = write_jsonl(tmp_path / "facts.jsonl", [CHINESE]), ScriptedLM()
    results = lm_eval.simple_evaluate(
        model=lm,
        tasks=["counterfact_wild_reliability"],
        task_manager=task_manager({"data": str(path)}),
        gen_kwargs={"until": ["."]},
        bootstrap_iters=0,
    )
    assert {str(request.args[1]["until"]) for request in lm.seen} == {"['.']"}
    assert "stops_by_script" not in results["configs"]["counterfact_wild_reliability"]


def test_answers_to_wordings_of_ours_keep_their_space(tmp_path: Path) -> None:
    """Letters, True and False follow an English frame, whatever the separator of the record is."""
    tasks = ("counterfact_flat_mcq", "counterfact_flat_truth", "counterfact_flat_negation")
    others = [{**CHINESE, "target_new": name, "ground_truth": f"{name}城"} for name in ("基多", "罗马", "开罗")]
    _, seen = run(tmp_path, tasks, [CHINESE, *others], separator="empty")
    frames = [(prompt, answer) for prompt, answer in scored(seen) if prompt.endswith("Answer:")]
    assert len(frames) > 20 and {answer for _, answer in frames} == {" A", " B", " C", " D", " True", " False"}
    completed = [(prompt, answer) for prompt, answer in scored(seen) if not prompt.endswith("Answer:")]
    assert completed and all(prompt[-1] == "是" and answer[0] != " " for prompt, answer in completed)
    assert any("挪威的首都是利马" in prompt for prompt, _ in frames)


def test_a_question_in_an_english_instruction_is_joined_as_the_instruction_joins_it(tmp_path: Path) -> None:
    """``Q: `` has a space before the Chinese question, and so has the answer."""
    record = {"prompt": "挪威的首都是哪里", "subject": "挪威", "target": "利马", "rephrase": "挪威首都在哪里"}
    record |= {"locality": [{"loc": "秘鲁的首都是哪里", "loc_ans": "利马"}]}
    _, seen = run(tmp_path, ("qaedit_grid_qa_inst_tf", "qaedit_grid_question_only_tf"), [record])
    lengths = {request.args[0][:6]: request.doc["asked"]["decoding"]["length_of"] for request in seen}
    assert lengths == {"Please": " 利马", "挪威的首都是"[:6]: "利马"}


def test_a_benchmark_has_a_separator_of_its_own(tmp_path: Path) -> None:
    """The default of its records; the setting of a run comes before it."""
    glued = replace(find_benchmark("counterfact_flat"), separator="")
    settings = {"data": str(write_jsonl(tmp_path / "facts.jsonl", [ENGLISH]))}
    (case,) = glued.load(settings).records
    assert case.request.continuation == "Lima"
    assert glued.load(settings).source["separators"] == {"": 1}
    (case,) = glued.load({**settings, "separator": "space"}).records
    assert case.request.continuation == " Lima"


def test_bad_separators_are_refused_with_their_place(tmp_path: Path) -> None:
    benchmark = find_benchmark("counterfact_flat")
    with pytest.raises(EditingError, match=r"facts.jsonl, record 0 .*'separator'='x' is not accepted"):
        benchmark.load({"data": str(write_jsonl(tmp_path / "facts.jsonl", [{**ENGLISH, "separator": "x"}]))})
    with pytest.raises(EditingError, match=r"separator='emty'.*Did you mean 'empty'"):
        run(tmp_path, TASKS[:1], [ENGLISH], separator="emty")


def test_every_benchmark_reads_the_separator_of_a_record() -> None:
    """No parser has to know the field."""
    fields = Fields({**ENGLISH, "separator": ""}, "here")
    case = find_benchmark("counterfact_flat").layout.read(fields, 0)
    assert case.request.separator == "" and fields.unread() == []


def test_a_delimiter_of_the_yaml_is_refused(tmp_path: Path) -> None:
    base = FOLDER / "counterfact" / "counterfact_flat_es.yaml"
    yaml = tmp_path / "glued.yaml"
    yaml.write_text(f"include: {base}\ntask: glued\ntarget_delimiter: ''\n", encoding="utf-8")
    manager = TaskManager(include_path=tmp_path, include_defaults=False, metadata={"data": "mini"})
    with pytest.raises(EditingError, match="target_delimiter='' would join questions"):
        manager.load(["glued"])
