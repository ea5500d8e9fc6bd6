"""Few-shot prompts that do not depend on the number of processes.

lm-eval draws the few-shot examples of a task from one generator per process, in the order of the documents that the
process has. Under data parallelism a document would be asked after other examples than in one process, so that runs of
other numbers of processes could not be compared case by case.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from edit_hooks.utils.logs import get_logger

log = get_logger("lm_eval.edited_hf")


class RankedModel(Protocol):
    """What lm-eval's model classes have of their process."""

    world_size: int


@contextlib.contextmanager
def prompts_of_one_process(lm: RankedModel, tasks: Iterable[Any]) -> Iterator[None]:
    """Scope in which every process draws the examples of all documents, as one would, and asks its own documents.

    Nothing changes in a run of one process, nor for tasks without few-shot examples.

    Args:
        tasks: loaded tasks, of which :meth:`build_all_requests` is shadowed.
    """
    drawing = [task for task in tasks if lm.world_size > 1 and task.config.num_fewshot]
    for task in drawing:
        task.build_all_requests = _Builder(task)
    try:
        yield
    finally:
        for task in drawing:
            vars(task).pop("build_all_requests", None)


class _Builder:
    """``build_all_requests`` of a task, with the prompts of a single process."""

    def __init__(self, task: Any) -> None:
        self.task, self.build = task, task.build_all_requests

    def __call__(
        self,
        *,
        limit: int | None = None,
        samples: list[int] | None = None,
        rank: int = 0,
        world_size: int = 1,
        cache_requests: bool = False,
        rewrite_requests_cache: bool = False,
        **options: Any,
    ) -> None:
        if cache_requests or rewrite_requests_cache:  # its files hold the requests of all documents of a process
            log.warning("%s: --cache_requests is ignored in a run of several processes", self.task.config.task)
        documents = self.task.doc_iterator(rank=rank, limit=limit, samples=samples, world_size=world_size)
        # A process without a document would end with an error; lm-eval discards its answers to the first one.
        own = {number for number, _ in documents} or {0}
        construct = self.task.construct_requests

        def construct_own(*, metadata: tuple[Any, ...], **arguments: Any) -> Any:
            return construct(metadata=metadata, **arguments) if metadata[1] in own else []

        self.task.construct_requests = construct_own
        try:
            self.build(limit=limit, samples=samples, rank=0, world_size=1, **options)
        finally:
            vars(self.task).pop("construct_requests", None)
