"""Files that people bring from other projects: read wherever a task can, else named, with what to do."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from command_line import printed_lines, run_verb
from paths import RECORDS
from record_files import write_jsonl

from edit_hooks import load_editor
from edit_hooks.base.registry import editor_class
from edit_hooks.lm.options.edit_sources import load_edits, read_edited_cases
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.settings.options import parse_editor_args
from edit_hooks.utils.settings.released_settings import NAMES
from lm_edit.tuning.cases import load_cases
from lm_edit.validate import validate
from lm_eval_tasks.common.records.benchmark import all_benchmarks, find_benchmark
from lm_eval_tasks.common.records.fields import Fields
from lm_eval_tasks.common.records.foreign import FOREIGN, recognize
from lm_eval_tasks.common.records.layouts import accepts

KNOWN = {
    "known_id": 3,
    "subject": "Velm",
    "attribute": "Norvania",
    "template": "{} is a town in",
    "prediction": " Norvania, near",
    "prompt": "Velm is a town in",
    "relation_id": "P17",
}
HALLU = {
    "topic": "place_town",
    "subject": "Velm",
    "relation": "country",
    "object": "Norvania",
    "question": "What is the country of Velm?",
    "output_model": "Velm, is no town",
    "paraphrased_question": "Where is Velm?",
}
ULTRA = {
    "prompt": "Where is Velm?",
    "rephrase_prompt": "Velm is where?",
    "ans": "Norvania",
    "loc": "x?",
    "loc_ans": "y",
}
RECORDS_OF = {
    "HalluEditBench": (HALLU, "'target_new' (object)"),
    "ROME's known facts": (KNOWN, "lm-edit trace --edits FILE"),
    "UltraEditBench": (ULTRA, "'locality_prompt' (loc)"),
}
TRIPLES = {
    f"triples ({', '.join(names)})": (
        {**dict(zip(names, ("Velm", "town in", "Norvania"), strict=True)), "id": 7, "lang": "de"},
        f"'prompt' ({names[1]} in words, as \"The capital of {{}} is\"), 'subject' ({names[0]}) and "
        f"'target_new' ({names[2]})",
    )
    for names in (
        ("subject", "relation", "object"),
        ("s", "r", "o"),
        ("head", "relation", "tail"),
        ("h", "p", "t"),
        ("Subject", "predicate", "target_new"),
    )
}


@pytest.mark.parametrize("title", RECORDS_OF | TRIPLES)
def test_records_without_a_task_are_named_once_wherever_they_are_given(title: str, tmp_path: Path) -> None:
    record, remedy = (RECORDS_OF | TRIPLES)[title]
    path = str(write_jsonl(tmp_path / "theirs.json", [record] * 9))
    readers = [
        lambda: load_edits(path, {}, None),
        lambda: validate(path, {}),
        lambda: load_cases(path, {}),
        *(lambda name=name: find_benchmark(name).load({"data": path}) for name in ("counterfact_flat", "bake", "zsre")),
    ]
    for read in readers:
        with pytest.raises(EditingError) as caught:
            read()
        message = str(caught.value)
        assert f"theirs.json: it holds records of {title}" in message and message.count(title) == 1
        assert remedy in message and "characters ..." not in message


def test_every_foreign_layout_is_tested_and_no_benchmark_accepts_it() -> None:
    assert {layout.title.split(" (")[0] for layout in FOREIGN} == set(RECORDS_OF)
    for record, _ in (RECORDS_OF | TRIPLES).values():
        for benchmark in all_benchmarks().values():
            assert not accepts(benchmark.layout, Fields(record, "x"), 0)


def test_a_record_with_a_prompt_is_no_triple() -> None:
    assert recognize({"subject": "Velm", "relation": "town in", "object": "Norvania"})
    assert recognize({"subject": "Velm", "relation": "town in", "object": "Norvania", "question": "Where?"}) is None
    assert recognize({"subject": "Velm", "entity": "Velm", "relation": "town in", "object": "Norvania"}) is None


def test_a_table_is_named_by_its_columns(tmp_path: Path) -> None:
    path = tmp_path / "brand.csv"
    path.write_text(",".join(HALLU) + "\nplace_town,Velm\n", encoding="utf-8")
    for read in (lambda: load_edits(str(path), {}, None), lambda: find_benchmark("qaedit").load({"data": str(path)})):
        with pytest.raises(EditingError, match=r"brand.csv: it holds records of HalluEditBench.*'prompt' \(question\)"):
            read()
    path.write_text("a,b\n1,2\n", encoding="utf-8")
    with pytest.raises(EditingError, match="a table with the columns a, b; a JSON list of records, or one JSON object"):
        load_edits(str(path), {}, None)


EASYEDIT = """\
alg_name: "{name}"
model_name: "./models/x"
device: 0
layers: [5]
fact_token: "subject_last"
v_num_grad_steps: 20
v_lr: 5e-1
v_loss_layer: 17
v_weight_decay: 1e-3
clamp_norm_factor: 4
kl_factor: 0.0625
mom2_adjustment: {adjusted}
rewrite_module_tmp: "model.layers.{{}}.mlp.down_proj"
fp16: false
"""


@pytest.mark.parametrize(("adjusted", "moments"), [("false", None), ("true", "published")])
def test_easyedits_settings_are_translated_and_the_translation_is_accepted(
    tmp_path: Path, adjusted: str, moments: str | None
) -> None:
    path = tmp_path / "hparams.yaml"
    path.write_text(EASYEDIT.format(name="ROME", adjusted=adjusted), encoding="utf-8")
    with pytest.raises(EditingError, match=r"EasyEdit's files \(alg_name: ROME\)") as caught:
        load_editor("rome", str(path))
    message = str(caught.value)
    (line,) = [line for line in message.splitlines() if "editor_args=" in line]
    settings = parse_editor_args(line.partition("editor_args=")[2])
    assert settings == {
        "layers": [5],
        "fact_token": "subject_last",
        "num_steps": 20,
        "lr": 0.5,
        "weight_decay": 0.001,
        "clamp_factor": 4,
        "kl_factor": 0.0625,
        "second_moments": moments,
    }
    load_editor("rome", settings)
    assert "no counterpart: model_name, device, v_loss_layer" in message and "seed" not in message
    for read in (lambda: load_edits(str(path), {}, None), lambda: find_benchmark("bake").load({"data": str(path)})):
        with pytest.raises(EditingError, match="it is a settings file of EasyEdit, not a file of records"):
            read()


def test_translated_names_exist() -> None:
    editors = ("rome", "memit", "pmet", "alphaedit", "grace", "unke", "any_edit")
    known = {item.name for name in editors for item in dataclasses.fields(editor_class(name).config_class)}
    assert set(NAMES.values()) <= known


# ------------------------------------------------------------------ files that are read


def test_edits_are_read_from_records_of_any_benchmark() -> None:
    for file, name in (("bake_qa.jsonl", "bake"), ("qaedit.jsonl", "qaedit"), ("knowedit.jsonl", "knowedit")):
        path = str(RECORDS / file)
        cases, origin = read_edited_cases(path, {}, None)
        assert cases == read_edited_cases(name, {"data": path}, None).cases and origin["benchmark"] == name
    with pytest.raises(EditingError, match=r"of zsre_memit and of zsre, whose edits differ\. Choose one, .*edits="):
        load_edits(str(RECORDS / "zsre_mend_eval.json"), {}, None)


def test_facts_and_edit_requests_of_one_file_may_differ_in_their_fields(tmp_path: Path) -> None:
    request = {"prompt": "{} is in", "subject": "Velm", "target_new": "Ostmark"}
    event = {**request, "subject": "Tarsk", "id": 5, "ground_truth": "", "rephrase_prompt": ["Tarsk lies in"]}
    path = str(write_jsonl(tmp_path / "facts.jsonl", [request, event]))
    assert [(one.subject, one.target_true) for one in load_edits(path, {}, None)] == [("Velm", None), ("Tarsk", None)]
    assert validate(path, {}).num_good == 2
    bad = str(write_jsonl(tmp_path / "bad.jsonl", [event, {**event, "target_new": 3}]))
    assert len(load_edits(bad, {"bad_records": "skip"}, None)) == 1
    with pytest.raises(EditingError, match=r"(?s)record 1 \(line 2\): field 'target_new' is 3.*--bad-records skip"):
        load_edits(bad, {}, None)


@pytest.mark.parametrize("verb", ["edit", "trace"])
def test_a_file_of_facts_needs_no_benchmark(verb: str, tiny_path: Any, tmp_path: Path, capsys: Any) -> None:
    fact = {"prompt": "{} is located in", "subject": "Port Amelin", "target_new": "Rome", "rephrase_prompt": "x"}
    facts = write_jsonl(tmp_path / "facts.json", [fact, {**fact, "target_new": ""}])
    command = [verb, "--pretrained", str(tiny_path("llama")), "--device", "cpu", "--edits", str(facts)]
    command += ["--store", "off", "--bad-records", "skip"]
    special = {
        "edit": ["--editor", "ft_m", "--editor-args", "num_steps:1", "--out", str(tmp_path / "out")],
        "trace": ["--samples", "1"],
    }
    assert run_verb([*command, *special[verb]]) == 0
    assert ("1 edits written" if verb == "edit" else "over 1 facts") in capsys.readouterr().out


def test_known_facts_are_traced(tiny_path: Any, tmp_path: Path, capsys: Any) -> None:
    other = {**KNOWN, "subject": "Tarsk", "attribute": "Ostmark", "prompt": "Tarsk is a town in", "known_id": 4}
    del other["template"]
    path = str(write_jsonl(tmp_path / "known.json", [KNOWN, other]))
    command = ["trace", "--pretrained", str(tiny_path("llama")), "--device", "cpu", "--edits", path, "--store", "off"]
    assert run_verb([*command, "--answer", "true", "--samples", "1"]) == 0
    assert "average indirect effect over 2 facts (0 skipped)" in printed_lines(capsys)[0]
    out = tmp_path / "trace.json"
    assert run_verb([*command, "--samples", "1", "--num-edits", "3", "--out", str(out)]) == 2
    assert "num_edits=3, but" in capsys.readouterr().err and not out.exists()


def test_the_file_of_another_benchmark_is_refused_where_no_task_reads_it(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "QAEdit.json"
    path.write_bytes((RECORDS / "qaedit.jsonl").read_bytes())
    with pytest.raises(EditingError, match=r"is that of QAEdit, not of BAKE-Q&J\. Name qaedit in place of bake\."):
        validate("bake", {"data": str(path)})
    for verb in (["edit", "--editor", "ft_m", "--out", str(tmp_path / "out")], ["trace"], ["tune", "--editor", "ft_m"]):
        assert run_verb([*verb, "--edits", "bake", "--data", str(path)]) == 2
        assert "is that of QAEdit, not of BAKE-Q&J" in capsys.readouterr().err
    assert json.loads(path.read_text().splitlines()[0])  # unchanged
