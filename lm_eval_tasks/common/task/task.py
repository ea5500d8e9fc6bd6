"""`EditingTask`: one lm-eval task class for all editing benchmarks.

A task's YAML uses four keys of lm-eval in a special way:

- ``custom_dataset``: the :class:`~lm_eval_tasks.common.records.benchmark.Benchmark`.
- ``process_docs``: ``(case, settings) -> document``, made with
  :func:`~lm_eval_tasks.common.asking.probes.case_doc`; or a builder of all documents
  (:mod:`lm_eval_tasks.common.asking.documents`).
- ``process_results``: ``(doc, answers) -> {metric: measure}``, where ``answers`` is a
  :class:`~lm_eval_tasks.common.asking.probes.CaseAnswers` and a measure is a function without arguments. Judged
  metrics are not among them: their value is the mean verdict over the case's own probes.
- ``metric_list``: the metrics of that mapping. Besides lm-eval's keys, ``only_if: <setting>`` drops a metric where the
  setting is off (``only_if: {<setting>: <value>}`` where it has another value), ``only_with`` and ``only_without``
  where a setting has no value or has one, ``rate: false`` marks one that is no share of successes (it has no columns
  ``<metric>_or_0`` and ``<metric>_zeroed``), ``model: unedited`` one that no editor can move, which has no direction
  either, ``filtered`` one from which cases are excluded, and which (:mod:`lm_eval_tasks.common.scoring.metric_list`),
  ``filtered_by: population`` one with a second column over the run's population
  (:mod:`lm_eval_tasks.common.scoring.population`), ``from: judge`` one that only judged pipelines report
  (:mod:`lm_eval_tasks.common.task.judge_filter`), and ``headline`` is the place of the metric in the
  printed table (:mod:`lm_eval_tasks.report.printing.printed_columns`), and ``chance`` and ``role`` are what
  :mod:`lm_eval_tasks.report.printing.anomalies` checks.

``settings`` is the task's ``metadata``, into which lm-eval merges ``--model_args`` and ``--metadata``. In a stream of
edits the same scorer runs on the answers of every stage (:mod:`lm_eval_tasks.common.task.stages`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.registry import register_aggregation
from lm_eval.api.utils import ends_with_whitespace

import lm_eval_tasks.common.task.filters  # noqa: F401  # registers natural_stop, which the YAML names
from edit_hooks.answers import Stage
from edit_hooks.prompt_context import SPACE, ChatTemplate, answer_separator
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.logs import get_logger
from edit_hooks.utils.settings.options import check_generation_kwargs
from lm_eval_tasks.common.asking.answers import NOT_IN_STREAM
from lm_eval_tasks.common.asking.documents import build_documents
from lm_eval_tasks.common.asking.generation import (
    after_prompt,
    follow_task,
    further_stops,
    generation_arguments,
    own_decodings,
    refuse_generation_kwargs,
    stop_strings,
    stops_of_scripts,
)
from lm_eval_tasks.common.asking.probes import (
    OWN_CHAT,
    PLACEHOLDER,
    CaseAnswers,
    Document,
    case_requests,
    mark_unusable,
)
from lm_eval_tasks.common.fillable import LEFT_OUT, unfillable
from lm_eval_tasks.common.records.benchmark import Benchmark
from lm_eval_tasks.common.saved_cases import take_saved_cases
from lm_eval_tasks.common.scoring.aggregation import AGGREGATIONS, edit_facts
from lm_eval_tasks.common.scoring.breakdown import (
    CATEGORIES,
    breakdown_fields,
    breakdown_row,
    prepare,
)
from lm_eval_tasks.common.scoring.measures import Measure, Score, case_mean, evaluate, judged_correct
from lm_eval_tasks.common.scoring.metric_list import is_rate, select_metrics
from lm_eval_tasks.common.scoring.population import restrict
from lm_eval_tasks.common.task.columns import SUMMARY_COLUMNS, DeclaredColumn, case_columns, columns_of_metric
from lm_eval_tasks.common.task.harness import Documents, HarnessTask
from lm_eval_tasks.common.task.judge_filter import add_judge, describe_verdicts
from lm_eval_tasks.common.task.stages import (
    RETENTION,
    StreamStages,
    filter_all_stages,
    is_judge,
)

logger = get_logger("lm_eval.editing_tasks")

# The one side effect of importing this package that is needed: YAML names aggregations by their registered name.
for _name, _function in AGGREGATIONS.items():
    register_aggregation(_name)(_function)


def log_source(benchmark: str, num_cases: int, source: Mapping[str, Any]) -> None:
    """Log where cases come from and what is unusual about them, once for neighboring tasks that share them."""
    facts = {**source, "sha256": str(source.get("sha256", ""))[:12]}
    counted = [f"{name} {value}" for name, value in facts.items() if value and name not in ("data", "records")]
    line = f"{benchmark}: {num_cases} cases of {source.get('data')} data ({', '.join(counted)})"
    if line not in _logged:
        _logged[:] = [line]
        logger.info(line)


# The last line of `log_source`: the tasks of a group are built one after another.
_logged: list[str] = []


class EditingTask(HarnessTask):
    """An lm-eval task whose documents are edit cases.

    One document holds one edit and all its probes of one kind.
    """

    def __init__(
        self,
        data_dir: str | None = None,
        cache_dir: str | None = None,
        download_mode: Any = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(data_dir, cache_dir, download_mode, config)
        self._leave_out_unfillable()
        self.decodings, self.has_own_generation_kwargs = own_decodings(self.test_docs()), True
        self.protocol_stops = self._stops()
        self._declare_columns()

    def prepare(self, config: dict[str, Any]) -> None:
        """Check the settings; read from them which metrics, stages and judge the task has.

        Raises:
            EditingError: for settings that are not accepted, and for demonstrations.
        """
        if isinstance(benchmark := config.get("custom_dataset"), Benchmark):
            benchmark.check_settings(config["metadata"])
        self.saved = take_saved_cases(config["metadata"])
        config["metric_list"] = select_metrics(config["metric_list"], config["metadata"])
        if config.get("num_fewshot"):
            raise EditingError(
                f"{config.get('task')}: num_fewshot={config['num_fewshot']}, but demonstrations are not part of the "
                "editing protocols. Use 0 (in-context editing is an editor, not a prompt format)."
            )
        if config.get("target_delimiter") not in (None, SPACE):
            raise EditingError(
                f"{config.get('task')}: target_delimiter={config['target_delimiter']!r} would join questions and their "
                "answers, and leave edits alone. Use the setting separator, or the field separator of a record."
            )
        self.stages = StreamStages.of(config["metadata"])
        self.judge = add_judge(config)
        self.breakdown = breakdown_fields(config["metadata"])

    def _leave_out_unfillable(self) -> None:
        """Drop the metrics that no record can fill, and record their names with the data source."""
        if self.saved:
            self.drop_metrics(self.saved.left_out)
            return
        source = self.config.metadata["data_source"]
        if names := unfillable(self.test_docs(), self.config.metric_list, self._measures):
            self.drop_metrics(names)
            source[LEFT_OUT] = names
            logger.info("%s: no record can fill %s; left out", self.config.task, ", ".join(names))

    def _declare_columns(self) -> None:
        """Declare the aggregation of every column: the metrics, their stages, counts and standard errors."""
        directions = dict(self.higher_is_better())
        rates = {metric["metric"] for metric in self.config.metric_list if is_rate(metric)}
        columns = list(SUMMARY_COLUMNS)
        for name, aggregation in self.aggregation().items():
            metric = DeclaredColumn(name, aggregation, directions[name])
            columns += columns_of_metric(metric, self.stages, self.breakdown, rate=name in rates)
        for column in columns:
            self.add_column(column.name, column.aggregation, higher_is_better=column.higher_is_better)

    def dump_config(self) -> dict[str, Any]:
        """The config for the results and for lm-eval's loggers, with functions by name.

        It is the same in every run and on every machine. ``metric_list`` has the metrics of all samples, and
        ``other_metrics`` the rest; those of each filter pipeline are in ``metrics_by_filter``, and the values of the
        benchmark's settings, with defaults, in ``settings``.
        """
        config = super().dump_config()
        if not self.is_predict_only:
            by_filter = {
                pipeline.name: [metric["metric"] for metric in self._reported_metrics(is_judge(pipeline))]
                for pipeline in self.pipelines
            }
            # The loggers look up every metric of the list in every sample, whichever filter the sample is of.
            everywhere = set.intersection(*map(set, by_filter.values()))
            for key, wanted in (("metric_list", True), ("other_metrics", False)):
                config[key] = [one for one in self.config.metric_list if (one["metric"] in everywhere) is wanted]
            config["metrics_by_filter"] = by_filter
        # For likelihoods the loggers expect pairs; our answers are objects that print as JSON, as texts are logged.
        config["output_type"] = "generate_until"
        if self.decodings:
            config["decodings"] = self.decodings
            if self.has_own_generation_kwargs:
                del config["generation_kwargs"]  # at most helpers follow them
        if self._stops() == self.protocol_stops and (added := further_stops(self.test_docs(), self.protocol_stops)):
            config["stops_by_script"] = added
        config["settings"] = self.benchmark.resolved_settings(self.config.metadata)
        config.pop("fewshot_config", None)  # repeats fields of the config; printing it would show memory addresses
        config["custom_dataset"] = self.benchmark.name
        for key in ("process_docs", "process_results"):
            if callable(function := self.get_config(key)):
                config[key] = function.__name__
        return config

    # ------------------------------------------------------------------ data

    @property
    def benchmark(self) -> Benchmark[Any]:
        """The benchmark that the YAML names.

        Raises:
            EditingError: if it names something else.
        """
        benchmark = self.config.custom_dataset
        if not isinstance(benchmark, Benchmark):
            raise EditingError(
                f"{self.config.task}: custom_dataset is {benchmark!r}; a Benchmark is needed, as in "
                "'custom_dataset: !function my_package.benchmark.MY_BENCHMARK'."
            )
        return benchmark

    def download(self, dataset_kwargs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Load and check all records and build the documents.

        Their origin goes to the config's metadata.
        """
        if self.saved:
            self.dataset = {self.config.test_split: Documents(map(Document.of, self.saved.docs))}
            return
        settings = self.config.metadata
        loaded = self.benchmark.load(settings)
        built = build_documents(self.config.process_docs, loaded.records, settings)
        docs = Documents(Document(mark_unusable(doc)) for doc in built)
        settings["data"] = loaded.source["data"]
        with_ids = loaded.all_records if CATEGORIES in self.benchmark.declared_settings else ()
        settings["data_source"] = loaded.source | prepare(docs, settings, with_ids)
        log_source(self.benchmark.name, len(docs), loaded.source)
        self.dataset = {self.config.test_split: docs}

    def test_docs(self) -> Documents[Document]:
        """The documents; ``process_docs`` has been applied."""
        return self.dataset[self.config.test_split]

    def doc_to_text(self, doc: Mapping[str, Any], doc_to_text: Any = None) -> str:
        """The prompt of a probe; for a case, that of its first (``--write_out``)."""
        return doc["prompt"] if "prompt" in doc else doc["probes"][0]["prompt"]

    def doc_to_target(self, doc: Mapping[str, Any], doc_to_target: Any = None) -> str:
        """The wanted answer of a probe; for a case, that of its first (``target``)."""
        probe = doc if "prompt" in doc else doc["probes"][0]
        return probe["targets"][0] if probe["targets"] else probe["gold"]

    # -------------------------------------------------------------- requests

    @property
    def follows_generation_kwargs(self) -> bool:
        """Whether a question is generated with settings of the task."""
        return follow_task(self.test_docs())

    def set_config(self, key: str, value: Any, update: bool = False) -> None:
        """Set a field of the configuration; lm-eval sets ``generation_kwargs`` with it where ``--gen_kwargs`` is given.

        Raises:
            EditingError: for such settings if every question has its own.
        """
        if key == "generation_kwargs" and value:
            names = [setting.name for setting in self.benchmark.declared_settings]
            refuse_generation_kwargs(self.config.task, value, self.decodings, names)
            if not self.follows_generation_kwargs:
                return  # the run says so: run_options.unused_generation_settings
            self.has_own_generation_kwargs = False
        super().set_config(key, value, update)

    def restore_generation_kwargs(self, saved: Mapping[str, Any]) -> None:
        """Set the ``generation_kwargs`` that a finished run recorded, which are no option of a user."""
        if saved != self.config.generation_kwargs:
            self.has_own_generation_kwargs = False
            super().set_config("generation_kwargs", deepcopy(dict(saved)))

    def build_all_requests(
        self,
        *,
        limit: int | None = None,
        samples: list[int] | None = None,
        rank: int = 0,
        world_size: int = 1,
        **kwargs: Any,
    ) -> None:
        """Build the requests after a check of the generation settings.

        With more processes than documents some processes have no document, which lm-eval cannot run. Such a process
        answers the first document, too, and lm-eval discards its answers.

        Args:
            samples: of ``--samples``, sorted in place: lm-eval asks these documents once each, in the order of the
                data, and reads their numbers from the list.
        """
        if samples:
            samples[:] = sorted(set(samples))
        check_generation_kwargs(self.config.generation_kwargs or {})  # after lm-eval has merged --gen_kwargs into them
        if rank and not any(self.doc_iterator(rank=rank, limit=limit, samples=samples, world_size=world_size)):
            rank, world_size, limit, samples = 0, 1, 1, samples[:1] if samples else samples
        super().build_all_requests(limit=limit, samples=samples, rank=rank, world_size=world_size, **kwargs)

    def fewshot_context(self, doc: Mapping[str, Any], num_fewshot: int = 0, **kwargs: Any) -> list[str]:
        """One context per probe, each built by lm-eval.

        lm-eval adds system instruction, description and chat template.

        Raises:
            EditingError: for a second chat template around prompts that have one.
        """
        if self.saved:
            return self.saved.prompts_of(doc)
        if (own := doc.get(OWN_CHAT)) and (kwargs.get("apply_chat_template") or kwargs.get("system_instruction")):
            raise EditingError(
                f"{own} writes a chat with a system prompt of its own; drop --apply_chat_template and "
                "--system_instruction, or use wild_context=question_only with them."
            )
        return [super(EditingTask, self).fewshot_context(probe, num_fewshot, **kwargs) for probe in doc["probes"]]

    def construct_requests(self, doc: Mapping[str, Any], ctx: Sequence[str], **kwargs: Any) -> list[Instance]:
        """All requests of a case.

        A probe has one ``loglikelihood`` for each target, then one ``generate_until``.
        """
        chat_template = kwargs.pop("chat_template", None)
        of_template = self._separator(chat_template if kwargs.pop("apply_chat_template", False) else None)
        of_task = self._stops()
        by_script = of_task == self.protocol_stops
        instances = []
        for idx, request in enumerate(case_requests(doc)):
            probe, target = request.probe, request.target
            separator = str(probe.separator) if of_template is None else of_template
            decoding = after_prompt(request.decoding, separator)
            stops = stops_of_scripts(of_task, probe.question, probe.gold) if by_script else of_task
            asked = request.asked_fields(decoding, stop_strings(decoding, stops))
            context = ctx[request.number]
            added = stops if stops != of_task else None
            arguments = (
                (context, generation_arguments(self.config.generation_kwargs, decoding, added))
                if target is None
                else (context, separator + target)
            )
            instances.append(
                Instance(
                    request_type="generate_until" if target is None else "loglikelihood",
                    doc={**doc, "asked": asked},  # a filter gets one document per request, not one per case
                    arguments=arguments,
                    idx=idx,
                    **kwargs,
                )
            )
        return instances

    def _separator(self, chat_template: ChatTemplate | None) -> str | None:
        """The white space between all prompts and targets; ``None``: that of each question.

        After the assistant's header of a chat template it is what edits have there, not nothing as in lm-eval: after
        ``[/INST]`` the model's own answers begin with a space.
        """
        if self.saved and self.saved.separator is not None:
            return self.saved.separator
        prefix = self.config.gen_prefix
        if chat_template is None or (prefix and not ends_with_whitespace(prefix)):
            return None
        return "" if prefix else answer_separator(chat_template)

    def _stops(self) -> list[str]:
        until = (self.config.generation_kwargs or {}).get("until") or []
        stops = [until] if isinstance(until, str) else until
        if not isinstance(stops, (list, tuple)) or not all(isinstance(stop, str) for stop in stops):
            raise EditingError(f"{self.config.task}: until={until!r}; a text or a list of texts is needed.")
        return list(stops)

    # --------------------------------------------------------------- scoring

    def apply_filters(self) -> None:
        """Run the filter pipelines over the answers of all stages.

        ``process_results`` gets `EditedAnswer` objects.

        With ``--predict_only`` nothing is scored, so judges are skipped.
        """
        pipelines = [pipeline for pipeline in self.pipelines if not (self.is_predict_only and is_judge(pipeline))]
        filter_all_stages(self.instances, pipelines, self.stages)

    def process_results(self, doc: Mapping[str, Any], results: Sequence[Any]) -> dict[str, Any]:
        """All metrics of one case, always under the same keys.

        An unscored metric is ``None``, with its reason under ``unscored_reason``.
        """
        if self.is_predict_only:
            return {"bypass": None}
        case = CaseAnswers(doc, results)
        position = case.lead.position
        metrics = self._reported_metrics(case.judged)
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
                row |= case_columns(metric, suffix, scores[metric["metric"]], reasons)
        for name in names:
            row |= breakdown_row(name, self.breakdown, doc, scored[""][name])
        row |= {"unscored": int(bool(reasons)), "unscored_reason": reasons}
        questions = [probe.question or probe.prompt for probe in case.doc.probes]
        row["edit"] = edit_facts(case.lead.edit, case.contexts, questions)
        return row | ({"judge": describe_verdicts([result.final for result in case.results])} if case.judged else {})

    def _scores(
        self, case: CaseAnswers, metrics: Sequence[Mapping[str, Any]], stage: Stage | None = None
    ) -> dict[str, Score]:
        """The metrics of one case at one stage; the final one by default."""
        if reason := case.doc.get("unusable"):
            return {metric["metric"]: Score(reason=reason) for metric in metrics}
        answers = case.at(stage)
        measures = self._measures(answers.doc, answers, metrics)
        scores = {}
        for metric in metrics:
            score = evaluate(restrict(measures[metric["metric"]], metric, answers))
            scores[metric["metric"]] = score.weighted() if metric.get("weighted") else score
        return scores

    def _measures(
        self, doc: Mapping[str, Any], answers: CaseAnswers, metrics: Sequence[Mapping[str, Any]]
    ) -> Mapping[str, Measure]:
        """The measures of some metrics of a case, over all cases."""
        judged = [metric for metric in metrics if metric.get("from") == "judge"]
        found = dict.fromkeys((metric["metric"] for metric in judged), _mean_verdict(answers))
        if len(judged) < len(metrics):
            scored = self.config.process_results(doc, answers)
            others = (metric for metric in metrics if metric not in judged)
            found |= {metric["metric"]: scored[metric.get("over", metric["metric"])] for metric in others}
        return found

    def _retention(self, case: CaseAnswers, metrics: Sequence[Mapping[str, Any]]) -> dict[str, Score]:
        """The metrics of one case after its own and every later step.

        Values have the form that `retention_matrix` aggregates.
        """
        names = [metric["metric"] for metric in metrics]
        first = case.lead
        if first.position and first.position.step is None:
            return dict.fromkeys(names, Score())
        own = first.position.step if first.position and first.position.step is not None else 0
        steps = sorted(stage for stage in first.stages if isinstance(stage, int)) or [own]
        by_step = [self._scores(case, metrics, step) for step in steps]
        retention = {}
        for name in names:
            scores = [scores[name] for scores in by_step]
            values = [score.value for score in scores]
            retention[name] = Score(
                value=None if values.count(None) == len(values) else {"step": own, "values": values},
                reason=next((score.reason for score in scores if score.reason is not None), None),
                excluded=any(score.excluded for score in scores),
            )
        return retention

    def _reported_metrics(self, judged: bool) -> list[dict[str, Any]]:
        """The metrics of a pipeline: judged ones, or all others."""
        metrics = [metric for metric in self.config.metric_list if (metric.get("from") == "judge") == judged]
        if not metrics:
            raise EditingError(
                f"{self.config.task}: a filter returned verdicts, but no metric of this task has 'from: judge'; "
                "add one to its metric_list or drop the filter."
            )
        return metrics


def _mean_verdict(answers: CaseAnswers) -> Measure:
    """Mean verdict over the case's probes of the task's own kind; helper probes only decide on exclusion."""
    kind = answers.probes[0].probe.kind
    own = [] if kind == PLACEHOLDER else answers.of_kind(kind)
    return lambda: case_mean([judged_correct(answered.generation) for answered in own], "judged probes")
