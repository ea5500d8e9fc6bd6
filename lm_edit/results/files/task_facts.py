"""Facts about a task of a run that make its numbers comparable: data, version, population, judge, protocol."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import PurePath
from typing import Any

from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.storage.hashing import key_of
from edit_hooks.utils.storage.json_io import parse_json
from lm_edit.results.files.runs import ResultFile
from lm_edit.results.files.shape import COUNT, Shape, anything, each
from lm_eval_tasks.common.asking.generation import generation_text
from lm_eval_tasks.common.scoring.columns import ALL_CASES, TOTALS, MetricColumn
from lm_eval_tasks.common.scoring.metric_list import declared_metrics
from lm_eval_tasks.common.scoring.population import WRONG_JUDGE
from lm_eval_tasks.common.settings import SCORE_UNEDITED_CASES
from lm_eval_tasks.report.portable import by_value
from lm_eval_tasks.report.run_facts import chosen_samples, data_label, is_editing_task

# Metrics of lm-eval's own tasks that are shares of successes.
RATES = ("acc", "acc_norm", "exact_match", "em")
# Settings that add columns and change none.
NOT_PROTOCOL = ("population", "score_by", "categories", "generate", "micro")
UNEDITED = "_unedited"  # ending of metrics of the unedited model
JUDGE = "judge"  # the pipeline of verdicts; that of the filters, whose module imports transformers
MODEL_JUDGE = "model_judge"  # the filter of a configured judge
_HASH_DIGITS = 12


class TaskFacts:
    """Facts about one task or group in a result file."""

    def __init__(self, file: ResultFile, task: str) -> None:
        self.file, self.task = file, task
        self.config = file.task_config(task)
        self.metadata: Mapping[str, Any] = self.config.get("metadata") or {}
        self.source: Mapping[str, Any] = self.metadata.get("data_source") or {}
        self.num_cases = file.num_cases(task)
        if self.num_cases is None:  # a group: lm-eval sums the documents of its tasks
            asked = file.tasks.get(task, {}).get("sample_len")
            self.num_cases = asked if type(asked) is int else None
        self._scored_by: dict[tuple[str, str], dict[str, str]] = {}

    @cached_property
    def metrics(self) -> dict[str, Mapping[str, Any]]:
        """Metric -> what the task declares about it."""
        return declared_metrics(self.config)

    @cached_property
    def columns(self) -> dict[str, Any]:
        """The columns of the result table that all metrics of the task share."""
        yaml = self.metadata.get("config_source")
        digest = str(self.source.get("sha256", ""))
        subset = self.source.get("subset", "all")
        if subset != "all":
            digest += f" subset={subset} seed={self.source.get('subset_seed')}"
        revision = self.source.get("commit") or self.source.get("revision") or self.metadata.get("data_revision")
        is_hub = data_label(self.config).partition(":")[0] == "hub"
        return {
            "task": self.task,
            "benchmark": PurePath(yaml).parent.name if isinstance(yaml, str) else self.task,
            "task_version": str(self.file.content["versions"].get(self.task, "")),
            "samples": self._chosen_samples,
            "data": data_label(self.config),
            "data_revision": str(revision or "") if is_hub or not self.source else "",
            "data_hash": digest,
        }

    @property
    def _chosen_samples(self) -> str:
        """Digest of the documents that ``--samples`` chose for the task, or for the members of the group."""
        chosen = chosen_samples(self.file.content["config"])
        sets = {name: chosen[name] for name in self.file.members(self.task) if name in chosen}
        return key_of(sets)[:_HASH_DIGITS] if sets else ""

    def summary(self, pipeline: str) -> dict[str, Any]:
        """What was left out in one filter pipeline, and the summary of the edits."""
        saved = self.file.tasks[self.task]
        unscored = saved.get(f"unscored,{pipeline}")
        return {
            "unscored": unscored if isinstance(unscored, (int, float)) else None,
            "unscored_reason": self._mapping(f"unscored_reason,{pipeline}", each(COUNT)),
            "edit": self._mapping(f"edit,{pipeline}", each(anything)),
        }

    def of_metric(self, column: MetricColumn) -> dict[str, Any]:
        """The columns of the result table that belong to one metric."""
        declared = self.metrics.get(column.metric, {})
        directions = (self.file.content.get("higher_is_better") or {}).get(self.task) or {}
        higher = directions.get(column.metric, declared.get("higher_is_better"))
        is_total = declared.get("aggregation") in TOTALS
        if is_total or declared.get("model") == "unedited":
            higher = None  # a number of cases, or a fact about the unedited model: no direction is better
        is_share = self._is_share(column.metric)
        population = declared.get("population") or ALL_CASES
        judge = self._judge_of(column.filter)
        return {
            "metric": column.metric,
            "stage": column.stage,
            "filter": column.filter,
            "role": declared.get("role") or "",
            "higher_is_better": higher,
            "is_share": is_share,
            "is_rate": is_share and (bool(higher) or not is_editing_task(self.config)),
            "is_total": is_total,
            "chance": declared.get("chance"),
            "population": population,
            "judge": self._with_judge_of_population(judge) if population == WRONG_JUDGE else judge,
            "protocol": self.protocol + ("; judged" if self._is_judged(column.filter) else ""),
        }

    def scored_by(self, metric: str, pipeline: str) -> dict[str, str]:
        """Judge and population of a metric."""
        if (metric, pipeline) not in self._scored_by:
            facts = self.of_metric(MetricColumn(metric, "", pipeline, None))
            self._scored_by[metric, pipeline] = {name: facts[name] for name in ("judge", "population")}
        return self._scored_by[metric, pipeline]

    @cached_property
    def protocol(self) -> str:
        """How the task asks and scores; equal texts are the same protocol of one task and version."""
        config, content = self.config, self.file.content
        requests = [generation_text(by_value(one)) for one in self.generation_settings]
        given = by_value(config.get("settings") or {})
        settings = {name: value for name, value in given.items() if name not in NOT_PROTOCOL}
        parts = [
            *(requests or [self._default_request]),
            *(f"{name}={value}" for name, value in sorted(settings.items()) if value is not None),
            f"few-shot={shots}" if (shots := (content.get("n-shot") or {}).get(self.task)) else "",
            f"chat template {sha[:_HASH_DIGITS]}" if (sha := content.get("chat_template_sha")) else "",
            f"system {sha[:_HASH_DIGITS]}" if (sha := content.get("system_instruction_sha")) else "",
        ]
        return "; ".join(part for part in parts if part)

    @property
    def generation_settings(self) -> Sequence[Mapping[str, Any]]:
        """The decoding settings of the questions, and of the task where some follow it; empty for likelihoods."""
        of_task = self.config.get("generation_kwargs")
        return [*(self.config.get("decodings") or ()), *([of_task] if of_task else ())]

    @property
    def _default_request(self) -> str:
        """Kind of a task's requests without generation settings; editing tasks log all of theirs as generations."""
        return "likelihood" if is_editing_task(self.config) else str(self.config.get("output_type") or "")

    def _steps(self, pipeline: str) -> list[Mapping[str, Any]]:
        """The steps of a filter pipeline, with their arguments."""
        listed = (each for each in self.config.get("filter_list") or () if each.get("name") == pipeline)
        return [step for each in listed for step in each.get("filter") or ()]

    @property
    def _own_judges(self) -> Mapping[str, Any]:
        """Pipeline -> description of the judge that the task's YAML puts there."""
        own = self.metadata.get("own_judges")
        return own if isinstance(own, Mapping) else {}

    def _is_judged(self, pipeline: str) -> bool:
        steps = self._steps(pipeline)
        has_model_judge = any(step.get("function") == MODEL_JUDGE for step in steps)
        return has_model_judge or pipeline in self._own_judges or (pipeline == JUDGE and bool(steps))

    def _judge_of(self, pipeline: str) -> str:
        """The judge of a filter pipeline with its settings, in one text; "" without one."""
        if pipeline in self._own_judges:
            return _settings_text(self._own_judges[pipeline])
        steps = self._steps(pipeline) if self._is_judged(pipeline) else []
        if not steps or any(step.get("function") == MODEL_JUDGE for step in steps):
            return self._chosen_judge if steps else ""
        return "; ".join(_step_text(step) for step in steps)

    def _with_judge_of_population(self, judge: str) -> str:
        """The judge of the answers, and the one that selected the cases where it is another."""
        if not judge or judge == self._chosen_judge:
            return self._chosen_judge
        return f"{judge}; population by {self._chosen_judge}"

    @property
    def scores_outside(self) -> bool:
        """Whether the run also scored cases that are not among its edits."""
        return bool((self.config.get("settings") or {}).get(SCORE_UNEDITED_CASES.name))

    @property
    def judge(self) -> str:
        """The judge of the task's verdicts with its settings, in one text; "" without one."""
        return self._judge_of(JUDGE) or self._chosen_judge

    @property
    def takes_judge(self) -> bool:
        """Whether the judge that a run chooses decides on some columns of the task, also where the run has none."""
        has_own = bool(self._steps(JUDGE)) and not any(
            step.get("function") == MODEL_JUDGE for step in self._steps(JUDGE)
        )
        reports = any(metric.get("from") == "judge" for metric in self.metrics.values()) and not has_own
        selects = any(metric.get("population") == WRONG_JUDGE for metric in self.metrics.values())
        return is_editing_task(self.config) and (reports or selects)

    @property
    def _chosen_judge(self) -> str:
        """The judge that the run's settings or the environment chose."""
        return _settings_text(self.metadata.get("judge"))

    def _is_share(self, metric: str) -> bool:
        """Whether a metric is declared as a mean share of cases, whichever direction is better.

        The unedited model's is one where that of the edited model is.
        """
        if not is_editing_task(self.config):
            return metric in RATES
        declared = self.metrics.get(metric.removesuffix(UNEDITED)) or self.metrics.get(metric, {})
        return declared.get("aggregation") == "mean_scored" and bool(declared.get("rate", True))

    def _mapping(self, key: str, shape: Shape) -> dict[str, Any]:
        """The object in a JSON text among the columns; empty without one."""
        value = self.file.tasks[self.task].get(key)
        if not isinstance(value, str):
            return {}
        where = f"{self.file.path}, {self.task}, {key}"
        content: dict[str, Any] = parse_json(value, where, finite=False, halves="replace")
        if problem := shape(content, ""):
            raise EditingError(f"{where}: {problem}.")
        return content


def _settings_text(described: object) -> str:
    if isinstance(described, Mapping):
        return "; ".join(f"{name}={value}" for name, value in by_value(described).items())
    return str(described or "")


def _step_text(step: Mapping[str, Any]) -> str:
    arguments = [f"{name}={value!r}" for name, value in sorted(by_value(step).items()) if name != "function"]
    return str(step.get("function")) + (f"({', '.join(arguments)})" if arguments else "")
