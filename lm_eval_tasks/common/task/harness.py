"""Adapters for members of lm-eval that are not part of its public interface.

Everything that the tasks use beyond that interface is listed in :data:`PRIVATE_MEMBERS`, so that a test can name the
member that a new release of lm-eval no longer has.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

from lm_eval.api.filter import FilterEnsemble
from lm_eval.api.task import ConfigurableTask

from edit_hooks.utils.logs import get_logger

logger = get_logger("lm_eval.editing_tasks")

# `module:object` -> members
PRIVATE_MEMBERS: dict[str, tuple[str, ...]] = {
    "lm_eval.api.task:ConfigurableTask": ("_aggregation_list", "_filters", "_higher_is_better", "_metric_fn_list"),
}

# Keys of a task's YAML that are no fields of lm-eval's TaskConfig.
OWN_KEYS = ("class", "summary")

DocT = TypeVar("DocT", bound=dict[str, Any])


class Documents(list[DocT]):
    """Documents in memory, with the one attribute of a dataset that lm-eval reads."""

    @property
    def features(self) -> dict[str, None]:
        """Names of the documents' fields."""
        return dict.fromkeys(self[0]) if self else {}


class HarnessTask(ConfigurableTask):
    """A `ConfigurableTask` with named access to the private members we need."""

    def __init__(
        self,
        data_dir: str | None = None,
        cache_dir: str | None = None,
        download_mode: Any = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        # lm-eval leaves keys in the configuration that it does not accept, and metadata may be missing.
        config = {key: value for key, value in (config or {}).items() if key not in OWN_KEYS}
        config["metadata"] = dict(config.get("metadata") or {})
        self.prepare(config)
        super().__init__(data_dir, cache_dir, download_mode, config)

    def prepare(self, config: dict[str, Any]) -> None:
        """Check the task's configuration and complete it, before lm-eval reads it and data are loaded."""

    def build_all_requests(
        self, *, cache_requests: bool = False, rewrite_requests_cache: bool = False, **kwargs: Any
    ) -> None:
        """Build the requests without lm-eval's request cache, whose key covers neither the data nor our settings."""
        if cache_requests or rewrite_requests_cache:
            logger.warning("%s: --cache_requests is ignored; its key would mix up data sources", self.config.task)
        super().build_all_requests(**kwargs)

    @property
    def pipelines(self) -> Sequence[FilterEnsemble]:
        """The filter pipelines of the task."""
        return self._filters

    def use_pipelines(self, pipelines: Sequence[FilterEnsemble]) -> None:
        """Run these filter pipelines in place of the task's own."""
        self._filters = list(pipelines)

    @property
    def is_predict_only(self) -> bool:
        """Whether ``--predict_only`` is set.

        If it is, lm-eval replaces all metrics by one called ``bypass``.
        """
        return "bypass" in self._metric_fn_list

    def add_column(
        self, name: str, aggregation: Callable[[Sequence[Any]], Any], *, higher_is_better: bool | None = None
    ) -> None:
        """Declare a column of ``process_results`` besides those in ``metric_list``."""
        self._aggregation_list[name] = aggregation
        if higher_is_better is not None:
            self._higher_is_better[name] = higher_is_better

    def drop_metrics(self, names: Collection[str]) -> None:
        """Leave metrics of ``metric_list`` out."""
        self.config.metric_list = [metric for metric in self.config.metric_list if metric["metric"] not in names]
        for name in names:
            for declared in (self._metric_fn_list, self._aggregation_list, self._higher_is_better):
                declared.pop(name, None)


def filter_classes(pipeline: FilterEnsemble) -> list[Any]:
    """The filter classes of a pipeline, which lm-eval wraps in ``functools.partial``."""
    return [getattr(step, "func", step) for step in pipeline.filters]
