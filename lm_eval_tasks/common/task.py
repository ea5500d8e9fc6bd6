"""`EditingTask`: one lm-eval task class for all editing benchmarks. What differs between them is in YAML and utils.py.

A task's YAML names four things (lm-eval's own keys, read a little differently):

- ``custom_dataset``: ``load_records(settings, subset) -> Loaded``; ``subset`` is the YAML's ``dataset_name``.
- ``process_docs``: ``(record, settings) -> document``, made with :func:`~lm_eval_tasks.common.probes.case_doc`.
- ``process_results``: ``(doc, answers) -> {metric: measure}``; ``answers`` is a
  :class:`~lm_eval_tasks.common.probes.CaseAnswers`, a measure a function without arguments. Judged metrics are not
  among them: their value is the mean verdict over the case's own probes.
- ``metric_list``: the metrics of that mapping. Besides lm-eval's keys, ``only_if: <setting>`` drops a metric where the
  setting is off, ``filtered: true`` marks one from which a published filter may exclude cases, ``from: judge`` one that
  only judged pipelines report (:mod:`lm_eval_tasks.common.judge_filter`).

``settings`` is the task's ``metadata``, into which lm-eval merges ``--model_args`` and ``--metadata``. In a stream of
edits the same scorer runs on the answers of every stage (:mod:`lm_eval_tasks.common.stages`); tasks need not know.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from copy import deepcopy
from functools import partial
from typing import Any, NamedTuple

from lm_eval.api.instance import Instance
from lm_eval.api.registry import aggregation_registry
from lm_eval.api.task import ConfigurableTask
from lm_eval.api.utils import ends_with_whitespace

import lm_eval_tasks.common.filters  # noqa: F401  # registers natural_stop, which the YAML names
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.options import switch
from lm_eval_tasks.common.aggregation import AGGREGATIONS, retention_matrix
from lm_eval_tasks.common.dataset import Loaded, which_data
from lm_eval_tasks.common.judge_filter import PIPELINE, describe_verdicts, judge_pipeline
from lm_eval_tasks.common.measures import Excluded, Measure, Score, case_mean, evaluate, verdict
from lm_eval_tasks.common.probes import PLACEHOLDER, CaseAnswers
from lm_eval_tasks.common.stages import (
    NOT_IN_STREAM,
    RETENTION,
    FilteredAnswer,
    Stage,
    StreamStages,
    filter_all_stages,
    is_judge,
)

logger = logging.getLogger("lm_eval.editing_tasks")


for _name, _function in AGGREGATIONS.items():
    aggregation_registry.register(_name, target=_function)


class Documents(list):
    """Documents in memory, with the one attribute of a ``datasets.Dataset`` that lm-eval looks at."""

    @property
    def features(self) -> dict[str, None]:
        """Names of the documents' fields."""
        return dict.fromkeys(self[0]) if self else {}


