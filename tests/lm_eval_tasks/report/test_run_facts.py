"""Names of runs: editor, mode, settings, data and model, for folders, files and hub pushes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lm_eval
import pytest
from lm_eval.loggers import EvaluationTracker
from lm_runs import FAST, build, run
from paths import RECORDS
from result_files import EDITING
from saved_results import evaluate_here
from task_managers import task_manager

import lm_eval_editing_autoload
from edit_hooks import EditingError
from lm_eval_tasks.report.portable import portable
from lm_eval_tasks.report.run_facts import run_facts
from lm_eval_tasks.report.run_options import check_task_settings
from lm_eval_tasks.startup.evaluation import look_for_anomalies, name_run_folder

lm_eval_editing_autoload.install()


def results(model_args: Any = "pretrained=org/tiny", data: str = "mini", **editing: Any) -> dict[str, Any]:
    metadata = {"data_source": {"data": data}}
    config = {"model": "edited_hf", "model_args": model_args, "edited_hf": EDITING | editing}
    return {"config": config, "configs": {"bake_es": {"metadata": metadata}}}


def name(**options: Any) -> str:
    return run_facts(results(**options)).name


def test_names_tell_runs_apart() -> None:
    settings = run_facts(results()).settings
    assert name() == f"r_rome__single__{settings}__mini__org-tiny"
    assert name(mode="none", editor=None, editor_config=None) == "unedited__mini__org-tiny"
    sized = name(mode="sequential", num_edits=100, edit_batch_size=10, seed=3, icl="ike")
    assert sized == f"r_rome__sequential-100by10-icl=ike-seed=3__{settings}__mini__org-tiny"
    assert name(demo=True).endswith("__gemma-3-270m-demo")
    assert name(editor_config={"layers": [6]}) != name()


def test_settings_are_those_besides_the_seed() -> None:
    """Runs of several seeds have the same settings; a seed among an editor's settings is the run's."""
    one, other = (run_facts(results(editor_config={"layers": [5], "seed": seed}, seed=0)) for seed in (0, 7))
    assert one.settings == other.settings and (one.seed, other.seed) == (0, 7) and one.run != other.run
    assert "-seed=7__" in other.name and "seed" not in one.name
    assert run_facts(results(editor_config={"layers": [6], "seed": 0})).settings != one.settings


def test_the_seed_of_a_post_processed_editor_is_no_setting_either() -> None:
    """Settings of rect hold those of memit, and those with a context on top hold both, each with the run's seed."""

    def facts(seed: int, keep: float = 0.4) -> Any:
        rect = {"keep": keep, "seed": seed, "base_settings": {"layers": [5], "seed": seed}}
        return run_facts(
            results(editor_config={"seed": seed, "base_settings": rect, "context_settings": {"seed": seed}})
        )

    assert facts(0).settings == facts(7).settings and facts(0).run != facts(7).run
    assert facts(0, keep=0.8).settings != facts(0).settings


def test_what_is_drawn_with_the_seed_is_no_setting() -> None:
    """Runs of two seeds have other context templates; what was given for them tells settings apart."""

    def facts(seed: int, given: str = "sampled_6", **editing: Any) -> Any:
        config = {"layers": [5], "seed": seed, "context_templates": ["{}", f"Text {seed}. {{}}"]}
        return run_facts(results(editor_config=config, drawn_settings={"context_templates": given}, **editing))

    def wrapped(seed: int, given: str = "sampled_6") -> Any:
        base = {"layers": [5], "seed": seed, "context_templates": [f"Text {seed}. {{}}"]}
        drawn = {"base_settings": {"context_templates": given}}
        return run_facts(
            results(editor_config={"keep": 0.4, "seed": seed, "base_settings": base}, drawn_settings=drawn)
        )

    for make in (facts, wrapped):
        assert make(0).settings == make(7).settings and make(0).run != make(7).run
        assert make(0, "sampled_21").settings != make(0).settings
    files = [facts(0, f"/{folder}/zsre.json").settings for folder in ("home/a", "mnt/b")]
    assert files[0] == files[1] != facts(0).settings


