"""Runs as jobs of Slurm, through submitit.

submitit writes the function of a job and its arguments with pickle, into a folder of the sweep; here these are
:func:`lm_edit.sweeps.execution.runs.execute` and texts. Machines share the file system of that folder.
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any

from edit_hooks.utils.errors import EditingError, first_line
from edit_hooks.utils.storage.files import parse_size
from lm_edit.sweeps.execution.runs import RunOutcome, execute, thread_variables
from lm_edit.sweeps.planning.choices import Resources

JOBS = "slurm"  # folder of submitit's files
DEFAULT_HOURS = 24.0

# In messages of submitit. A job is signaled shortly before its limit; Slurm names the state of one that it has killed.
TRACE = re.compile(r"with trace:\n-+\n(.*)\n-+\nYou can check", flags=re.DOTALL)
TIMED_OUT = re.compile(r"not requeued because: timed-out|\(state: TIMEOUT\)")


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
        self._limit = f"time limit of {resources.hours or DEFAULT_HOURS:g} h reached (resources: hours)"
        if "slurm_time" in resources.slurm:
            self._limit = "time limit reached (resources: slurm_time)"
        self._jobs: list[Any] = []

    def submit(self, folder: Path) -> SlurmRun:
        job = self._executor.submit(execute, str(folder.resolve()), self._threads)
        self._jobs.append(job)
        return SlurmRun(job, self._limit)

    def stop(self) -> None:
        for job in self._jobs:
            with contextlib.suppress(Exception):  # a job that has ended, or whose cluster is not reachable
                if not job.done():
                    job.cancel()

    def close(self) -> None:
        self._jobs.clear()


class SlurmRun:
    """A submitted run; a job without a result becomes an outcome with its cause and log.

    Args:
        job: of submitit.
        limit: text about its time limit, for the reason of a run that reached it.
    """

    def __init__(self, job: Any, limit: str) -> None:
        self._job = job
        self._limit = limit

    def done(self) -> bool:
        return bool(self._job.done())

    def result(self) -> RunOutcome:
        try:
            return RunOutcome(*self._job.result())
        except Exception as error:
            cause, log = _cause(error), f"Slurm log: {self._job.paths.stderr}"
            if TIMED_OUT.search(cause):
                return RunOutcome("interrupted", 0.0, f"{self._limit}; the same command continues it\n  {log}")
            return RunOutcome("failed", 0.0, f"the worker ended without a result ({cause})\n  {log}")


def _cause(error: Exception) -> str:
    """The informative line of an error of submitit: the end of the job's trace, or the state of the job."""
    message = str(error)
    trace = TRACE.search(message)
    lines = [line.strip() for line in (trace[1] if trace else message).splitlines() if line.strip()]
    return lines[-1] if trace and lines else " ".join(lines[:2]) or first_line(error)


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
