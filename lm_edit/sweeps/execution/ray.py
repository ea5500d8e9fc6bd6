"""Runs as tasks of a Ray cluster.

Ray sends functions and arguments between processes with pickle; here these are
:func:`lm_edit.sweeps.execution.runs.execute`, by its name, and texts. Machines share the file system of the sweep's
folder and have this package installed.
"""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from typing import Any

from edit_hooks.utils.errors import EditingError, first_line
from edit_hooks.utils.storage.files import parse_size
from lm_edit.sweeps.execution.runs import execute, thread_variables
from lm_edit.sweeps.planning.choices import Resources


class RayExecutor:
    """Submits every run as a task with its resources.

    Args:
        workers: tasks at a time; by default as many as the cluster has resources for.
        address: of a cluster, such as ``ray://head:10001`` or ``auto``; by default a new one on this machine.
        gpus_if_any: a cluster without GPUs is asked for none. Without any number Ray hides the GPUs from a task.

    Raises:
        EditingError: without ray, and for a cluster that cannot be reached.
    """

    def __init__(
        self, workers: int | None, resources: Resources, address: str | None = None, *, gpus_if_any: bool = False
    ) -> None:
        try:
            import ray
        except ImportError:
            raise EditingError('--on ray needs ray: pip install "lm-eval-editing[ray]".') from None
        self.slots = workers
        self._ray: Any = ray
        own: dict[str, Any] = {} if address else {"include_dashboard": False}
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **own)
        except Exception as error:  # each kind of address fails with errors of its own
            where = (
                f"the Ray cluster at {address} cannot be reached" if address else "no Ray cluster can be started here"
            )
            raise EditingError(f"{where} ({first_line(error)}).") from None
        cpus = resources.cpus or 1
        memory = {} if resources.memory is None else {"memory": parse_size(resources.memory)}
        gpus = 0 if gpus_if_any and not ray.cluster_resources().get("GPU") else resources.gpus or 0
        self._task = ray.remote(execute).options(num_cpus=cpus, num_gpus=gpus, max_retries=0, **memory)
        self._threads = thread_variables(cpus)
        self._references: list[Any] = []

    def submit(self, folder: Path) -> Any:
        reference = self._task.remote(str(folder.resolve()), self._threads)
        self._references.append(reference)
        return reference.future()

    def stop(self) -> None:
        for reference in self._references:
            with contextlib.suppress(Exception):  # a task that has ended
                self._ray.cancel(reference, force=False)  # an interrupt, on which the worker ends its process
        with contextlib.suppress(Exception):
            self._ray.wait(self._references, num_returns=len(self._references), timeout=30)

    def close(self) -> None:
        self._ray.shutdown()
