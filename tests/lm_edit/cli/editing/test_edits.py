"""``lm-edit edit`` and ``lm-edit export``."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import shlex
import shutil
import statistics

import pytest
import torch
from command_line import printed_lines, write_requests, write_settings
from random_deltas import random_delta
from transformers import AutoModelForCausalLM

from edit_hooks import Delta, EditingError, EditRequest
from edit_hooks.contract.tiny_models import REQUESTS, save_tiny
from edit_hooks.deltas.delta import Factor
from edit_hooks.deltas.saving.export import export_peft
from edit_hooks.deltas.saving.saved import read_edit, save_edits
from edit_hooks.edit_report import EditReport
from edit_hooks.lm.model import EditedHFLM
from edit_hooks.lm.options.edit_sources import load_edits
from lm_edit.cli.editing.edits import print_effects
from lm_edit.cli.main import main
from lm_edit.edits import SavedEdit
from lm_eval_tasks.report.printing.anomalies import find_anomalies


@pytest.fixture
def model(tiny_path):
    return ["--pretrained", str(tiny_path("llama")), "--device", "cpu"]


@pytest.fixture
def edits(tmp_path):
    return str(write_requests(tmp_path / "requests.jsonl"))


@pytest.mark.parametrize(
    ("editor", "options", "num_files", "num_requests"),
    [
        ("r_rome", [], len(REQUESTS), 1),
        ("r_rome", ["--sequential", "--num-edits", "3"], 3, 1),
        ("ft_m", ["--joint"], 1, 4),
    ],
)
def test_edits_are_made_saved_and_exported(
    model, edits, tmp_path, capsys, caplog, editor, options, num_files, num_requests
):
    settings = str(write_settings(tmp_path / "fast.yaml")) if editor == "r_rome" else "num_steps:2;lr:0.01"
    out = tmp_path / "edits"
    command = ["edit", *model, "--editor", editor, "--editor-args", settings, "--edits", edits, *options]
    command += ["--store", str(tmp_path / "store"), "--out", str(out)]
    assert main(command) == 0
    printed = printed_lines(capsys)
    assert printed[-1] == f"{num_files} edits written to {out}, 0 failed"
    paths = sorted(out.glob("*.safetensors"))
    index = json.loads((out / "edits.json").read_text())
    assert [entry["file"] for entry in index["edits"]] == [path.name for path in paths] and len(paths) == num_files
    assert all(len(entry["requests"]) == num_requests for entry in index["edits"])
    assert index["edits"][0]["requests"][0]["case_id"] == "c0" and index["editor"] == editor
    assert main(command) == 2  # earlier edits are not overwritten
    assert "not empty" in capsys.readouterr().err
    file_format = "merged" if editor == "ft_m" else "peft"
    exported = [str(path) for path in (paths if "--sequential" in options else paths[:1])]
    assert main(["export", *exported, *model, "--format", file_format, "--out", str(tmp_path / "export")]) == 0
    assert "are added" not in caplog.text  # the steps of one stream belong together
    expected = "model.safetensors" if file_format == "merged" else "adapter_model.safetensors"
    assert (tmp_path / "export" / expected).is_file()


@pytest.mark.parametrize("grouping", [[], ["--sequential"]])
def test_edits_are_printed_with_their_effect_and_the_commands_that_use_them(model, edits, tmp_path, capsys, grouping):
    out = tmp_path / "edits"
    settings = ["--editor-args", str(write_settings(tmp_path / "fast.yaml")), "--store", "off", *grouping]
    assert main(["edit", *model, "--editor", "r_rome", *settings, "--edits", edits, "--out", str(out)]) == 0
    printed = printed_lines(capsys)
    header = next(number for number, line in enumerate(printed) if line.startswith("file "))
    index = json.loads((out / "edits.json").read_text())["edits"]
    rows = [line.split() for line in printed[header + 1 : header + 1 + len(index)]]
    for row, entry in zip(rows, index, strict=True):
        effect = [entry["diagnostics"][name] for name in ("target_nll_before", "target_nll_after", "first_token_kl")]
        assert row[:4] == [entry["file"], *(f"{number:.3f}" for number in effect)]
    assert printed[header + 1].endswith(f"-> {REQUESTS[0]['target_new']}")
    *evaluate, export = (line for line in printed if line.startswith(("evaluate: ", "export: ")))
    if grouping:
        assert f"pretrained={model[1]},load_edit={out} " in evaluate[0]  # a step alone is not the stream
        files = export.split()[3]
        export = export.replace(files, " ".join(map(str, sorted(out.glob("*.safetensors")))))
        assert files == f"{out}/*.safetensors"
    else:
        assert f"pretrained={model[1]},load_edit={out / 'edit-0.safetensors'} " in evaluate[0]
    command = shlex.split(export.removeprefix("export: lm-edit ").replace("<folder>", str(tmp_path / "adapter")))
    assert main([*command, "--device", "cpu"]) == 0 and (tmp_path / "adapter/adapter_config.json").is_file()
    in_sum = "NLL of the edits' targets"
    if grouping:  # a step is made on top of the earlier ones
        assert in_sum not in capsys.readouterr().out
    else:
        paths = [str(path) for path in sorted(out.glob("*.safetensors"))]
        assert main(["export", *paths, *model, "--format", "peft", "--out", str(tmp_path / "sum")]) == 0
        printed = capsys.readouterr()
        (line,) = (line for line in printed.out.splitlines() if line.startswith(in_sum))
        alone = statistics.fmean(entry["diagnostics"]["target_nll_after"] for entry in index)
        found = [float(word) for word in re.findall(r"\d+\.\d+", line)]
        assert found[0] == round(alone, 3) != found[1]
        assert f"{len(paths)}/{len(paths)}" in printed.err  # each target once, in the sum


@pytest.mark.parametrize(
    ("editor", "options", "evaluated", "exported"),
    [
        ("ft_m", ["--editor-args", "num_steps:1"], "edit-0.safetensors", "edit-0.safetensors"),
        ("ft_m", ["--editor-args", "num_steps:1", "--sequential"], "", "*.safetensors"),
        (
            "ft_m",
            ["--editor-args", "num_steps:1", "--sequential", "--edit-batch-size", "2"],
            "edit-0.safetensors",
            "*.safetensors",
        ),
        ("grace", ["--editor-args", "num_steps:1", "--sequential"], "", None),
        ("ice", ["--editor-args", "embedder:words"], "edit-0.safetensors", None),
    ],
)
def test_only_commands_that_can_work_are_printed(model, edits, tmp_path, capsys, editor, options, evaluated, exported):
    out = tmp_path / "edits"
    command = ["edit", *model, "--editor", editor, *options, "--store", "off", "--edits", edits, "--out", str(out)]
    assert main([*command, "--num-edits", "2"]) == 0
    printed = {line.split(": ")[0]: line for line in printed_lines(capsys) if ": " in line}
    words = dict(word.split("=") for word in printed["evaluate"].split()[5].split(","))
    assert words["load_edit"] == str(out / evaluated)
    assert EditedHFLM(**words, device="cpu", store="off").session.editor_name == editor
    assert ("export" in printed) == (exported is not None)
    if exported is not None:
        assert f"lm-edit export {out}/{exported} --pretrained {model[1]} --format merged" in printed["export"]


def test_edits_of_prompts_have_no_numbers_and_the_reason_is_printed(tmp_path, capsys):
    """The table had a "-" in every column, and the guide promises a likelihood."""
    request = EditRequest(**REQUESTS[0])
    print_effects([SavedEdit(tmp_path / "edit-0", (request,), EditReport(diagnostics={"facts": 1}), (), ("context",))])
    header, row, reason = printed_lines(capsys)
    assert header.split() == ["file", "edit"] and row.split()[0] == "edit-0" and "-" not in row.split()[1:-2]
    assert "act through the prompts of questions" in reason and "evaluate them" in reason


def test_long_lists_of_edits_are_cut_in_the_table_and_warnings_are_counted(tmp_path, capsys):
    request = EditRequest(**REQUESTS[0])
    report = EditReport(warnings=("a likely problem",))
    edits = [SavedEdit(tmp_path / f"edit-{number}", (request,), report, ()) for number in range(25)]
    print_effects(edits)
    printed = printed_lines(capsys)
    assert len(printed) == 1 + 20 + 1 + 1 and printed[1].split()[1:4] == ["-", "-", "-"]
    assert printed[21] == f"... and 5 more in {tmp_path / 'edits.json'}"
    assert printed[22].startswith("warning, a likely problem (25): edit-0; ")


def test_each_fact_of_a_joint_edit_is_measured_and_those_that_did_not_take_are_named(model, edits, tmp_path, capsys):
    """A mean hides which of fifty facts took; sums of log-probabilities by hand."""
    out, settings = tmp_path / "edits", "num_steps:3;lr:0.01"
    command = ["edit", *model, "--editor", "ft_m", "--editor-args", settings, "--edits", edits, "--joint"]
    assert main([*command, "--store", "off", "--out", str(out)]) == 0
    printed = printed_lines(capsys)
    (entry,) = json.loads((out / "edits.json").read_text(encoding="utf-8"))["edits"]
    pairs, means = entry["diagnostics"]["target_nlls"], entry["diagnostics"]
    assert len(pairs) == len(entry["requests"]) == len(REQUESTS) > 1
    assert means["target_nll_after"] == pytest.approx(sum(after for _, after in pairs) / len(pairs))
    lm = EditedHFLM(model[1], device="cpu", store="off", load_edit=str(out / "edit-0.safetensors"))
    with lm.session.stock_task_scope():
        for request, (_, after) in zip(map(EditRequest.from_dict, entry["requests"]), pairs, strict=True):
            whole = lm.tokenizer(request.text + request.continuation, return_tensors="pt")["input_ids"]
            length = whole.shape[1] - len(lm.tokenizer(request.text)["input_ids"])
            logprobs = lm.model(whole).logits[0, -length - 1 : -1].log_softmax(-1)
            nll = -logprobs.gather(1, whole[0, -length:, None]).mean()
            assert after == pytest.approx(nll.item(), abs=1e-4)
    rows = [line for line in printed if line.startswith("edit-0.safetensors ")]
    assert [row.split()[1:3] for row in rows] == [[f"{before:.3f}", f"{after:.3f}"] for before, after in pairs]
    num_unlikely = sum(after >= math.log(2) for _, after in pairs)
    named = [line for line in printed if "less likely than not" in line]
    assert num_unlikely and f"({num_unlikely}): {REQUESTS[0]['prompt'].format(REQUESTS[0]['subject'])}" in named[0]


def test_half_a_surrogate_pair_in_a_case_id_is_saved(model, tmp_path):
    """Only prompt and target reach the tokenizer; the other texts of a record are saved with its edit."""
    broken = {"case_id": "c\ud800", "relation_id": "\udfff", "target_true": "\ud800 \\ud800"}
    requests = [REQUESTS[0] | broken, REQUESTS[1] | {"target_true": "Ünal"}]
    edits, out = tmp_path / "requests.jsonl", tmp_path / "edits"
    edits.write_text("".join(json.dumps(request) + "\n" for request in requests), encoding="utf-8")
    settings = str(write_settings(tmp_path / "fast.yaml"))
    options = ["--editor", "r_rome", "--editor-args", settings, "--store", str(tmp_path / "store")]
    assert main(["edit", *model, *options, "--edits", str(edits), "--out", str(out)]) == 0
    text = (out / "edits.json").read_text(encoding="utf-8")
    saved = [entry["requests"][0] for entry in json.loads(text)["edits"]]
    assert {name: saved[0][name] for name in broken} == broken and "Ünal" in text
    assert Delta.load(out / "edit-0.safetensors").meta["requests"] == [saved[0]]
    adapter = tmp_path / "adapter"
    assert main(["export", str(out / "edit-0.safetensors"), *model, "--format", "peft", "--out", str(adapter)]) == 0
    outline = AutoModelForCausalLM.from_pretrained(model[1])
    assert read_edit(adapter, outline).meta["requests"] == [saved[0]]


def test_a_folder_of_edits_is_complete_or_not_there(tmp_path, monkeypatch):
    """A full disk, at any of the files."""
    groups = [
        ((EditRequest(**request),), Delta(factors={"m": Factor(torch.ones(2, 1), torch.ones(3, 1))}))
        for request in REQUESTS
    ]
    replace, room = os.replace, iter(())

    def full_disk(*paths):
        if next(room, None) is None:
            raise OSError(errno.ENOSPC, "No space left on device")
        replace(*paths)

    monkeypatch.setattr("os.replace", full_disk)
    for num_files in range(len(groups) + 1):
        room = iter(range(num_files))
        with pytest.raises(OSError, match="No space left"):
            save_edits(tmp_path / "new", groups, {}, len(groups))
        assert not (tmp_path / "new").exists()
    room = iter(range(len(groups) + 1))
    assert (
        len(save_edits(tmp_path / "new", groups, {}, len(groups)))
        == len(groups)
        == len(list(tmp_path.glob("new/*"))) - 1
    )


def test_printed_commands_load_the_weights_that_were_edited(model, edits, tmp_path, capsys):
    """Stock models check neither revision nor precision; an adapter on other weights is another model."""
    given = [*model, "--revision", "v1", "--dtype", "bfloat16"]
    of_model = f"pretrained={model[1]},revision=v1,dtype=bfloat16"
    out, adapter = tmp_path / "my edits", tmp_path / "my adapter"
    settings = ["--editor-args", str(write_settings(tmp_path / "fast.yaml")), "--store", "off", "--num-edits", "1"]
    assert main(["edit", *given, "--editor", "r_rome", *settings, "--edits", edits, "--out", str(out)]) == 0
    evaluate, export = (line for line in printed_lines(capsys) if line.startswith(("evaluate: ", "export: ")))
    assert shlex.split(evaluate)[5] == f"{of_model},load_edit={out / 'edit-0.safetensors'}"
    command = shlex.split(export.removeprefix("export: lm-edit ").replace("<folder>", shlex.quote(str(adapter))))
    assert main([*command, "--device", "cpu"]) == 0
    own, editing = (shlex.split(line.partition(": ")[2])[4] for line in printed_lines(capsys)[-2:])
    assert (own, editing) == (f"{of_model},peft={adapter}", f"{of_model},load_edit={adapter}")
    assert json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))["revision"] == "v1"


def test_a_checkpoint_with_edits_says_so_in_every_run(model, edits, tmp_path, capsys, caplog):
    """Compared with itself it is unchanged; another edit would be made on top."""
    options = ["--editor-args", "num_steps:2;lr:0.01", "--store", "off", "--num-edits", "2"]
    out, merged = tmp_path / "edits", str(tmp_path / "merged")
    assert main(["edit", *model, "--editor", "ft_m", *options, "--edits", edits, "--out", str(out)]) == 0
    caplog.clear()
    first, second = map(str, sorted(out.glob("*.safetensors")))
    assert main(["export", first, *model, "--format", "merged", "--out", str(tmp_path / "one")]) == 0
    assert f"load_edit={first} --tasks" in printed_lines(capsys)[-1] and "are added" not in caplog.text
    assert main(["export", first, second, *model, "--format", "merged", "--out", merged]) == 0
    assert "2 edits are added" in caplog.text and "measured without the others" in caplog.text
    assert printed_lines(capsys)[-1].startswith(
        "editing tasks: not for this sum; load_edit= takes the folder of a stream"
    )
    for settings, text in (
        ({"mode": "none"}, "compare it with itself"),
        ({"editor": "ft_m", "editor_args": {"num_steps": 2}}, "made on top of them"),
    ):
        caplog.clear()
        lm = EditedHFLM(merged, device="cpu", store="off", **settings)
        assert text in caplog.text
        run = {"config": {"edited_hf": lm.get_model_info()["edited_hf"]}, "results": {}, "configs": {}}
        (found,) = find_anomalies(run)
        assert found["kind"] == "edited_checkpoint" and text in found["text"]
    with pytest.raises(EditingError, match=f"evaluate it with pretrained={merged},mode=none"):
        EditedHFLM(model[1], device="cpu", store="off", load_edit=merged)


def test_a_model_with_an_adapter_is_edited(model, edits, tiny_model, tmp_path, capsys):
    adapter = str(export_peft(random_delta(tiny_model("llama")), tmp_path / "adapter"))
    command = ["edit", *model, "--editor", "ft_m", "--editor-args", "num_steps:2", "--store", "off", "--edits", edits]
    command += ["--num-edits", "1", "--out", str(tmp_path / "edits")]
    assert main([*command, "--model-args", f"peft={adapter}"]) == 0
    evaluate, export = (line for line in printed_lines(capsys) if line.startswith(("evaluate: ", "export: ")))
    assert f"pretrained={model[1]},peft={adapter},load_edit=" in evaluate
    assert shlex.split(export)[4:8] == ["--pretrained", model[1], "--model-args", f"peft={adapter}"]
    file = str(tmp_path / "edits/edit-0.safetensors")
    options = {"device": "cpu", "store": "off", "load_edit": file}
    assert EditedHFLM(model[1], peft=adapter, **options).session.editor_name == "ft_m"
    with pytest.raises(EditingError, match="was made for another model: its weights"):
        assert EditedHFLM(model[1], **options).session
    random_delta(tiny_model("llama"), seed=1).save(tmp_path / "own.safetensors")
    words = [str(tmp_path / "own.safetensors"), *model, "--model-args", f"peft={adapter}", "--format", "peft"]
    assert main(["export", *words, "--out", str(tmp_path / "second")]) == 0
    _, stock, editing = printed_lines(capsys)[-3:]
    assert stock == f"stock models load one adapter: merge {adapter} into the model before loading this one"
    assert f"pretrained={model[1]},peft={adapter},load_edit={tmp_path / 'second'} " in editing
    with pytest.raises(EditingError, match="is an adapter; give the model that it was made for, and peft="):
        EditedHFLM(adapter, device="cpu")


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("editor=rome", "its edits are options of the verb"),
        ("dtype=float32", "give --dtype instead"),
        ("pefft=x", "Did you mean 'peft'"),
    ],
)
def test_model_arguments_that_belong_elsewhere_are_errors(model, edits, tmp_path, capsys, words, problem):
    command = ["edit", *model, "--editor", "ft_m", "--edits", edits, "--out", str(tmp_path / "edits")]
    assert main([*command, "--model-args", words]) == 2
    assert problem in capsys.readouterr().err and not (tmp_path / "edits").exists()


def test_two_processes_do_not_write_edits_into_one_folder(tmp_path):
    """Both found it empty before their first edit, which can take hours."""
    delta = Delta(factors={"m": Factor(torch.ones(2, 1), torch.ones(3, 1))})
    out, other_files = tmp_path / "edits", []

    def while_another_writes():
        for request in REQUESTS[:2]:
            if not other_files:
                other_files.extend(save_edits(out, [((EditRequest(**REQUESTS[2]),), delta)], {}, 1))
            yield (EditRequest(**request),), delta

    with pytest.raises(EditingError, match="another process has begun to write edits into"):
        save_edits(out, while_another_writes(), {}, 2)
    (file,) = other_files
    assert Delta.load(file).meta["requests"][0]["prompt"] == REQUESTS[2]["prompt"]
    assert sorted(path.name for path in out.iterdir()) == ["edit-0.safetensors", "edits.json"]


def test_an_edit_of_the_command_line_is_the_edit_of_an_evaluation(model, edits, tmp_path):
    out, store = tmp_path / "edits", str(tmp_path / "store")
    settings = str(write_settings(tmp_path / "fast.yaml"))
    editor = ["--editor", "r_rome", "--editor-args", settings, "--store", store]
    assert main(["edit", *model, *editor, "--edits", edits, "--out", str(out)]) == 0
    lm = EditedHFLM(pretrained=model[1], device="cpu", editor_args=settings, store=store)
    deltas = lm.session.edits([(request,) for request in load_edits(edits, {}, None)])
    saved = [Delta.load(path).checksum() for path in sorted(out.glob("*.safetensors"))]
    assert saved == [delta.checksum() for delta in deltas]


def test_dense_edits_cannot_become_adapters_and_other_models_are_refused(model, edits, tmp_path, capsys):
    out = tmp_path / "edits"
    editor = ["--editor", "ft_m", "--editor-args", "num_steps:1", "--store", "off"]
    assert main(["edit", *model, *editor, "--edits", edits, "--num-edits", "1", "--out", str(out)]) == 0
    (path,) = out.glob("*.safetensors")
    assert main(["export", str(path), *model, "--format", "peft", "--out", str(tmp_path / "a")]) == 2
    assert "merged" in capsys.readouterr().err
    other = ["--pretrained", str(save_tiny(tmp_path, "llama", seed=1)), "--device", "cpu"]
    assert main(["export", str(path), *other, "--format", "merged", "--out", str(tmp_path / "b")]) == 2
    assert "another model" in capsys.readouterr().err
    assert not (tmp_path / "a").exists() and not (tmp_path / "b").exists()


def test_a_batch_size_without_a_stream_is_refused(capsys):
    assert main(["edit", "--editor", "rome", "--edits", "x.jsonl", "--out", "y", "--edit-batch-size", "2"]) == 2
    assert "--sequential" in capsys.readouterr().err


@pytest.mark.parametrize("grouping", [[], ["--sequential"]])
def test_files_that_are_passed_on_name_no_folder_of_this_machine(edits, tmp_path, grouping, capsys):
    """And another place of the model is the same model, another model under the same name is not."""
    here, there = save_tiny(tmp_path / "secret", "llama"), tmp_path / "there/model"
    corpus = tmp_path / "secret/corpus.txt"
    corpus.write_text("The train stops at the harbor. " * 20, encoding="utf-8")
    settings = ["--editor-args", f"layers:[1];num_steps:2;moment_length:8;second_moments:{corpus}"]
    model = ["--pretrained", str(here), "--device", "cpu"]
    words = ["--editor", "memit", *settings, "--edits", edits, "--num-edits", "1", "--store", "off", *grouping]
    assert main(["edit", *model, *words, "--out", str(tmp_path / "edits")]) == 0
    for file_format in ("peft", "merged"):
        out = ["--format", file_format, "--out", str(tmp_path / file_format)]
        assert main(["export", str(tmp_path / "edits"), *model, *out]) == 0
    written = [path for name in ("edits", "peft", "merged") for path in (tmp_path / name).rglob("*") if path.is_file()]
    assert len(written) > 6
    for path in written:
        assert str(tmp_path).encode() not in path.read_bytes(), path
    (saved,) = (tmp_path / "edits").glob("*.safetensors")
    meta = Delta.load(saved).meta
    assert meta["model_name"] == here.name and meta["config"]["second_moments"] == "corpus.txt"
    assert meta["config"]["moment_digest"]
    shutil.move(here, there)
    for edit in (saved, tmp_path / "peft"):
        EditedHFLM(pretrained=str(there), load_edit=str(edit), device="cpu", store="off").session.result_metadata()
    other = save_tiny(tmp_path / "secret", "llama", num_hidden_layers=4)
    with pytest.raises(EditingError, match=r"other weights|another model|no module|differ"):
        EditedHFLM(pretrained=str(other), load_edit=str(saved), device="cpu", store="off").session.result_metadata()


@pytest.mark.parametrize(("base", "recorded"), [("org/model", "org/model"), (None, None), ("HERE", None)])
def test_an_adapter_names_its_base_model_by_hub_id_only(tiny_model, tmp_path, base, recorded):
    delta = random_delta(tiny_model("llama"), seed=0)
    export_peft(delta, tmp_path / "adapter", base_model=str(tmp_path) if base == "HERE" else base)
    config = json.loads((tmp_path / "adapter/adapter_config.json").read_text(encoding="utf-8"))
    assert config["base_model_name_or_path"] == recorded


def test_an_adapter_of_smaller_rank_shows_its_error(model, edits, tmp_path, capsys):
    """Four edits have rank 4 together; the error is on their own targets and on neutral prompts."""
    settings, out = str(write_settings(tmp_path / "fast.yaml")), tmp_path / "edits"
    command = ["edit", *model, "--editor", "r_rome", "--editor-args", settings, "--edits", edits, "--sequential"]
    assert main([*command, "--store", "off", "--out", str(out)]) == 0
    capsys.readouterr()
    files = [str(path) for path in sorted(out.glob("*.safetensors"))]
    whole, small = tmp_path / "whole", tmp_path / "small"
    assert main(["export", *files, *model, "--format", "peft", "--out", str(whole)]) == 0
    text = capsys.readouterr().out
    origin = json.loads((whole / "edit_origin.json").read_text())
    assert "truncated" not in text and "rank 4: within vLLM's default limit of 16" in text
    assert f"--lora-modules {origin['name']}={whole}" in text and origin["name"].startswith("r_rome-")

    assert main(["export", *files, *model, "--format", "peft", "--rank", "1", "--out", str(small)]) == 0
    text = capsys.readouterr().out
    assert json.loads((small / "adapter_config.json").read_text())["r"] == 1
    assert "truncated from rank 4 to 1: up to " in text and "rank 1: within" in text
    nlls, divergences = (
        [float(word) for word in line.replace(",", "").split() if word[0].isdigit()]
        for line in text.splitlines()
        if " whole, " in line
    )
    assert nlls[0] < nlls[1] and divergences[0] != divergences[1]
    assert origin["name"] != json.loads((small / "edit_origin.json").read_text())["name"]

    assert main(["export", *files, *model, "--format", "merged", "--rank", "1", "--out", str(tmp_path / "no")]) == 2
    assert "--rank 1 is for an adapter" in capsys.readouterr().err
