"""The executors by name; the libraries of the clusters are imported when one is chosen.

A machine knows its GPUs, and the one that submits jobs does not know those of the others. Where a plan names no number,
clusters are asked for one GPU per run: Slurm unless ``slurm:`` asks for some, Ray if the cluster has any. Runs with
``device: cpu`` need none.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from pathlib import Path

from edit_hooks.utils.errors import EditingError
from lm_edit.sweeps.execution.schedule import Executor
from lm_edit.sweeps.planning.choices import Resources
from lm_edit.sweeps.planning.grid import Run


def make_executor(
    name: str,
    out: Path,
    workers: int | None,
    resources: Resources,
    runs: Iterable[Run],
    *,
    address: str | None,
    slurm_cluster: str | None,
    keep_model: bool = False,
) -> Executor:
    """Create an executor.

    Args:
        out: folder of the sweep, on a file system that all machines share.
        workers: runs at a time; by default what the machine or the cluster's queue takes.
        resources: of the plan.
        runs: that will be submitted.
        address: of a Ray cluster; by default one on this machine.
        slurm_cluster: executor of submitit; see :class:`lm_edit.sweeps.execution.slurm.SlurmExecutor`.
        keep_model: see :class:`lm_edit.sweeps.execution.local.LocalExecutor`.

    Raises:
        EditingError: for a library that is not installed, for resources that are not there, and for a kept model on a
            cluster.
    """
    if keep_model and name != "local":
        raise EditingError(f"--keep-model is for runs on this machine, not --on {name}; nothing was run.")
    used = on_cluster(name, resources, runs, slurm_cluster)
    if name == "slurm":
        from lm_edit.sweeps.execution.slurm import SlurmExecutor

        return SlurmExecutor(out, workers, used, slurm_cluster)
    if name == "ray":
        from lm_edit.sweeps.execution.ray import RayExecutor

        return RayExecutor(workers, used, address, gpus_if_any=resources.gpus is None)
    from lm_edit.sweeps.execution.local import LocalExecutor

    return LocalExecutor(workers, resources, keep_model)


def on_cluster(name: str, resources: Resources, runs: Iterable[Run], slurm_cluster: str | None = None) -> Resources:
    """The resources of a plan with the number of GPUs that a cluster is asked for, where the plan names none.

    Of Ray the number is the most: a cluster without GPUs is asked for none.
    """
    if name == "local" or resources.gpus is not None:
        return resources
    needs_gpu = any(not str(run.model_args.get("device", "")).startswith("cpu") for run in runs)
    if name == "slurm" and slurm_cluster == "local":
        from lm_edit.sweeps.execution.local import visible_devices

        needs_gpu = needs_gpu and bool(visible_devices())
    elif name == "slurm" and _asks_for_gpus(resources):
        return resources
    return dataclasses.replace(resources, gpus=int(needs_gpu))


def defaults_of(name: str, given: Resources, used: Resources) -> Iterator[str]:
    """Yield the resources of a cluster that the plan leaves open, as sentences for a dry run.

    Args:
        given: those of the plan. used: those of :func:`on_cluster`.
    """
    if name == "local":
        return
    if given.gpus is None and used.gpus is not None:
        where = ", if the cluster has any" if name == "ray" and used.gpus else ""
        other = "gpus: 0 for none" if used.gpus else "gpus: 1 for one"
        yield f"resources: each run gets {used.gpus or 'no'} GPU{where}; {other}"
    if given.cpus is None:
        yield "resources: each run gets 1 core; cpus: 8 for eight"


def _asks_for_gpus(resources: Resources) -> bool:
    """Whether the parameters for submitit ask for GPUs, as ``slurm_gres`` does."""
    further = resources.slurm.get("slurm_additional_parameters")
    names = [*resources.slurm, *(further if isinstance(further, dict) else ())]
    return any("gpu" in str(name) or "gres" in str(name) for name in names)
