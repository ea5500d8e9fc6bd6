"""``lm-edit passport`` on a tiny model: one whole run, whose files the tests read."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from command_line import run_verb
from lm_runs import instance
from paths import ROOT
from transformers import AutoTokenizer

from edit_hooks.base.registry import editor_class
from edit_hooks.contract.tiny_models import REQUESTS
from edit_hooks.lm.model import EditedHFLM
from lm_edit import load_results
from lm_edit.passport.making import CHAPTERS, PARTS, chosen_parts
from lm_edit.passport.record import SCHEMA

HOSTILE = "<script>alert(1)</script> | `x` [y](z) --- the town"
UNSCORED = {"chat": "no chat template", "reverses": "records of bake", "hops": "records of mquake"}
UNSCORED |= {"abilities": "nyu-mll/glue"}  # no silent switch to the embedded rows


def _words(tiny: Path) -> list[str]:
    return ["--pretrained", str(tiny), "--device", "cpu"]


def _record(number: int, **more: Any) -> dict[str, Any]:
    request = REQUESTS[number]
    return {"case_id": number, **request, "ground_truth": request.get("target_true", "Oslo"), **more}


@pytest.fixture(scope="module")
def run(tiny_path: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """The folder of a passport of a stream of two edits, that of the edits, and the file of their facts."""
    root, tiny = tmp_path_factory.mktemp("passport"), tiny_path("llama")
    records = [_record(number) for number in range(len(REQUESTS))]
    for record in records:
        record.pop("target_true", None)
    records[0] |= {"rephrase_prompt": [HOSTILE], "locality_prompt": [HOSTILE], "locality_ground_truth": ["Velm"]}
    facts = root / "facts.jsonl"
    facts.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    edits = root / "<b>edits"
    made = ["--editor", "ft_m", "--editor-args", "num_steps:3", "--store", "off", "--edits", str(facts)]
    assert run_verb(["edit", *_words(tiny), *made, "--num-edits", "2", "--sequential", "--out", str(edits)]) == 0
    text = root / "texts.txt"
    text.write_text("".join(f"he speaks the town of Ostravia number {n}\n" for n in range(8)), encoding="utf-8")
    out = root / "out"
    options = ["--facts", str(facts), "--text", str(text), "--steps", "150", "--merge-with", str(edits)]
    assert run_verb(["passport", str(edits), *_words(tiny), *options, "--out", str(out)]) == 0
    return out, edits, facts


@pytest.fixture(scope="module")
def content(run: tuple[Path, Path, Path]) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((run[0] / "passport.json").read_text(encoding="utf-8"))
    return loaded


def _part(content: dict[str, Any], name: str) -> dict[str, Any]:
    (part,) = (one for one in content["parts"] if one["name"] == name)
    return part


def test_every_part_is_measured_or_says_why_not(content: dict[str, Any]) -> None:
    assert content["schema"] == SCHEMA and [part["name"] for part in content["parts"]] == list(PARTS)
    for part in content["parts"]:
        assert bool(part["scores"]) != bool(part["unscored"]), part["name"]
        for score in part["scores"]:
            assert (score["value"] is None) <= bool(score["note"] or score["unscored_reasons"]), score
    for name, words in UNSCORED.items():
        assert words in _part(content, name)["unscored"]
    assert "/" not in content["model"]["name"], "no path of this machine"
    assert content["facts"]["asked"] == 2 and content["facts"]["facts"] == len(REQUESTS)


def test_scores_are_those_of_the_result_files_and_of_the_model(
    content: dict[str, Any], run: tuple[Path, Path, Path], tiny_path: Any
) -> None:
    out, edits, _ = run
    rows = load_results(out / "runs" / "01")
    (row,) = rows[(rows["metric"] == "efficacy_prob") & (rows["stage"] == "")].to_dict("records")
    (score,) = (one for one in _part(content, "efficacy")["scores"] if one["name"] == "efficacy_prob")
    assert (score["value"], score["n"]) == (row["value"], 2) and score["interval"][0] <= score["value"]
    lm = EditedHFLM(str(tiny_path("llama")), device="cpu", store="off", load_edit=str(edits))
    nlls = []
    for request in REQUESTS[:2]:
        prompt, target = request["prompt"].format(request["subject"]), f" {request['target_new']}"
        doc = {"edit_requests": [{**request, "target_true": "Oslo"}]}
        (answer,) = lm.loglikelihood([instance(doc, prompt, target)], disable_tqdm=True)
        nlls.append(-answer.final.logprob / answer.final.num_tokens)
    (measured,) = (one for one in _part(content, "efficacy")["scores"] if one["name"] == "target_nll")
    assert measured["value"] == pytest.approx(sum(nlls) / 2, abs=1e-4) and measured["value"] < measured["before"]


def test_changes_of_the_model_are_checked_and_compared_with_the_edited_model(content: dict[str, Any]) -> None:
    held = next(one for one in _part(content, "efficacy")["scores"] if one["name"] == "target_nll")["value"]
    for name in CHAPTERS["lasts"]:
        part = _part(content, name)
        nll = part["scores"][0]
        assert part["compared_with"] == "edited model" and nll["before"] == pytest.approx(held, abs=1e-4)
        assert nll["name"] == "target_nll" and nll["value"] != nll["before"], "the change was not in the model"
    trained = _part(content, "trained")["details"]
    assert trained["text_loss_after"] < 0.9 * trained["text_loss_before"] and trained["steps"] == 150
    assert "NF4" in _part(content, "quantized")["details"]["quantization"]
    assert _part(content, "merged")["details"]["checksum"] == content["edit"]["checksum"]


def test_pages_escape_hostile_texts(run: tuple[Path, Path, Path], content: dict[str, Any]) -> None:
    page = (run[0] / "passport.html").read_text(encoding="utf-8")
    assert "<b>edits" not in page and "&lt;b&gt;edits" in page and "<script" not in page
    tags = set(re.findall(r"</?([a-z0-9]+)", page))
    known = {"html", "head", "meta", "title", "style", "body", "h1", "h2", "p", "div", "table", "thead", "tbody"}
    assert tags <= known | {"tr", "th", "td", "ul", "li"}
    card = (run[0] / "passport.md").read_text(encoding="utf-8")
    metadata, text = card.removeprefix("---\n").split("\n---\n", 1)
    assert "<b>" not in text.replace("\\<b\\>", "")
    (index,) = yaml.safe_load(metadata)["model-index"]
    values = {metric["type"]: metric["value"] for result in index["results"] for metric in result["metrics"]}
    assert values["counterfact_flat_es/efficacy_prob"] in (0.0, 0.5, 1.0)
    scored = [score for part in content["parts"] for score in part["scores"] if score["value"] is not None]
    assert sum(len(result["metrics"]) for result in index["results"]) == len(scored)


def test_hostile_facts_are_text_in_the_pages(tiny_path: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lm_edit.passport.pages import html_page, markdown_page
    from lm_edit.passport.record import Part, Passport, PassportScore

    score = PassportScore(name=HOSTILE, value=math.inf, n=1, reasons={HOSTILE: 1}, note=HOSTILE)
    passport = Passport(
        edit={"name": HOSTILE, "editor": HOSTILE, "writes": [], "parameters": 0, "statements": [HOSTILE, "---"]}
        | {"checksum": HOSTILE},
        model={"name": HOSTILE, "type": HOSTILE, "dtype": "", "device": ""},
        facts={"asked": 1, "source": HOSTILE, "facts": 1, "requests_not_in_source": 0, "benchmark": HOSTILE},
        parts=[
            Part(name=HOSTILE, question=HOSTILE, scores=[score], details={HOSTILE: [HOSTILE]}),
            Part(name="b", question=HOSTILE, unscored=HOSTILE),
        ],
        settings={},
        versions={},
        date="",
    )
    assert "<script" not in html_page(passport)
    metadata, text = markdown_page(passport).removeprefix("---\n").split("\n---\n", 1)
    assert "<script" not in text.replace("\\<", "")
    assert yaml.safe_load(metadata)["model-index"][0]["name"] == HOSTILE
    json.loads(json.dumps(passport.to_json(), allow_nan=False))


def test_an_edit_without_its_questions_names_what_is_missing(
    run: tuple[Path, Path, Path], tiny_path: Any, tmp_path: Path, capsys: Any
) -> None:
    _, edits, _ = run
    words = [str(edits), *_words(tiny_path("llama")), "--only", "generalizes,neighbors,subjects,reverses"]
    assert run_verb(["passport", *words, "--out", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    for reason in ("no rewordings", "no prompts of other facts", "0 names besides the edit's subjects"):
        assert reason in printed
    assert "0.000" not in printed, "an unscored part has no number"


def _edit(tiny: Path, editor: str, facts: Path, folder: Path) -> Path:
    """A saved edit of the first fact; returns its file."""
    settings = folder.with_suffix(".json")
    settings.write_text(json.dumps(dict(editor_class(editor).contract_settings)), encoding="utf-8")
    made = ["--editor", editor, "--editor-args", str(settings), "--store", "off", "--edits", str(facts)]
    assert run_verb(["edit", *_words(tiny), *made, "--num-edits", "1", "--out", str(folder)]) == 0
    return folder / "edit-0.safetensors"


def test_an_edit_outside_the_weights_is_unscored_where_it_must_be_in_them(
    run: tuple[Path, Path, Path], tiny_path: Any, tmp_path: Path
) -> None:
    _, _, facts = run
    edit = _edit(tiny_path("llama"), "grace", facts, tmp_path / "grace")
    only = ["--facts", str(facts), "--only", "divergence,lasts,gives-away", "--merge-with", str(edit)]
    assert run_verb(["passport", str(edit), *_words(tiny_path("llama")), *only, "--out", str(tmp_path / "out")]) == 0
    content = json.loads((tmp_path / "out" / "passport.json").read_text(encoding="utf-8"))
    unscored = {part["name"]: part["unscored"] or "" for part in content["parts"]}
    assert [name for name, reason in unscored.items() if "the edit changes hooks" in reason] == [
        *CHAPTERS["lasts"],
        *CHAPTERS["gives-away"],
    ]
    assert not unscored["divergence"]


def test_an_adapter_from_elsewhere_needs_its_facts(
    run: tuple[Path, Path, Path], tiny_path: Any, tmp_path: Path
) -> None:
    _, _, facts = run
    edit = _edit(tiny_path("llama"), "lora", facts, tmp_path / "lora")
    adapter = tmp_path / "adapter"
    words = [*_words(tiny_path("llama")), "--format", "peft", "--out", str(adapter)]
    assert run_verb(["export", str(edit), *words]) == 0
    (adapter / "edit_origin.json").unlink()
    asked = ["passport", str(adapter), *_words(tiny_path("llama")), "--only", "quantized", "--limit", "2"]
    assert run_verb(asked) == 2
    assert run_verb([*asked, "--facts", str(facts), "--out", str(tmp_path / "out")]) == 0
    content = json.loads((tmp_path / "out" / "passport.json").read_text(encoding="utf-8"))
    assert content["edit"]["num_requests"] is None and content["facts"]["asked"] == 2
    values = {score["name"]: score for score in _part(content, "quantized")["scores"]}
    assert values["efficacy_prob"]["n"] == 2 and values["target_nll"]["value"] != values["target_nll"]["before"]


def test_a_chat_model_is_asked_in_its_template(run: tuple[Path, Path, Path], tiny_path: Any, tmp_path: Path) -> None:
    _, _, facts = run
    model = tmp_path / "chat"
    shutil.copytree(tiny_path("llama"), model)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %} Reply now:"
    tokenizer.save_pretrained(model)
    edit = _edit(model, "ft_m", facts, tmp_path / "edits")
    words = [str(edit), *_words(model), "--only", "chat", "--facts", str(facts), "--out", str(tmp_path / "out")]
    assert run_verb(["passport", *words]) == 0
    content = json.loads((tmp_path / "out" / "passport.json").read_text(encoding="utf-8"))
    assert {score["n"] for score in _part(content, "chat")["scores"]} == {1}
    (samples,) = (tmp_path / "out" / "runs").rglob("samples_*.jsonl")
    assert "Reply now:" in samples.read_text(encoding="utf-8"), "the prompts are not in the template"


def test_wrong_words_are_refused_before_a_model_is_loaded(run: tuple[Path, Path, Path], tmp_path: Path) -> None:
    _, edits, _ = run
    nowhere = ["--pretrained", str(tmp_path / "nowhere")]
    assert run_verb(["passport", str(edits), *nowhere, "--only", "hold"]) == 2
    assert run_verb(["passport", str(edits), *nowhere, "--data", "mini"]) == 2


def test_another_adapter_that_is_none_is_refused_before_the_questions(
    run: tuple[Path, Path, Path], tiny_path: Any, tmp_path: Path
) -> None:
    _, edits, _ = run
    words = [str(edits), *_words(tiny_path("llama")), "--only", "merged", "--merge-with", str(tmp_path)]
    assert run_verb(["passport", *words, "--out", str(tmp_path / "out")]) == 2
    assert not (tmp_path / "out").exists()


def test_parts_are_chosen_by_chapter_or_name() -> None:
    assert chosen_parts(["quantized", "broke"]) == ["divergence", "neighbors", "abilities", "quantized"]
    assert chosen_parts(list(CHAPTERS)) == list(PARTS)


def test_the_reference_names_every_field_and_part(content: dict[str, Any]) -> None:
    page = (ROOT / "docs" / "reference" / "passport.md").read_text(encoding="utf-8")
    part = content["parts"][0]
    fields = {*content, *content["edit"], *content["model"], *part, *part["scores"][0], *PARTS, SCHEMA}
    assert not {name for name in fields if f"`{name}`" not in page}
    tasks = {score["task"] for one in content["parts"] for score in one["scores"] if score["task"]}
    assert not {task for task in tasks if f"`{task}`" not in page}