class EditingTask(ConfigurableTask):
    """An lm-eval task whose documents are edit cases: one document holds one edit and all its probes of one kind."""

    def __init__(
        self,
        data_dir: str | None = None,
        cache_dir: str | None = None,
        download_mode: Any = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        config = {key: value for key, value in (config or {}).items() if key != "class"}
        config["metadata"] = dict(config.get("metadata") or {})
        config["metric_list"] = _asked_metrics(config["metric_list"], config["metadata"])
        if config.get("num_fewshot"):
            raise EditingError(
                f"{config.get('task')}: num_fewshot={config['num_fewshot']}, but demonstrations are not part of the "
                "editing protocols. Use 0 (in-context editing is an editor, not a prompt format)."
            )
        self.stages = StreamStages.of(config["metadata"])
        self.judge = _plug_in_judge(config)
        super().__init__(data_dir, cache_dir, download_mode, config)
        self._declare_columns()

    def _declare_columns(self) -> None:
        """Aggregations of every column: metrics, the same at other stages of a stream, what goes with them."""
        for metric, aggregation in list(self._aggregation_list.items()):
            self._aggregation_list |= _companions(metric, aggregation)
            for stage in self.stages.columns:
                column = f"{metric}@{stage}"
                self._aggregation_list |= {column: aggregation, **_companions(column, aggregation)}
                self._higher_is_better[column] = self._higher_is_better[metric]
            if self.stages.retention:
                matrix = partial(retention_matrix, cell=aggregation)
                self._aggregation_list |= _companions(column := f"{metric}@{RETENTION}", matrix) | {column: matrix}
        self._aggregation_list |= {
            "unscored": AGGREGATIONS["total"],
            "unscored_reason": AGGREGATIONS["reason_counts"],
            "edit": AGGREGATIONS["edit_summary"],
            "judge": AGGREGATIONS["judge_summary"],
        }

    def dump_config(self) -> dict[str, Any]:
        """The config as it goes to the results: functions by name, the same in every run and on every machine."""
        config = super().dump_config()
        config.pop("fewshot_config", None)  # repeats fields of the config; printing it would show memory addresses
        for key in ("custom_dataset", "process_docs", "process_results"):
            if callable(function := self.get_config(key)):
                config[key] = function.__name__
        return config

    # ------------------------------------------------------------------ data

    def download(self, dataset_kwargs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Load and check all records and build the documents; where they came from goes to the config's metadata."""
        settings = self.config.metadata
        loaded: Loaded = self.config.custom_dataset(settings, self.config.dataset_name)
        docs = Documents(self.config.process_docs(record, settings) for record in loaded.records)
        settings["data"] = which_data(settings)
        settings["data_source"] = loaded.source
        logger.info("%s: %d cases from %s", self.config.task, len(docs), loaded.source)
        self.dataset = {self.config.test_split: docs}

    def test_docs(self) -> Documents:
        """The documents; ``process_docs`` has run already."""
        return self.dataset[self.config.test_split]

    def doc_to_text(self, doc: Mapping[str, Any], doc_to_text: Any = None) -> str:
        """The prompt of a probe; for a whole case that of its first probe (shown by ``--write_out``)."""
        return doc["prompt"] if "prompt" in doc else doc["probes"][0]["prompt"]

    def doc_to_target(self, doc: Mapping[str, Any], doc_to_target: Any = None) -> str:
        """The wanted answer of a probe; for a whole case that of its first probe (logged as ``target``)."""
        probe = doc if "prompt" in doc else doc["probes"][0]
        return probe["targets"][0] if probe["targets"] else probe["gold"]

    # -------------------------------------------------------------- requests

    def build_all_requests(
        self,
        *,
        limit: int | None = None,
        samples: list[int] | None = None,
        rank: int = 0,
        world_size: int = 1,
        cache_requests: bool = False,
        rewrite_requests_cache: bool = False,
        **kwargs: Any,
    ) -> None:
        """Build the requests, never from lm-eval's request cache: its key knows neither the data nor our settings.

        With more processes than documents some have none, which lm-eval cannot run: such a process answers the first
        document along with the one that owns it, and nothing of its answers is counted.
        """
        if cache_requests or rewrite_requests_cache:
            logger.warning("%s: --cache_requests is ignored; its key would mix up data sources", self.config.task)
        if rank and not any(self.doc_iterator(rank=rank, limit=limit, samples=samples, world_size=world_size)):
            rank, world_size, limit, samples = 0, 1, 1, samples[:1] if samples else samples
        super().build_all_requests(limit=limit, samples=samples, rank=rank, world_size=world_size, **kwargs)

    def fewshot_context(self, doc: Mapping[str, Any], num_fewshot: int = 0, **kwargs: Any) -> list[str]:
        """One context per probe, each through lm-eval's own: system instruction, description, chat template."""
        return [super(EditingTask, self).fewshot_context(probe, num_fewshot, **kwargs) for probe in doc["probes"]]

    def construct_requests(self, doc: Mapping[str, Any], ctx: Sequence[str], **kwargs: Any) -> list[Instance]:
        """All requests of a case: per probe one ``loglikelihood`` for each target, then one ``generate_until``."""
        delimiter = self._delimiter(chat=kwargs.pop("apply_chat_template", False))
        kwargs.pop("chat_template", None)
        stops = self._stops()
        instances = []
        for idx, (number, probe, target) in enumerate(CaseAnswers.asked(doc)):
            asked = {key: probe[key] for key in ("kind", "question", "gold", "only_unedited")} | {"until": stops}
            arguments = (
                (ctx[number], deepcopy(self.config.generation_kwargs))
                if target is None
                else (ctx[number], delimiter + target)
            )
            instances.append(
                Instance(
                    request_type="generate_until" if target is None else "loglikelihood",
                    doc={**doc, "asked": asked},  # filters see one document per request: this says which probe it is
                    arguments=arguments,
                    idx=idx,
                    **kwargs,
                )
            )
        return instances

    def _delimiter(self, chat: bool) -> str:
        """What joins prompt and target; after a chat template's assistant header nothing does, as in lm-eval."""
        prefix = self.config.gen_prefix
        if chat and not (prefix and not ends_with_whitespace(prefix)):
            return ""
        return self.config.target_delimiter

    def _stops(self) -> list[str]:
        until = (self.config.generation_kwargs or {}).get("until") or []
        return [until] if isinstance(until, str) else list(until)

    # --------------------------------------------------------------- scoring

    def apply_filters(self) -> None:
        """Run the filter pipelines over the answers of all stages; ``process_results`` gets `FilteredAnswer`s.

        With ``--predict_only`` nothing is scored, so no judge is asked.
        """
        unscored = "bypass" in self._metric_fn_list
        filter_all_stages(
            self._instances, [one for one in self._filters if not (unscored and is_judge(one))], self.stages
        )

    def process_results(self, doc: Mapping[str, Any], results: Sequence[Any]) -> dict[str, Any]:
        """Every metric of one case, always under the same keys; ``None`` where unscored, with the reason beside it."""
        if "bypass" in self._metric_fn_list:  # --predict_only
            return {"bypass": None}
        case = _Case(doc, [FilteredAnswer.of(result) for result in results])
        position = case.answers[0].position
        metrics = self._reported(case.judged)
        names = [metric["metric"] for metric in metrics]
        scored = {"": self._scores(case, metrics)}
        if position and position.not_in_stream and not self.stages.score_outside:
            scored[""] = dict.fromkeys(names, Score(reason=NOT_IN_STREAM))
        for stage in self.stages.columns:
            applies = self.stages.applies_to(stage, position)
            scored[f"@{stage}"] = self._scores(case, metrics, stage) if applies else dict.fromkeys(names, Score())
        if self.stages.retention:
            scored[f"@{RETENTION}"] = self._retention(case, metrics)
        row: dict[str, Any] = {}
        reasons: dict[str, str] = {}
        for suffix, scores in scored.items():
            for metric in metrics:
                row |= _columns(metric, suffix, scores[metric["metric"]], reasons)
        edit = case.answers[0].edit
        row |= {"unscored": int(bool(reasons)), "unscored_reason": reasons, "edit": edit and edit.to_json()}
        return row | ({"judge": describe_verdicts([answer.final for answer in case.answers])} if case.judged else {})

    def _scores(
        self, case: _Case, metrics: Sequence[Mapping[str, Any]], stage: Stage | None = None
    ) -> dict[str, Score]:
        """The metrics of one case at one stage; the final one by default."""
        answers = CaseAnswers(case.doc, [answer.at(stage) for answer in case.answers])
        if case.judged:
            return {metric["metric"]: evaluate(_judge_measure(answers, metric)) for metric in metrics}
        measures: Mapping[str, Measure] = self.config.process_results(case.doc, answers)
        return {metric["metric"]: evaluate(measures[metric["metric"]]) for metric in metrics}

    def _retention(self, case: _Case, metrics: Sequence[Mapping[str, Any]]) -> dict[str, Score]:
        """The metrics of one case after its own step and every later one, as ``retention_matrix`` aggregates them."""
        names = [metric["metric"] for metric in metrics]
        first = case.answers[0]
        if first.position and first.position.not_in_stream:
            return dict.fromkeys(names, Score())
        own = first.position.step if first.position and first.position.step is not None else 0
        steps = sorted(stage for stage in first.stages if isinstance(stage, int)) or [own]
        by_step = [self._scores(case, metrics, step) for step in steps]
        found = {}
        for name in names:
            scores = [scores[name] for scores in by_step]
            values = [score.value for score in scores]
            found[name] = Score(
                value=None if values.count(None) == len(values) else {"step": own, "values": values},
                reason=next((score.reason for score in scores if score.reason is not None), None),
                excluded=any(score.excluded for score in scores),
            )
        return found

    def _reported(self, judged: bool) -> list[dict[str, Any]]:
        """The metrics of a pipeline: a judged one reports the judge's, any other one all the rest."""
        metrics = [metric for metric in self.config.metric_list if (metric.get("from") == "judge") == judged]
        if not metrics:
            raise EditingError(
                f"{self.config.task}: a filter returned verdicts, but no metric of this task says 'from: judge'; "
                "add one to its metric_list or drop the filter."
            )
        return metrics


def _asked_metrics(metric_list: Sequence[Mapping[str, Any]], settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The metrics of this run, completed with our defaults (mean over scored cases, higher is better)."""
    return [
        {"aggregation": "mean_scored", "higher_is_better": True}
        | {key: value for key, value in metric.items() if key != "only_if"}
        for metric in metric_list
        if "only_if" not in metric or switch(settings, metric["only_if"], True)
    ]


def _companions(metric: str, aggregation: Any) -> dict[str, Any]:
    """Aggregations of the columns that go with a metric.

    lm-eval knows the standard error of its own mean only. A per-case column ``<metric>_stderr`` is aggregated right
    after the metric and takes the place of lm-eval's "N/A" under the very same key.
    """
    found = {f"{metric}_n": AGGREGATIONS["total"], f"{metric}_excluded": AGGREGATIONS["total"]}
    if aggregation is AGGREGATIONS["mean_scored"]:
        found[f"{metric}_stderr"] = AGGREGATIONS["stderr_scored"]
    return found


class _Case(NamedTuple):
    """A document and its answers after one filter pipeline."""

    doc: Mapping[str, Any]
    answers: Sequence[FilteredAnswer]

    @property
    def judged(self) -> bool:
        return any(answer.judged for answer in self.answers)


def _columns(metric: Mapping[str, Any], suffix: str, score: Score, reasons: dict[str, str]) -> dict[str, Any]:
    """The columns of one metric at one stage for one case; an unscored one adds to ``reasons``."""
    name, value = metric["metric"] + suffix, score.value
    if score.reason is not None:
        reasons[name] = score.reason
    columns: dict[str, Any] = {name: value}
    if metric["aggregation"] == "mean_scored" and suffix != f"@{RETENTION}":
        columns[f"{name}_stderr"] = value
    columns[f"{name}_n"] = int(value is not None)
    if metric.get("filtered"):
        columns[f"{name}_excluded"] = int(score.excluded)
    elif score.excluded:
        raise AssertionError(f"metric {name} excludes a case but its YAML does not say filtered: true")
    return columns


def _judge_measure(answers: CaseAnswers, metric: Mapping[str, Any]) -> Measure:
    """Mean verdict over the case's judged probes of the task's own kind (helper probes are not what is measured)."""
    kind = answers.doc["probes"][0]["kind"]
    judged = [] if kind == PLACEHOLDER else answers.of(kind)
    known = [answered for answered in answers.probes if answered.probe.get("only_unedited")]

    def measure() -> float:
        value = case_mean([verdict(answered.generation) for answered in judged], "judged probes")
        if metric.get("filtered") and any(verdict(answered.generation) for answered in known):
            raise Excluded
        return value

    return measure


def _plug_in_judge(config: dict[str, Any]) -> Any | None:
    """Add the judge's pipeline to a task that declares judged metrics; results then say which judge it is."""
    if not any(metric.get("from") == "judge" for metric in config["metric_list"]):
        return None
    pipelines = list(config.get("filter_list") or [])
    if any(pipeline["name"] == PIPELINE for pipeline in pipelines):  # the task's YAML brings its own
        return None
    added, judge = judge_pipeline(config["metadata"])
    config["filter_list"] = [*pipelines, *added]
    if judge:
        config["metadata"]["judge"] = judge.describe()
    return judge
