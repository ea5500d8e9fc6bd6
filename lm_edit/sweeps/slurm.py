"""Runs as jobs of Slurm, through submitit.

submitit writes the function of a job and its arguments with pickle, into a folder of the sweep; here these are
:func:`lm_edit.sweeps.runs.execute` and texts. Machines share the file system of that folder.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from edit_hooks.utils.errors import EditingError, first_line
from edit_hooks.utils.files import parse_size
from lm_edit.sweeps.choices import Resources
from lm_edit.sweeps.runs import execute, thread_variables

JOBS = "slurm"  # folder of submitit's files
DEFAULT_HOURS = 24.0
CLUSTERS = ("slurm", "local")


class SlurmExecutor:
    """Submits every run as a job.

    Args:
        workers: jobs at a time; by default Slurm's queue takes all.
        cluster: ``slurm``, or ``local``: submitit's processes on this machine, to try a plan without Slurm.

    Raises:
        EditingError: without submitit or Slurm, and for parameters that submitit does not have.
    """

    def __init__(self, out: Path, workers: int | None, resources: Resources, cluster: str | None = None) -> None:
        try:
            import submitit
        except ImportError:
            raise EditingError('--on slurm needs submitit: pip install "lm-eval-editing[slurm]".') from None
        self.slots = workers
        self._threads = thread_variables(resources.cpus or 1)
        cluster = cluster or "slurm"
        try:
            self._executor = submitit.AutoExecutor(folder=out / JOBS, cluster=cluster)
            self._executor.update_parameters(**_parameters(resources), **resources.slurm)
        except (RuntimeError, NameError, ValueError, TypeError, AssertionError) as error:
            raise EditingError(
                f"submitit refuses the sweep ({first_line(error)}); see resources: of the plan."
            ) from None
        self._jobs: list[Any] = []

    def submit(self, folder: Path) -> Any:
        job = self._executor.submit(execute, str(folder.resolve()), self._threads)
        self._jobs.append(job)
        return job

    def stop(self) -> None:
        for job in self._jobs:
            with contextlib.suppress(Exception):  # a job that has ended, or whose cluster is not reachable
                if not job.done():
                    job.cancel()

    def close(self) -> None:
        self._jobs.clear()


def _parameters(resources: Resources) -> dict[str, Any]:
    """Parameters that all executors of submitit accept."""
    parameters: dict[str, Any] = {
        "name": "lm-edit-sweep",
        "timeout_min": round((resources.hours or DEFAULT_HOURS) * 60),
        "cpus_per_task": resources.cpus or 1,
    }
    if resources.gpus is not None:
        parameters["gpus_per_node"] = resources.gpus
    if resources.memory is not None:
        parameters["mem_gb"] = parse_size(resources.memory) / 1e9
    return parameters
