"""Runs as processes of this machine."""

from __future__ import annotations

import os
import queue
import shutil
import subprocess
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from edit_hooks.utils.errors import EditingError
from lm_edit.sweeps.execution.kept_process import KeptProcess
from lm_edit.sweeps.execution.runs import RunOutcome, execute, thread_variables
from lm_edit.sweeps.planning.choices import Resources

DEVICES = "CUDA_VISIBLE_DEVICES"


class LocalExecutor:
    """A pool of workers that share cores and GPUs; each executes one run at a time in a process.

    Args:
        workers: by default one, or where there are GPUs as many as they suffice for.
        keep_model: each worker executes its runs in one process, which keeps the last model.

    Raises:
        EditingError: for more GPUs per run than there are.
    """

    def __init__(self, workers: int | None, resources: Resources, keep_model: bool = False) -> None:
        devices = visible_devices()
        per_run = resources.gpus if resources.gpus is not None else min(1, len(devices))
        if per_run > len(devices):
            raise EditingError(
                f"a run needs {per_run} GPUs, and {len(devices)} are visible here; lower resources: gpus: of the plan, "
                "or use --on slurm or --on ray."
            )
        enough_for = len(devices) // per_run if per_run else 1
        if workers is not None and per_run and resources.gpus is not None and workers > enough_for:
            raise EditingError(
                f"--workers {workers}, but {len(devices)} GPUs suffice for {enough_for} runs with {per_run} each."
            )
        self.slots: int | None = workers or enough_for
        self._free: queue.SimpleQueue[tuple[dict[str, str], KeptProcess | None]] = queue.SimpleQueue()
        self._kept: list[KeptProcess] = []
        threads = resources.cpus or max(1, num_cores() // (workers or enough_for))
        for number in range(workers or enough_for):
            own = [devices[(number * per_run + offset) % len(devices)] for offset in range(per_run)]
            chosen = {DEVICES: ",".join(own)} if devices else {}
            self._kept += [KeptProcess()] if keep_model else []
            self._free.put(({**thread_variables(threads), **chosen}, self._kept[-1] if keep_model else None))
        self._stopped = threading.Event()
        self._pool = ThreadPoolExecutor(self.slots, thread_name_prefix="sweep")

    def submit(self, folder: Path) -> Future[RunOutcome]:
        return self._pool.submit(self._execute, folder)

    def _execute(self, folder: Path) -> RunOutcome:
        environment, kept = self._free.get()
        try:
            return execute(str(folder), environment, self._stopped.is_set, kept.start if kept is not None else None)
        finally:
            self._free.put((environment, kept))

    def stop(self) -> None:
        self._stopped.set()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def close(self) -> None:
        self._pool.shutdown(wait=True)
        for process in self._kept:
            process.close()


def num_cores() -> int:
    """Cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


def visible_devices() -> list[str]:
    """GPUs that a run may use, as ``CUDA_VISIBLE_DEVICES`` names them."""
    if (chosen := os.environ.get(DEVICES)) is not None:
        return [device for device in chosen.split(",") if device.strip() not in ("", "-1")]
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    listed = subprocess.run([tool, "-L"], capture_output=True, text=True, check=False)
    lines = [line for line in listed.stdout.splitlines() if line.startswith("GPU ")]
    return [str(number) for number in range(len(lines))]
