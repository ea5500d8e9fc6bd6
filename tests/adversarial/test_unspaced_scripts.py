"""Edits and questions in Chinese on `edited_hf`: one separator for both, whoever chose it, and recorded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lm_eval
import pytest
from lm_runs import build
from record_files import write_jsonl
from task_managers import task_manager

from edit_hooks import EditRequest, load_editor
from edit_hooks.contract.tiny_models import build_model, build_tokenizer
from edit_hooks.gradient.labeled_rows import target_row
from edit_hooks.locate.values.rows import rewriting_row
from edit_hooks.modeling.tokens import split_continuation
from edit_hooks.utils.errors import EditingError
from lm_edit.cli.main import main
from lm_edit.validate import validate

FACTS = [
    {"prompt": "挪威的首都是", "subject": "挪威", "target_new": "利马", "target_true": "奥斯陆", "case_id": "0"},
    {"prompt": "秘鲁的首都是", "subject": "秘鲁", "target_new": "奥斯陆", "target_true": "利马", "case_id": "1"},
]
RECORDS = [
    {
        "prompt": fact["prompt"],
        "subject": fact["subject"],
        "ground_truth": fact["target_true"],
        "target_new": fact["target_new"],
        "rephrase_prompt": f"{fact['subject']}的首都城市是",
        "locality_prompt": "智利的首都是",
        "locality_ground_truth": "圣地亚哥",
    }
    for fact in FACTS
]
TASKS = ["counterfact_flat_es", "counterfact_flat_gs"]


@pytest.fixture(scope="module")
def model_path(tiny_path: Any) -> str:
    return str(tiny_path("llama", "byte_bpe_bos"))


def evaluate(model_path: str, data: Path, options: dict[str, Any], settings: dict[str, Any]) -> Any:
    lm = build(model_path, **options)
    manager = task_manager({"data": str(data), **settings})
    return lm_eval.simple_evaluate(model=lm, tasks=TASKS, task_manager=manager, limit=2, bootstrap_iters=0, **SHORT)


SHORT: dict[str, Any] = {"gen_kwargs": {"max_gen_toks": 4}}


def scores(results: Any) -> list[Any]:
    return [
        response.final.token_logprobs
        for task in TASKS
        for sample in results["samples"][task]
        for (response,) in sample["resps"]
        if hasattr(response.final, "token_logprobs")
    ]


def test_the_separator_is_the_same_in_edits_and_questions(model_path: str, tmp_path: Path) -> None:
    """By script, by option, by record; edits of a file find their cases, which needs equal keys."""
    data, spaced = tmp_path / "facts.jsonl", tmp_path / "spaced.jsonl"
    write_jsonl(data, RECORDS)
    write_jsonl(spaced, [{**record, "separator": " "} for record in RECORDS])
    edits = write_jsonl(tmp_path / "edits.jsonl", FACTS)
    by_script = evaluate(model_path, data, {}, {})
    by_option = evaluate(model_path, data, {"separator": "empty"}, {"separator": "empty"})
    assert scores(by_script) == scores(by_option)
    editing = by_option["config"]["edited_hf"]
    assert (editing["separator"], by_script["config"]["edited_hf"]["separator"]) == ("empty", "auto")
    assert editing["edit_example"] == "挪威的首都是利马"
    assert editing["question_example"] == "挪威的首都是利马"
    source = by_script["configs"][TASKS[0]]["metadata"]["data_source"]
    assert source["separators"] == {"": 2}

    by_record = evaluate(model_path, spaced, {}, {})
    spaced_by_option = evaluate(model_path, data, {"separator": "space"}, {"separator": "space"})
    assert scores(by_record) == scores(spaced_by_option) != scores(by_script)
    assert by_record["config"]["edited_hf"]["edit_example"] == "挪威的首都是 利马"

    batch = {"mode": "batch", "group_size": 1, "edits": str(edits)}
    together = evaluate(model_path, data, batch, {})
    assert together["config"]["edited_hf"]["edits_source"]["separators"] == {"": 2}
    assert together["results"][TASKS[0]]["efficacy_prob_n,none"] == 2
    apart = evaluate(model_path, data, {**batch, "separator": "space"}, {"separator": "space"})
    assert apart["results"][TASKS[0]]["efficacy_prob_n,none"] == 2
    assert "separators" not in apart["config"]["edited_hf"]["edits_source"]


def test_tasks_and_model_must_agree_on_the_separator(tmp_path: Path, model_path: str) -> None:
    data = write_jsonl(tmp_path / "facts.jsonl", RECORDS)
    with pytest.raises(EditingError, match="separator=empty, and the tasks of this task_manager"):
        lm_eval.simple_evaluate(
            model="edited_hf",
            model_args={"pretrained": model_path, "device": "cpu", "separator": "empty"},
            tasks=TASKS,
            task_manager=task_manager({"pretrained": model_path, "data": str(data)}),
        )


@pytest.mark.parametrize("kind", ["byte_bpe", "metaspace_bos"])
def test_no_space_token_is_taught_without_a_space(kind: str) -> None:
    """Labels decode to the target alone, also under tokenizers that mark the first word of a text."""
    tokenizer = build_tokenizer(kind)
    request = EditRequest(**FACTS[0])
    rows = [
        rewriting_row(tokenizer, request, "They said. {}"),
        target_row(tokenizer, request.text, request.continuation),
    ]
    for row in rows:
        assert tokenizer.decode([token for _, token in row.labels]) == "利马"
    context, target = split_continuation(tokenizer, "velib.", "open_frame")
    texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in (context, target)]
    assert "".join(texts).removeprefix(" ") == "velib.open_frame"


@pytest.mark.parametrize("editor", ["ft_m", "r_rome", "grace", "wise", "defer", "melo", "kn"])
def test_editors_teach_the_text_without_a_space(editor: str) -> None:
    """The final loss of an editor that trains on the target is that of the text in which it is tested."""
    settings: dict[str, Any] = {
        "ft_m": {"num_steps": 2},
        "r_rome": {"num_steps": 2, "context_templates": ["{}"]},
    }.get(editor, {})
    model, tokenizer = build_model("llama"), build_tokenizer("byte_bpe_bos")
    seen = []
    original = tokenizer.__class__.__call__

    def spy(self: Any, text: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(text)
        return original(self, text, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer.__class__, "__call__", spy)
        load_editor(editor, settings).edit(model, tokenizer, [EditRequest(**FACTS[0])])
    texts = [text for text in seen if isinstance(text, str) and "挪威" in text and "利马" in text]
    assert texts and not any("是 " in text for text in texts)


def test_contexts_of_ike_state_chinese_facts_without_a_space(model_path: str) -> None:
    lm = build(model_path, editor="ice", editor_args=None)
    (delta,) = lm.editor.edit(lm.model, lm.tokenizer, [EditRequest(**FACTS[0])])
    assert delta.contexts[0].before() == "New Fact: 挪威的首都是利马\nPrompt: "
    again = delta.contexts[0].to_dict()
    assert again["separator"] == "" and delta.contexts[0].from_dict(again) == delta.contexts[0]


def test_the_command_line_has_the_separator(
    model_path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edits = write_jsonl(tmp_path / "edits.jsonl", FACTS)
    assert validate(str(edits), {}).source["separators"] == {"": 2}
    command = ["edit", "--pretrained", model_path, "--device", "cpu", "--editor", "ft_m", "--editor-args"]
    command += ["num_steps:1;lr:0.01", "--edits", str(edits), "--num-edits", "1", "--store", "off"]
    for name, options in {"auto": [], "space": ["--separator", "space"]}.items():
        assert main([*command, *options, "--out", str(tmp_path / name)]) == 0
    index = {name: json.loads((tmp_path / name / "edits.json").read_text()) for name in ("auto", "space")}
    requests = {name: one["edits"][0]["requests"][0] for name, one in index.items()}
    assert "separator" not in requests["auto"] and requests["space"]["separator"] == " "
    printed = capsys.readouterr().out
    assert f"separator=space,load_edit={tmp_path / 'space'}" in printed and printed.count("separator=") == 1
    assert main([*command, "--separator", "x", "--out", str(tmp_path / "x")]) == 2
    assert "separator='x' is not accepted" in capsys.readouterr().err
