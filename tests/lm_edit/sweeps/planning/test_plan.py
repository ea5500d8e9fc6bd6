"""Plans: the grid that they stand for, and errors with file and line before anything runs."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from command_line import run_verb

from edit_hooks.lm.options.editing import EditingOptions
from edit_hooks.training.trainer import RESUME_NAME
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.storage.files import sha256_of
from edit_hooks.utils.storage.json_io import read_json
from lm_edit.sweeps.checking import tasks
from lm_edit.sweeps.checking.checks import check_plan
from lm_edit.sweeps.execution.runs import SETTINGS, command_of, prepare
from lm_edit.sweeps.planning import named_files
from lm_edit.sweeps.planning.grid import Grid, Run
from lm_edit.sweeps.planning.plan import load_plan


@pytest.fixture(autouse=True)
def _own_tasks_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """lm-eval's index of its own thousands of tasks, for unknown names, takes many seconds."""
    monkeypatch.setattr("lm_edit.sweeps.checking.tasks._all_tasks", tasks._own_tasks)


def write(folder: Path, text: str) -> Path:
    path = folder / "plan.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def expand(folder: Path, text: str) -> Grid:
    return check_plan(load_plan(write(folder, text)))


def names(grid: Grid) -> list[str]:
    return [run.name for run in grid.runs]


def test_every_combination_of_the_axes_is_a_run(tmp_path: Path) -> None:
    grid = expand(
        tmp_path,
        """
models: {small: {pretrained: a/b}, large: {pretrained: c/d, dtype: bfloat16}}
editors:
  - unedited
  - {editor: ft_m, editor_args: [{num_steps: 1}, {num_steps: 2}]}
benchmarks: [bake_es, qaedit_syn_reliability]
modes: [single, batch, sequential]
num_edits: [4, 8]
edit_batch_size: [1, 2]
icl: [false, true]
seeds: [0, 1]
""",
    )
    # Per model and benchmark: 1 unedited; per setting of ft_m 2 icl x 2 seeds x (1 single + 2 batch + 4 stream) = 28.
    assert len(grid.runs) == 2 * 2 * (1 + 2 * 28) and not grid.left_out
    assert len({run.folder_name for run in grid.runs}) == len(grid.runs) == len(set(names(grid)))
    (run,) = [
        r
        for r in grid.runs
        if r.name == "large, ft_m(num_steps=2), bake_es, sequential, 8 edits, steps of 2, icl, seed 1"
    ]
    assert run.model_args == {
        "pretrained": "c/d",
        "dtype": "bfloat16",
        "editor": "ft_m",
        "mode": "sequential",
        "seed": 1,
        "editor_args": {"num_steps": 2},
        "edits": "bake",
        "num_edits": 8,
        "edit_batch_size": 2,
        "icl": True,
    }


def test_tasks_with_the_same_edits_share_a_run(tmp_path: Path) -> None:
    grid = expand(tmp_path, "editors: [rome]\nbenchmarks: [bake_es, qaedit_syn_reliability, bake_gs]\n")
    assert [run.tasks for run in grid.runs] == [("bake_es", "bake_gs"), ("qaedit_syn_reliability",)]


def test_rules_leave_out_what_cannot_be_and_name_it(tmp_path: Path) -> None:
    grid = expand(
        tmp_path,
        """
editors: [rome, ike, memit]
benchmarks: [{tasks: [bake_es]}, {tasks: [editglue_sst2], edits: bake}]
modes: [single, {mode: batch, num_edits: 4}, {mode: sequential, num_edits: 4, edit_batch_size: [2, 8]}]
icl: [false, true]
""",
    )
    reasons: dict[str, int] = {}
    for left_out in grid.left_out:
        reasons[left_out.rule] = reasons.get(left_out.rule, 0) + 1
    # Two benchmarks, two values of icl. rome: 1 batch and 2 streams each: joint = 2 x 2 x 3 = 12.
    # ike with icl: 4 combinations of mode and size, two benchmarks: context = 8.
    # single without case edits: rome and memit 2 each, ike 1 (the other is "context"): 5.
    # steps of 8 in a stream of 4: memit 2 x 2 = 4, ike 2 (the others are "context"): 6.
    assert reasons == {"joint": 12, "context": 8, "no edits": 5, "steps": 6}
    assert len(grid.runs) == 3 * 2 * 2 * 4 - (12 + 8 + 5 + 6)


