"""``lm-edit tune``: its table, the file it writes, and its errors."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from command_line import printed_lines, run_verb, split_cells
from mend_runs import trainer
from model_shapes import MODELS, model_like
from record_files import write_jsonl
from transformers import AutoModelForCausalLM, AutoTokenizer
from tuning_cases import CASES, start_at

from edit_hooks import load_editor
from edit_hooks.contract.tiny_models import CONTEXT_TEMPLATES, build_model
from edit_hooks.lm.options.editing import EditingOptions
from lm_edit.cli.editing.tune import _own_settings
from lm_edit.cli.main import main
from lm_edit.tuning.trials import FactScore
from lm_eval_tasks.common.records.cases import Case


@pytest.fixture
def run(tiny_path, tmp_path):
    """Run a small search that writes its best settings to a file; returns the exit code."""

    def run_verb(out: Path) -> int:
        model = ["--pretrained", str(tiny_path("llama")), "--device", "cpu", "--store", str(tmp_path / "store")]
        facts = ["--edits", "bake", "--data", "mini", "--num-edits", "3", "--skip", "2"]
        vary = ["--layers", "0", "1", "--lr", "0.5", "--clamp", "4", "50", "--vary", "kl_factor=0;0.1"]
        shared = ["--editor-args", f"num_steps:3;context_templates:{json.dumps(CONTEXT_TEMPLATES[:1])}"]
        return main(["tune", *model, "--editor", "r_rome", *facts, *vary, *shared, "--trials", "4", "--out", str(out)])

    return run_verb


def test_a_search_prints_a_table(run, tmp_path, capsys):
    out = tmp_path / "best.yaml"
    code = run(out)
    lines = printed_lines(capsys)
    bound, seconds, header, *lines = lines
    assert re.fullmatch(r"at most \d+ edits", bound) and re.fullmatch(r"\S+ s per edit .*: at most \d+ s", seconds)
    assert header.split()[:6] == ["layers", "score", "efficacy", "paraphrase", "neighborhood", "stability"]
    rows = [split_cells(line) for line in lines[:4]]
    assert all(re.fullmatch(r"\[\d\]", row[0]) for row in rows)
    assert any(line.endswith("at its defaults") for line in lines[:4]), "nothing is shipped for a tiny model"
    assert lines[4].endswith("unedited") and split_cells(lines[4])[:2] == ["-", "0.000"]
    best = float(rows[0][1])
    assert (code, out.exists()) == ((0, True) if best > 0 else (1, False))  # a random model may learn nothing at all


def test_the_best_settings_are_accepted_as_editor_args(run, tmp_path, capsys, monkeypatch):
    def score(_self, editor, cases):
        config = editor.default_config(_self.model)
        value = 0.9 if config.layers == [0] else 0.2
        return [FactScore(value, value, value, config.kl_factor) for _ in cases]

    monkeypatch.setattr("lm_edit.tuning.trials.TrialRunner._score_cases", score)
    out = tmp_path / "best.yaml"
    assert run(out) == 0
    lines = printed_lines(capsys)
    (header,) = (number for number, line in enumerate(lines) if line.startswith("layers"))
    assert lines[header + 1].split()[:2] == ["[0]", "0.900"] and lines[-1].startswith(f"written to {out}")
    text = out.read_text()
    facts = "2 facts (1 more were known to the unedited model and left out) of bake (data=mini) from number 2 on"
    assert text.startswith("# r_rome for ") and f"best of lm-edit tune on {facts}, score 0.900" in text
    options = EditingOptions(editor="r_rome", editor_args=str(out))
    config = load_editor("r_rome", options.overrides).default_config(build_model("llama"))
    assert (config.layers, config.lr, config.num_steps) == ([0], 0.5, 3)


@pytest.mark.parametrize(
    ("arguments", "order", "place"),
    [
        (("--subset", "20", "--subset-seed", "7"), ", subset=20, subset_seed=7", "from number 0 on"),
        (("--subset-seed", "7", "--skip", "2"), ", subset=all, subset_seed=7", "from number 2 on"),
        (("--subset", "20", "--last"), ", subset=20, subset_seed=0", "at the end"),
    ],
)
def test_the_file_says_which_facts_and_which_weights(tiny_path, tmp_path, capsys, monkeypatch, arguments, order, place):
    """A subset had the place of its facts without the order that the place is in."""
    seen = []

    def assemble(_self, cases, deltas):
        seen.extend(case.request.case_id for case in cases)
        return [FactScore(float(delta is not None), None, 1.0, 0.1, before=0.0) for delta in deltas]

    monkeypatch.setattr("lm_edit.tuning.trials.TrialRunner._assemble", assemble)
    out, path = tmp_path / "best.yaml", tiny_path("llama")
    model = ["--pretrained", str(path), "--revision", "main", "--dtype", "float64", "--device", "cpu", "--store", "off"]
    facts = ["--edits", "bake", "--data", "mini", "--num-edits", "3", *arguments]
    candidates = ["--layers", "1", "--lr", "0.1", "--editor-args", "num_steps:1"]
    assert main(["tune", *model, "--editor", "ft_m", *facts, *candidates, "--out", str(out)]) == 0
    origin, listed = [line for line in out.read_text().splitlines() if line.startswith("#")]
    assert origin.startswith(f"# ft_m for {path} (revision=main, dtype=float64): best of lm-edit tune on 3 facts ")
    assert f" of bake (data=mini{order}) {place}, score 1.000" in origin
    assert listed == "# Facts: " + ", ".join(f"case {case_id}" for case_id in dict.fromkeys(seen))


@pytest.mark.parametrize(
    ("arguments", "in_file", "hint"),
    [
        (("--seed", "3"), None, ",seed=3"),
        (("--seed", "3", "--editor-args", "num_steps:1;seed:5"), 5, ""),
        (("--editor-args", "num_steps:1;seed:0"), 0, ""),
        ((), None, ""),
    ],
)
def test_a_seed_belongs_to_the_result(tune_file, tmp_path, capsys, arguments, in_file, hint):
    """Neither the file nor the printed use of it had one, so the run was another than the search's."""
    out = tmp_path / "best.yaml"
    more = ("--lr", "0.05", "--layers", "1", "--grid", "--out", str(out))
    assert tune_file(CASES, "ft_m", *arguments, *more) == 0
    assert yaml.safe_load(out.read_text()).get("seed") == in_file
    assert printed_lines(capsys)[-1].endswith(f"editor=ft_m,editor_args={out}{hint}, on other facts")
    assert ("seed=3" in out.read_text()) == bool(hint)