DRAWING = {
    "r_rome": {"context_templates": "sampled_6"},
    "rect": {"base": "rome", "base_settings": {"context_templates": "sampled_6", "second_moments": None}},
    "ultraedit": {},
    "wise": {"context_templates": "sampled_6", "loc_prompts": "{texts}", "num_loc_prompts": 1},
}


@pytest.mark.parametrize("editor", DRAWING)
def test_seeds_of_editors_that_draw_have_the_same_settings(editor: str, tiny_path: Any, tmp_path: Path) -> None:
    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(json.dumps({"loc": f"text {number}", "loc_ans": "b"}) + "\n" for number in range(40)))
    given = json.loads(json.dumps(DRAWING[editor]).replace("{texts}", str(texts)))

    def facts(seed: int, **changes: Any) -> Any:
        options = {"editor": editor, "editor_args": given | changes, "seed": seed, "store": str(tmp_path / "store")}
        lm = build(str(tiny_path("gpt2")), **options)
        return run_facts(results(**json.loads(json.dumps(lm.get_model_info()["edited_hf"]))))

    one, other, again = facts(0), facts(1), facts(0)
    assert one.editor_config != other.editor_config and one.run != other.run  # else nothing is drawn
    assert one.settings == other.settings and again.run == one.run
    assert facts(0, layers=[0]).settings != one.settings


@pytest.mark.parametrize("hostile", ["../../etc/passwd", "a/b\\c:d*?<>|", "\x1b[2J", "x" * 500, "-" * 9, "ü/ñ"])
def test_names_are_file_names(hostile: str) -> None:
    text = name(editor=hostile, data=hostile, model_args={"pretrained": hostile})
    assert text.isascii() and not set(text) & set('/\\:*?"<>|\x1b ') and len(text) < 250
    assert ".." not in text.split("__")


def test_identity_does_not_depend_on_folders_of_the_machine() -> None:
    one = results(model_args="pretrained=/home/a/tiny", data="/home/a/x.json", edits="/home/a/edits.json")
    other = results(model_args="pretrained=/mnt/b/tiny", data="/mnt/b/x.json", edits="/mnt/b/edits.json")
    assert run_facts(one).run == run_facts(other).run and run_facts(one).name == run_facts(other).name
    assert portable({"a": ["/x/y z.json", "</s>", "/", "a/b"]}) == {"a": ["y z.json", "</s>", "/", "a/b"]}


def test_chosen_samples_are_part_of_the_identity() -> None:
    """Two halves of a benchmark (``--samples``) are two runs; lm-eval does not record the choice itself."""

    def identity(model: dict[str, Any], samples: Any = None) -> str:
        one = results()
        one["config"] |= {**model, **({"samples": {"bake_es": samples}} if samples else {})}
        return run_facts(one).run

    for model in ({}, {"model": "hf", "edited_hf": None}):
        assert len({identity(model), identity(model, [0, 1]), identity(model, [2, 3])}) == 3


def test_simple_evaluate_records_the_chosen_samples(tiny_path: Any) -> None:
    lm = build(str(tiny_path("llama")), mode="none", editor_args=None)
    found = run(lm, ["bake_es"], samples={"bake_es": [1]})
    assert found["config"]["samples"] == {"bake_es": [1]} and len(found["samples"]["bake_es"]) == 1
    assert "samples" not in run(lm, ["bake_es"], limit=1)["config"]