def test_a_step_size_depends_on_what_the_editor_can_write(tmp_path: Path) -> None:
    sizes = "{mode: sequential, edit_batch_size: {joint: 4, other: 1}}"
    text = f"editors: [rome, memit]\nbenchmarks: [bake_es]\nmodes: [{sizes}]\n"
    assert [run.model_args["edit_batch_size"] for run in expand(tmp_path, text).runs] == [1, 4]


def test_the_folder_depends_on_the_content_alone(tmp_path: Path) -> None:
    def folders(text: str) -> list[str]:
        return [run.folder_name for run in expand(tmp_path, text).runs]

    one = folders("editors: [{editor: rome, editor_args: 'num_steps:2'}]\nbenchmarks: [bake_es]\nlimit: 2\n")
    assert one == folders("limit: 2\nbenchmarks: [bake_es]\neditors: [{editor: rome, editor_args: {num_steps: 2}}]\n")
    (tmp_path / "own.yaml").write_text("num_steps: 2\n", encoding="utf-8")  # a file beside the plan
    assert one == folders("editors: [{editor: rome, editor_args: own.yaml}]\nbenchmarks: [bake_es]\nlimit: 2\n")
    for other in (
        "limit: 3",
        "limit: 2\nmetadata: {generate: false}",
        "limit: 2\nlm_eval: {apply_chat_template: true}",
    ):
        assert one != folders(
            f"editors: [{{editor: rome, editor_args: 'num_steps:2'}}]\nbenchmarks: [bake_es]\n{other}\n"
        )


@pytest.mark.parametrize(("limit", "options"), [("2", []), ("2", ["2"]), ("2.0", []), ("null", ["2.0"]), ("5", ["2"])])
def test_one_limit_has_one_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], limit: str, options: list[str]
) -> None:
    """Runs of `limit: 2` were repeated with `--limit 2`, which was 2.0; the folder is that of earlier versions."""
    plan = write(tmp_path, f"editors: [rome]\nbenchmarks: [bake_es]\nlimit: {limit}\n")
    folder = tmp_path / "out" / "demo-rome-bake_es-single-6598e15e6d1b"
    folder.mkdir(parents=True)
    (folder / "failed.json").write_text('{"reason": "a reason"}', encoding="utf-8")
    run_verb(
        ["sweep", str(plan), "--out", str(tmp_path / "out"), "--status", *(["--limit", *options] if options else [])]
    )
    printed = capsys.readouterr().out
    assert "a reason" in printed and "--retry executes failed runs again" in printed