@pytest.fixture
def tune_file(tiny_path, tmp_path):
    """Run a search on facts of a file; returns the exit code."""

    def tune(cases, editor: str, *arguments: str) -> int:
        rows = [
            {
                **case.request.to_dict(),
                "rephrase_prompt": [question.prompt for question in case.paraphrases],
                "locality_prompt": [question.prompt for question in case.neighbors],
                "locality_ground_truth": [question.wanted for question in case.neighbors],
            }
            for case in cases
        ]
        path = write_jsonl(tmp_path / "facts.jsonl", rows)
        model = ["--pretrained", str(tiny_path("llama")), "--device", "cpu", "--store", "off"]
        facts = ["--edits", str(path), "--num-edits", str(len(cases))]
        return main(["tune", *model, "--editor", editor, *facts, *arguments])

    return tune


def test_layers_and_a_step_in_editor_args_are_not_searched(tune_file, capsys):
    tune_file(CASES[:1], "ft_m", "--editor-args", "layers:[1];lr:0.01;num_steps:1")
    said, bound, _, header, row, *_ = printed_lines(capsys)
    assert (said, bound) == ("as in --editor-args, not searched: layers, lr", "at most 1 edits")
    assert header.startswith("layers") and row.startswith("[1]") and "lr:0.01; num_steps:1" in row


def test_own_settings_are_named_by_their_origin():
    """They were "as shipped" for models for which nothing is."""
    shipped, other = model_like(MODELS["gpt2-xl"]), build_model("llama")
    assert _own_settings("rome", {}, shipped) == "as shipped"
    assert _own_settings("rome", {}, other) == "at its defaults"


def test_a_trained_network_leaves_nothing_to_search_and_a_line_says_so(tune_file, tiny_path, tmp_path, capsys):
    model, tokenizer = (cls.from_pretrained(tiny_path("llama")) for cls in (AutoModelForCausalLM, AutoTokenizer))
    trainer(model, tokenizer, tmp_path / "net", num_steps=1, validate_every=1, rank=2).run()
    tune_file(CASES[:1], "mend", "--editor-args", f"artifact:{tmp_path / 'net'}")
    printed = printed_lines(capsys)
    assert printed[:3] == [
        "edit_lr is not searched: the other settings fix it at 0.01",
        "one candidate is left, so the score below is all; --vary adds others",
        "at most 1 edits",
    ]


def test_the_step_that_was_found_is_said(tune_file, capsys, monkeypatch):
    start_at(5e-6, monkeypatch)
    assert tune_file(CASES, "ft_m", "--editor-args", "num_steps:4", "--layers", "1") == 0
    bound, _, *lines = printed_lines(capsys)
    assert re.fullmatch(r"at most \d+ edits: 18 to find a step that takes, \d+ to search around it", bound)
    (step,) = (line for line in lines if line.startswith("step: lr "))
    assert float(step.split()[2].rstrip(",")) >= 1e-3 and "5e-06 (0.00)" in step
    assert lines[-1] == "1 of 3 facts have no paraphrases; that column is of the others"


