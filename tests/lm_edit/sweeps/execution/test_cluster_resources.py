"""What clusters are asked for where a plan names no resources."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from command_line import run_verb

from lm_edit.sweeps.execution.executors import defaults_of, make_executor, on_cluster
from lm_edit.sweeps.execution.slurm import _parameters
from lm_edit.sweeps.planning.choices import Resources

ON_GPU, ON_CPU = SimpleNamespace(model_args={}), SimpleNamespace(model_args={"device": "cpu"})


@pytest.mark.parametrize(
    ("name", "given", "runs", "gpus"),
    [
        ("slurm", {}, [ON_GPU], 1),
        ("slurm", {}, [ON_CPU, ON_GPU], 1),
        ("slurm", {}, [ON_CPU], 0),
        ("slurm", {"gpus": 0}, [ON_GPU], 0),
        ("slurm", {"gpus": 2}, [ON_CPU], 2),
        ("slurm", {"slurm": {"slurm_gres": "gpu:a100:1"}}, [ON_GPU], None),
        ("slurm", {"slurm": {"slurm_additional_parameters": {"gpus": 1}}}, [ON_GPU], None),
        ("slurm", {"slurm": {"slurm_partition": "long"}}, [ON_GPU], 1),
        ("ray", {}, [ON_GPU], 1),
        ("ray", {}, [ON_CPU], 0),
        ("local", {}, [ON_GPU], None),
    ],
)
def test_a_run_gets_one_gpu_unless_the_plan_says_otherwise(
    name: str, given: dict[str, Any], runs: list[Any], gpus: int | None
) -> None:
    used = on_cluster(name, Resources(**given), runs)
    assert used.gpus == gpus
    if name == "slurm":
        assert _parameters(used).get("gpus_per_node") == gpus and _parameters(used)["cpus_per_task"] == 1


def test_submitit_on_one_machine_counts_its_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """It hides those that a job does not ask for."""
    for visible, gpus in (("4,6", 1), ("", 0)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert on_cluster("slurm", Resources(), [ON_GPU], "local").gpus == gpus


@pytest.mark.parametrize(
    ("cluster", "resources", "gpus"),
    [
        ({"CPU": 2.0, "GPU": 4.0}, {}, 1),
        ({"CPU": 2.0}, {}, 0),
        ({"CPU": 2.0}, {"gpus": 1}, 1),
        ({"GPU": 1}, {"gpus": 0}, 0),
    ],
)
def test_ray_is_asked_for_gpus_that_it_has(
    cluster: dict[str, float], resources: dict[str, Any], gpus: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}
    fake = SimpleNamespace(
        init=lambda **_: None,
        cluster_resources=lambda: cluster,
        remote=lambda function: SimpleNamespace(options=asked.update),
    )
    monkeypatch.setitem(sys.modules, "ray", fake)
    make_executor("ray", tmp_path, None, Resources(**resources), [ON_GPU], address=None, slurm_cluster=None)
    assert asked["num_gpus"] == gpus and asked["num_cpus"] == 1


def test_a_dry_run_names_what_the_plan_leaves_open(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = tmp_path / "plan.yaml"

    def printed(resources: str, *options: str) -> list[str]:
        plan.write_text(f"editors: [rome]\nbenchmarks: [bake_es]\n{resources}", encoding="utf-8")
        assert run_verb(["sweep", str(plan), "--out", str(tmp_path / "out"), "--dry-run", *options]) == 0
        return [line for line in capsys.readouterr().out.splitlines() if line.startswith("resources: ")]

    core = "resources: each run gets 1 core; cpus: 8 for eight"
    assert printed("") == []
    assert printed("", "--on", "slurm") == ["resources: each run gets 1 GPU; gpus: 0 for none", core]
    assert printed("", "--on", "ray")[0] == "resources: each run gets 1 GPU, if the cluster has any; gpus: 0 for none"
    assert printed("model_args: {device: cpu}\n", "--on", "slurm")[0].startswith("resources: each run gets no GPU;")
    assert printed("resources: {gpus: 1, cpus: 4}\n", "--on", "slurm") == []
    assert list(defaults_of("local", Resources(), Resources())) == []