def test_a_data_file_counts_by_its_content(tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    text = f"editors: [rome]\nbenchmarks: [bake_es]\nmodel_args: {{data: {data}}}\n"
    data.write_text("{}", encoding="utf-8")
    (before,) = expand(tmp_path, text).runs
    folder = before.folder_name
    data.write_text("{} ", encoding="utf-8")
    assert before.folder_name != folder


@pytest.mark.parametrize(
    "options",
    [
        "metadata: {judge: FILE}",
        "metadata: {judge: {prompt: [x, FILE]}}",
        "model_args: {tokenizer: FILE}",
        "editor_args: {artifact: FILE}",
        "model_args: {data: ~/named.txt}",
    ],
)
def test_every_file_that_an_option_names_counts_by_its_content(
    tmp_path: Path, options: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    named = tmp_path / "named.txt"
    named.write_text("one", encoding="utf-8")
    args = f", {options}" if options.startswith("editor_args") else ""
    text = f"editors: [{{editor: mend{args}}}]\nbenchmarks: [bake_es]\n{'' if args else options}\n"
    (run,) = expand(tmp_path, text.replace("FILE", str(named))).runs
    before = run.folder_name
    named.write_text("other", encoding="utf-8")
    assert run.folder_name != before
    named.unlink()
    assert run.content["files"] == {}


@pytest.mark.parametrize(
    ("options", "files"),
    [
        ("editor_args: {artifact: FOLDER}", ["hypernetwork.safetensors", "manifest.json"]),
        ("model_args: {load_edit: FOLDER}", ["edit-0.safetensors", "edits.json"]),
        ("model_args: {peft: FOLDER}", ["adapter_config.json", "adapter_model.safetensors"]),
        ("model_args: {pretrained: FOLDER}", ["config.json", "model.safetensors", "1_Pooling/config.json"]),
        ("model_args: {data: FOLDER}", ["QAEdit.json"]),
        ("metadata: {judge: {prompt: FOLDER}}", ["own/prompt.yaml"]),
    ],
)
def test_a_folder_that_an_option_names_counts_by_the_content_of_its_files(
    tmp_path: Path, options: str, files: list[str]
) -> None:
    """A sweep kept the results of a network that was trained again in its folder, and named its file's runs new."""
    folder = tmp_path / "named"
    for file in files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text("one", encoding="utf-8")
    place, _, rest = options.partition(": {")
    option = rest.partition(":")[0]
    run = run_with({place: {option: str(folder)}})
    before = run.folder_name
    for file in files:
        state = (folder / file).stat()
        (folder / file).write_text("two", encoding="utf-8")  # as long as before
        os.utime(folder / file, ns=(state.st_atime_ns, state.st_mtime_ns))  # as after rsync -t
        assert run.folder_name != before
        (folder / file).write_text("one", encoding="utf-8")
        assert run.folder_name == before
    (folder / "further.txt").write_text("", encoding="utf-8")
    assert run.folder_name != before


def run_with(options: dict[str, dict[str, Any]]) -> Run:
    """A run with options of one kind; nothing about it is checked."""
    args = {"editor": "rome", "mode": "single", **options.get("model_args", {})}
    if "editor_args" in options:
        args["editor_args"] = options["editor_args"]
    return Run("m", "rome", "b", "single", (), args, ("bake_es",), options.get("metadata", {}), None, {}, None, ())


@pytest.mark.parametrize("name", ["editor", "edits", "store", "cache_dir", "data"])
def test_a_folder_that_no_run_reads_does_not_count(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a clone of an editor's code beside the plan, and folders that runs write to."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mini").mkdir()
    (tmp_path / "mini" / "answers.sqlite").write_bytes(b"")
    (tmp_path / "art" / ".cache").mkdir(parents=True)
    (tmp_path / "art" / ".cache" / "lock").write_bytes(b"")
    (tmp_path / "art" / "checkpoint-100").mkdir()
    (tmp_path / "art" / "checkpoint-100" / "optimizer.pt").write_bytes(b"")
    (tmp_path / "art" / RESUME_NAME).write_bytes(b"")  # a training leaves it there
    assert run_with({"model_args": {name: "mini"}, "editor_args": {"artifact": "art"}}).content["files"] == {}


def test_digests_of_large_files_are_kept_between_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Local models have tens of gigabytes, and every command of a sweep needs the names of its runs."""
    monkeypatch.setenv("LM_EDIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(named_files, "LARGE", 2)
    weights = tmp_path / "model" / "model.safetensors"
    weights.parent.mkdir()
    weights.write_bytes(b"weights")
    run = run_with({"model_args": {"pretrained": str(weights.parent)}})
    read: list[Path] = []
    monkeypatch.setattr(named_files, "sha256_of", lambda path: read.append(path) or sha256_of(path))
    before = run.folder_name
    for _ in range(2):
        named_files._digest_of_version.cache_clear()  # as in a new process
        assert run.folder_name == before and len(read) == 1
    weights.write_bytes(b"WEIGHTS")
    assert run.folder_name != before and len(read) == 2


def test_the_dry_run_names_what_counts_by_its_content(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "own data"
    folder.mkdir()
    (folder / "bake.json").write_bytes(b"x" * 2_000_000)
    plan = write(tmp_path, f"editors: [rome]\nbenchmarks: [bake_es]\nmodel_args: {{data: '{folder}'}}\n")
    assert run_verb(["sweep", str(plan), "--out", str(tmp_path / "out"), "--dry-run"]) == 0
    assert f"part of the runs by its content: data: {folder} (1 file, 2.0 MB)" in capsys.readouterr().out


def test_the_folder_of_a_run_without_files_has_the_name_that_it_had(tmp_path: Path) -> None:
    long = "x" * 300  # no name of a file
    text = f"editors: [rome]\nbenchmarks: [bake_es]\nmetadata: {{judge: [{long}, ~no-such-user/x]}}\n"
    (run,) = expand(tmp_path, text).runs
    assert run.folder_name == "demo-rome-bake_es-single-8c82065ae742"
    data = tmp_path / "data.jsonl"
    data.write_text("{}", encoding="utf-8")
    (run,) = expand(tmp_path, f"editors: [rome]\nbenchmarks: [bake_es]\nmodel_args: {{data: {data}}}\n").runs
    assert list(run.content["files"]) == ["data"]


def test_the_name_of_an_editor_reaches_the_results_and_no_identity(tmp_path: Path) -> None:
    """Tables named an editor of one's own by its class, whatever its name in the plan."""
    settings = "editor_args: [{num_steps: 2}, {num_steps: 3}]"
    entries = (f"[{{editor: rome, {settings}}}]", f"[{{editor: rome, name: mine, {settings}}}]")
    plain, named = (expand(tmp_path, f"editors: {entry}\nbenchmarks: [bake_es]\n").runs for entry in entries)
    assert [run.label for run in plain] == [None, None]
    assert [run.label for run in named] == ["mine(num_steps=2)", "mine(num_steps=3)"]
    assert [run.content for run in plain] == [run.content for run in named]
    saved = read_json(prepare(tmp_path, named[0]) / SETTINGS)
    args = json.loads(command_of(saved, Path("out"))[9])
    assert EditingOptions(**args).editor_label == "mine(num_steps=2)"
    assert "editor_label" not in read_json(prepare(tmp_path, plain[0]) / SETTINGS)


def test_the_name_of_a_model_reaches_the_results_if_it_is_another_one(tmp_path: Path) -> None:
    models = "{tiny: {pretrained: org/tiny}, small: {pretrained: org/tiny, revision: x}, demo: {}}"
    runs = expand(tmp_path, f"editors: [rome]\nbenchmarks: [bake_es]\nmodels: {models}\n").runs
    assert [run.labels for run in runs] == [{}, {"model_label": "small"}, {"model_label": "demo"}]
    args = json.loads(command_of(read_json(prepare(tmp_path, runs[1]) / SETTINGS), Path("out"))[9])
    assert EditingOptions(**{name: args[name] for name in ("model_label",)}).model_label == "small"
    assert "model_label" not in runs[1].content["model_args"]


def test_the_command_passes_everything(tmp_path: Path) -> None:
    (run,) = expand(
        tmp_path,
        "editors: [rome]\nbenchmarks: [bake_es]\nlimit: 0.5\nmetadata: {generate: false}\n"
        "lm_eval: {apply_chat_template: true, system_instruction: Be brief., gen_kwargs: {temperature: 0}}\n",
    ).runs
    command = command_of({**run.content, "tasks": list(run.tasks)}, Path("out"))
    assert command[1:7] == ["-m", "lm_eval", "run", "--model", "edited_hf", "--tasks"]
    assert command[7:] == [
        *("bake_es", "--model_args", '{"editor": "rome", "mode": "single", "seed": 0}'),
        *("--metadata", '{"generate": false}', "--limit", "0.5", "--apply_chat_template"),
        *("--system_instruction", "Be brief.", "--gen_kwargs", '{"temperature": 0}'),
        *("--output_path", "out", "--log_samples"),
    ]


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("editors: [rome]\nbenchmarks: [bake_es]\neditor: rome\n", 3, "Did you mean 'editors'"),
        (
            "editors: [rome]\nbenchmarks:\n  - {tasks: [bake_es], data: mini}\n",
            3,
            "data: options of edited_hf; write them under model_args",
        ),
        ("editors:\n  - rome\n  - rmoe\nbenchmarks: [bake_es]\n", 3, "Did you mean 'rome'"),
        ("editors: [rome]\nbenchmarks:\n  - bake_es\n  - bake_esx\n", 4, "Did you mean 'bake_es'"),
        ("editors:\n  - {editor: rome, editor_args: {num_stepps: 3}}\nbenchmarks: [bake_es]\n", 2, "num_steps"),
        ("editors: [rome]\nbenchmarks: [bake_es]\nmodel_args:\n  dtyp: float32\n", 4, "Did you mean 'dtype'"),
        ("editors: [rome]\nbenchmarks: [bake_es]\nmetadata:\n  generat: false\n", 4, "Did you mean 'generate'"),
        (
            "editors: [rome]\nbenchmarks:\n  - tasks: [bake_es]\n    metadata: {judge_template: odd}\n",
            1,
            "judge_template",
        ),
        ("editors: [rome]\nbenchmarks: [bake_es]\nmodes:\n  - sequntial\n", 4, "Did you mean 'sequential'"),
        ("editors: [rome]\nbenchmarks: [bake_es]\nmodes:\n  - mode: single\n    num_edits: 3\n", 5, "no meaning"),
        (
            "editors: [memit]\nbenchmarks: [bake_es]\nmodes:\n  - {mode: batch, checkpoints: 3}\n",
            1,
            "no meaning in mode=batch",
        ),
        ("editors: [rome]\nbenchmarks: [bake_es]\nmodel_args:\n  seed: 3\n", 4, "give it as seeds"),
        ("editors: [rome]\nbenchmarks: [bake_es]\nmodel_args:\n  editor_label: x\n", 4, "name of an entry of editors"),
        (
            "editors: [rome]\nbenchmarks: [bake_es]\nmodes:\n  - {mode: batch, edits: bake}\n",
            4,
            "give it in an entry of benchmarks",
        ),
        ("editors: [rome]\nbenchmarks: [bake_es]\nnum_edits: [3, x]\n", 3, "a whole number >= 1"),
        ("editors: [rome]\nbenchmarks: [wild_table3]\nmodes: [sequential]\n", 2, "those of qaedit and zsre and"),
        ("editors: [rome]\nbenchmarks: [editglue_sst2]\nmodes: [sequential]\n", 2, "none of their own"),
        ("editors: [rome]\nbenchmarks:\n  - {tasks: [editglue_sst2], edits: baek}\n", 3, "Did you mean 'bake'"),
        (
            "editors: [memit]\nmodes: [{mode: batch, group_size: 2}]\nnum_edits: [4]\n"
            "benchmarks:\n  - {tasks: [editglue_sst2], edits: bake}\n",
            1,
            "group_size=2 gives every group of cases a model of its own",
        ),
        ("editors: [rome, rome]\nbenchmarks: [bake_es]\n", 1, "'rome' twice"),
        ("editors: [{editor: rome, models: [demon]}]\nbenchmarks: [bake_es]\n", 1, "Did you mean 'demo'"),
        ("editors: [rome]\nbenchmarks: [bake_es]\nresources: {memory: much}\n", 3, "not readable"),
        ("editors: [rome]\nbenchmarks: [bake_es]\nicl: [maybe]\n", 1, "icl='maybe' is not known"),
        (
            "editors: [rome]\nbenchmarks: [bake_es]\nmodels:\n  m: {pretrained: a/b, shape: gpt3}\n",
            4,
            "shape is 'gpt3'",
        ),
        ("editors: [{editor: unedited, editor_args: {lr: 1}}]\nbenchmarks: [bake_es]\n", 1, "drop them"),
        ("editors: [rome]\nbenchmarks: [bake_es]\nmodel_args:\n  token: hf_x\n", 4, "set HF_TOKEN"),
        ("editors: [rome]\nbenchmarks: [bake_es]\nwithout:\n  newer: [memti]\n", 4, "Did you mean 'memit'"),
        ("editors: [rome]\nbenchmarks: [bake_es]\nwithout:\n  newer: [memit, rome]\n", 4, "include 'rome'"),
        ("editors: [rome]\nbenchmarks: [bake_es]\nwithout:\n  newer: [3]\n", 4, "names of editors is needed"),
        ("benchmarks: [bake_es]\n", 1, "no editors"),
        ("editors: []\nbenchmarks: [bake_es]\n", 1, "the list is empty"),
    ],
)
def test_mistakes_are_named_with_their_line(
    text: str, line: int, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    path = write(tmp_path, text)
    monkeypatch.setattr("lm_edit.cli.evaluating.sweep.execute", lambda *_: pytest.fail("the sweep began"))
    assert run_verb(["sweep", str(path)]) == 2
    printed = capsys.readouterr().err
    assert f"plan.yaml, line {line}: " in printed and message in printed


@pytest.mark.parametrize(
    ("editor", "message"),
    [
        ("mend", "run lm-edit train mend"),
        ("serac", "run lm-edit train serac"),
        ("{editor: serac, editor_args: {artifact: missing}}", "no trained"),
        ("{editor: alphaedit, editor_args: {projectors: missing.safetensors}}", "there is no such file"),
        ("{editor: rect, editor_args: {base_settings: {second_moments: missing.txt}}}", "missing.txt"),
        ("{editor: ike, editor_args: {pool: missing.json}}", "missing.json"),
        ("{editor: my_editor:MyEditor, name: mine, editor_args: {layers: [99]}}", "99"),
    ],
)
@pytest.mark.parametrize("options", [["--dry-run"], []])
def test_missing_inputs_of_editors_are_found_before_a_run(
    editor: str, message: str, options: list[str], tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The dry run accepted an editor without its trained network, and every run of it failed."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[4] / "docs" / "templates" / "editor"))
    monkeypatch.setattr("lm_edit.cli.evaluating.sweep.execute", lambda *_: pytest.fail("the sweep began"))
    path = write(tmp_path, f"editors: [r_rome, '{editor}']\nbenchmarks: [bake_es]\n".replace("'", ""))
    assert run_verb(["sweep", str(path), "--out", str(tmp_path / "out"), *options]) == 2
    shown, printed = capsys.readouterr()
    assert "plan.yaml, line 1: run demo, " in printed and message in printed
    if message != "99":  # the table itself resolves the layers
        assert ("2 runs" in shown) == bool(options)  # a dry run shows the plan first


def test_the_context_of_a_run_is_checked_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(
        tmp_path, "editors: [rome]\nbenchmarks: [bake_es]\nicl: [true]\nmodel_args: {icl_args: {pool: no.json}}\n"
    )
    assert run_verb(["sweep", str(path), "--out", str(tmp_path / "out"), "--dry-run"]) == 2
    assert "no.json" in capsys.readouterr().err


def test_states_are_shown_where_an_input_is_no_longer_there(tmp_path: Path) -> None:
    path = write(tmp_path, "editors: [mend]\nbenchmarks: [bake_es]\n")
    assert run_verb(["sweep", str(path), "--out", str(tmp_path / "out"), "--status"]) == 0


def test_a_plan_without_a_run_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, "editors: [rome]\nbenchmarks: [bake_es]\nmodes: [batch]\n")
    assert run_verb(["sweep", str(path), "--dry-run"]) == 2
    assert "demo, rome, bake_es, batch: the editor writes one edit at a time" in capsys.readouterr().err


def test_shared_options_of_streams_are_left_out_of_other_runs(tmp_path: Path) -> None:
    text = "editors: [unedited, memit]\nbenchmarks: [bake_es]\nmodes: [single, sequential]\nnum_edits: [4]\n"
    path = write(tmp_path, f"{text}model_args: {{immediate: false, guard: stop, data: mini}}\n")
    runs = {run.model_args["mode"]: run.model_args for run in check_plan(load_plan(path)).runs}
    assert set(runs) == {"none", "single", "sequential"} and all(args["data"] == "mini" for args in runs.values())
    assert runs["sequential"]["immediate"] is False and runs["sequential"]["guard"] == "stop"
    assert not {"immediate", "guard"} & {*runs["none"], *runs["single"]}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--address", "ray://head:10001"], "--address ray://head:10001 is for --on ray, not --on local"),
        (["--on", "ray", "--slurm-cluster", "local"], "--slurm-cluster local is for --on slurm, not --on ray"),
    ],
)
def test_options_of_another_executor_are_errors(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.setattr("lm_edit.cli.evaluating.sweep.execute", lambda *_: pytest.fail("the sweep began"))
    assert run_verb(["sweep", "example", *options]) == 2
    assert message in capsys.readouterr().err


def test_text_that_is_no_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_verb(["sweep", str(write(tmp_path, "editors: [rome\n"))]) == 2
    assert "is not valid YAML" in capsys.readouterr().err
    assert run_verb(["sweep", "exmaple"]) == 2
    assert "Did you mean 'example'" in capsys.readouterr().err


def test_an_editor_has_its_own_seeds(tmp_path: Path) -> None:
    grid = expand(
        tmp_path,
        "editors: [rome, {editor: ft_m, seeds: [3]}, {editor: ice, seeds: []}]\nbenchmarks: [bake_es]\nseeds: [0, 1]\n",
    )
    found = [(run.editor, run.model_args["seed"]) for run in grid.runs]
    assert found == [("rome", 0), ("rome", 1), ("ft_m", 3), ("ice", 0), ("ice", 1)]
    with pytest.raises(EditingError, match="unedited has no seeds; drop them"):
        expand(tmp_path, "editors: [{editor: unedited, seeds: [1]}]\nbenchmarks: [bake_es]\n")