def test_one_trial_is_the_step_that_was_found(tune_file, tmp_path, capsys, monkeypatch):
    """It was the shipped settings, and the command ended with code 1 and without a reason."""
    start_at(5e-6, monkeypatch)
    out = tmp_path / "best.yaml"
    arguments = ("--editor-args", "num_steps:4", "--layers", "1", "--trials", "1", "--out", str(out))
    assert tune_file(CASES, "ft_m", *arguments) == 0
    (step,) = (line for line in printed_lines(capsys) if line.startswith("step: lr "))
    assert yaml.safe_load(out.read_text())["lr"] == float(step.split()[2].rstrip(","))


def test_a_search_without_a_result_says_why_also_where_a_step_takes(tune_file, tmp_path, capsys, monkeypatch):
    """On the two facts of the walk it takes, on all of them it does not."""

    def run(_self, trial, cases):
        walk = len(cases) == 2
        for case in cases:
            trial.facts[case.request.key] = FactScore(float(walk), None, 1.0, 0.1, stability=0.9)

    monkeypatch.setattr("lm_edit.tuning.trials.TrialRunner.run", run)
    out = tmp_path / "best.yaml"
    assert tune_file(CASES, "ft_m", "--grid", "--out", str(out)) == 1 and not out.exists()
    lines = printed_lines(capsys)
    assert any(line.startswith("step: lr ") for line in lines)
    assert "no candidate takes: the new answers gain nothing over the unedited model; nothing is written" in lines


def test_facts_that_were_left_out_are_named_and_not_counted(tune_file, tmp_path, capsys, monkeypatch):
    """Neither in the table nor in the file."""
    known = CASES[1].request

    def assemble(_self, cases, deltas):
        edited = [delta is not None for delta in deltas]
        before = [1.0 if case.request.key == known.key else 0.0 for case in cases]
        return [
            FactScore(float(made) or start, None, 1.0, 0.1, before=start)
            for made, start in zip(edited, before, strict=True)
        ]

    monkeypatch.setattr("lm_edit.tuning.trials.TrialRunner._assemble", assemble)
    out = tmp_path / "best.yaml"
    arguments = ("--editor-args", "num_steps:1", "--lr", "0.1", "--layers", "1", "--out", str(out))
    assert tune_file(CASES, "ft_m", *arguments) == 0
    lines = printed_lines(capsys)
    rows = [split_cells(line) for line in lines if line.startswith("[1]")]
    assert rows and {row[7] for row in rows} == {"2"}
    (note,) = (line for line in lines if line.startswith("left out: 1 facts"))
    assert note.endswith("the unedited model gives already: case 1")  # its row
    header, listed = (line for line in out.read_text().splitlines() if line.startswith("#"))
    assert listed == "# Facts: case 0, case 2"
    assert "best of lm-edit tune on 2 facts (1 more were known to the unedited model and left out) of " in header


def test_a_search_without_paraphrases_says_so(tune_file, capsys):
    case = Case(CASES[0].request, [], CASES[0].neighbors)
    tune_file([case], "ft_m", "--editor-args", "num_steps:1", "--lr", "0.1", "--layers", "1")
    assert "no fact has paraphrases: the score says nothing about generalization (GS)" in printed_lines(capsys)


def test_a_search_in_which_all_candidates_fail_says_so(tune_file, capsys):
    cases = [CASES[1]]  # without the old answer, which kn needs
    assert tune_file(cases, "kn", "--editor-args", "num_steps:2", "--layers", "1") == 1
    lines = printed_lines(capsys)
    assert lines[-2].startswith("every candidate failed") or lines[-1].startswith("every candidate failed")
    assert any("has no 'target_true'" in line for line in lines)


def test_an_editor_that_nothing_makes_take_ends_with_the_reason(tune_file, tmp_path, capsys):
    out = tmp_path / "best.yaml"
    arguments = ("--editor-args", "num_steps:2", "--out", str(out))
    assert tune_file(CASES, "broken_editors:Effect", *arguments) == 1 and not out.exists()
    (line,) = (line for line in printed_lines(capsys) if line.startswith("no lr from 0.0005 to "))
    assert "makes broken_editors:Effect take" in line and line.endswith("nothing is written")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--layers", "a"], "3,4,5 4,5,6"),
        (["--vary", "lr"], "name=value;value"),
        (["--num-edits", "1000"], "has 64 facts"),
        (["--trials", "0"], "argument --trials: '0' is not accepted; a positive"),
        (["--skip", "-1"], "argument --skip: '-1' is not accepted"),
        (["--skip", "60", "--last"], "has 4 facts after --skip 60"),
    ],
)
def test_mistakes_are_explained(tmp_path, capsys, arguments, message):
    """Before the model is loaded."""
    model = ["--pretrained", str(tmp_path / "nowhere")]
    assert run_verb(["tune", *model, "--editor", "r_rome", "--edits", "bake", "--data", "mini", *arguments]) == 2
    assert message in capsys.readouterr().err
