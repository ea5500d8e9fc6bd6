"""The executors by name; the libraries of the clusters are imported when one is chosen."""

from __future__ import annotations

from pathlib import Path

from lm_edit.sweeps.choices import Resources
from lm_edit.sweeps.schedule import Executor

EXECUTORS = ("local", "slurm", "ray")


def make_executor(
    name: str, out: Path, workers: int | None, resources: Resources, *, address: str | None, slurm_cluster: str | None
) -> Executor:
    """Create an executor.

    Args:
        out: folder of the sweep, on a file system that all machines share.
        workers: runs at a time; by default what the machine or the cluster's queue takes.
        address: of a Ray cluster; by default one on this machine.
        slurm_cluster: executor of submitit; see :class:`lm_edit.sweeps.slurm.SlurmExecutor`.

    Raises:
        EditingError: for a library that is not installed, and for resources that are not there.
    """
    if name == "slurm":
        from lm_edit.sweeps.slurm import SlurmExecutor

        return SlurmExecutor(out, workers, resources, slurm_cluster)
    if name == "ray":
        from lm_edit.sweeps.ray import RayExecutor

        return RayExecutor(workers, resources, address)
    from lm_edit.sweeps.local import LocalExecutor

    return LocalExecutor(workers, resources)