def test_a_task_manager_that_lacks_the_models_settings_is_refused(tiny_path: Any, tmp_path: Path) -> None:
    """Its tasks would ask about the embedded sample while the model edits the user's file."""
    arguments = {"pretrained": str(tiny_path("llama")), "mode": "none", "device": "cpu", "store": "off"}
    arguments |= {"data": str(RECORDS / "bake_qa.jsonl"), "subset": 2}

    def evaluate(metadata: dict[str, Any], **changes: Any) -> Any:
        return lm_eval.simple_evaluate(
            model="edited_hf", model_args=arguments | changes, tasks=["bake_es"], task_manager=task_manager(metadata)
        )

    with pytest.raises(EditingError, match=r"tasks of this task_manager do not know data.*metadata=<model_args"):
        evaluate({})
    with pytest.raises(EditingError, match=r"the model has subset=2, and the tasks .* have subset=3"):
        evaluate(arguments | {"subset": 3})
    source = evaluate(arguments)["configs"]["bake_es"]["metadata"]["data_source"]
    assert source["subset"] == 2 and source["data"].endswith("bake_qa.jsonl")


def test_the_settings_of_model_and_task_manager_are_compared_as_they_were_given() -> None:
    bake = task_manager({"data": "mini"}).load(["bake_es"])["tasks"].values()
    for arguments in ("pretrained=x,mode=none", "pretrained=x,data=y", "mode=sequential,checkpoints=2"):
        check_task_settings(arguments, None, [object()])  # tasks of lm-eval read no such settings
    check_task_settings("pretrained=x,data=mini,mode=none", {"data": "mini"}, bake)
    check_task_settings("pretrained=x,mode=none", {"data": "mini"}, bake)
    given = "pretrained=x,data=hub,qaedit_set=inter_1k,subset=2"  # a task replaces data by hub:inter_1k in its own
    check_task_settings(given, {"data": "hub", "qaedit_set": "inter_1k", "subset": 2}, bake)
    for arguments, lacking in (("mode=sequential,checkpoints=2", "mode"), ("pretrained=x", "pretrained")):
        with pytest.raises(EditingError, match=f"do not know {lacking}:"):
            check_task_settings(arguments, None, bake)


def test_lm_eval_writes_files_under_the_name(tmp_path: Path, tiny_path: Any) -> None:
    model = tiny_path("gpt2")
    settings = ";".join(f"{key}:{value}" for key, value in FAST.items() if key == "num_steps")
    evaluate_here(
        tmp_path,
        f"pretrained={model},editor=ft_m,editor_args={settings},store=off",
        ["bake_es"],
        RECORDS / "bake_qa.jsonl",
        limit=1,
    )
    (folder,) = tmp_path.iterdir()
    (path,) = folder.glob("results_*.json")
    content = json.loads(path.read_text(encoding="utf-8"))
    facts = run_facts(content)
    assert folder.name == content["model_name"] == facts.name, "also in memory, before objects become texts"
    assert folder.name.startswith("ft_m__single__") and list(folder.glob("samples_bake_es_*.jsonl"))


def test_a_failure_to_name_does_not_cost_the_results(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:

    tracker = EvaluationTracker()
    name_run_folder(tracker, {"config": {"edited_hf": {}}})
    assert "could not name the folder" in capsys.readouterr().err
    assert tracker.general_config_tracker.model_name is None


def test_a_failure_to_find_anomalies_does_not_cost_the_results(capsys: Any) -> None:
    look_for_anomalies({"config": {"edited_hf": {"mode": "single"}}, "results": {"task": None}})
    assert "could not look for anomalies" in capsys.readouterr().err


def test_the_content_of_a_file_of_edits_is_recorded(tmp_path: Path, tiny_path: Any) -> None:
    path = tmp_path / "edits.jsonl"

    def facts(target: str) -> Any:
        request = {"prompt": "{} is in", "subject": "Alba Tower", "target_new": target}
        path.write_text(json.dumps(request), encoding="utf-8")
        options = {"editor": "ft_m", "mode": "batch", "edits": str(path), "editor_args": {"num_steps": 1}}
        editing = build(str(tiny_path("gpt2")), store="off", **options).get_model_info()["edited_hf"]
        return run_facts(results(**json.loads(json.dumps(editing))))

    one, other, again = facts("Rome"), facts("Oslo"), facts("Rome")
    assert one.run == again.run != other.run and one.name == other.name
    assert one.edits.startswith("edits.jsonl (") and one.edits != other.edits
