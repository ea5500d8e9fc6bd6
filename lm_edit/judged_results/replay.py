"""Saved answers through the task that asked for them: its filters, scores and aggregations, with a judge."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from lm_eval.api.filter import FilterEnsemble
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.evaluator import evaluate
from lm_eval.tasks import TaskManager
from lm_eval.utils import handle_non_serializable, sanitize_list

from edit_hooks.utils.errors import EditingError, first_line
from judges.base import Item
from lm_edit.results.answers.samples import read_saved_response
from lm_edit.results.files.runs import ResultFile
from lm_edit.results.files.shape import as_saved
from lm_eval_tasks.common.asking.probes import Document
from lm_eval_tasks.common.fillable import LEFT_OUT
from lm_eval_tasks.common.saved_cases import SAVED_CASES, SavedCases
from lm_eval_tasks.common.scoring.population import WRONG_JUDGE
from lm_eval_tasks.common.settings import WRITTEN
from lm_eval_tasks.common.task.harness import filter_classes
from lm_eval_tasks.common.task.judge_filter import PIPELINE, HelperJudgeFilter, ModelJudgeFilter
from lm_eval_tasks.common.task.stages import filter_all_stages
from lm_eval_tasks.common.task.task import EditingTask
from lm_eval_tasks.startup.task_folders import with_task_folders

# What a task's metadata hold of an earlier judge, and of this machine: no settings of the run.
NOT_SETTINGS = (*WRITTEN, "judge", "own_judges")

Row = Mapping[str, Any]


class JudgedTask(NamedTuple):
    """A task as its run would have written it with a judge.

    Attributes:
        columns: its entry among the results.
        config: its config.
        samples: its samples, as lm-eval saves them.
    """

    columns: dict[str, Any]
    config: dict[str, Any]
    samples: list[Row]


def another_task(file: ResultFile, task: str, difference: str) -> EditingError:
    """The error for a task that is not the one that a run had."""
    run = file.content["config"].get("edited_hf") or {}
    release = (run.get("versions") or {}).get("lm-eval-editing")
    advice = "Use the release that made the results" + (f" (lm-eval-editing {release})" if release else "")
    return EditingError(
        f"{file.path}: {task} is not the task that the run had: {difference}. {advice}, or run the task again with the "
        "judge (finished edits come from the store). No request was sent."
    )


class SavedTask:
    """The samples of one task of a run, and what they answer.

    Raises:
        EditingError: for samples that are missing, changed, or not as lm-eval saves them, and for documents of another
            layout than tasks have here.
    """

    def __init__(self, file: ResultFile, name: str) -> None:
        self.file, self.name = file, name
        located = file.samples(name)
        self.rows: list[Row] = [row for _, row in located]
        self.firsts: dict[int, Row] = {}  # document -> its first sample; further ones are of other filters
        self.docs: list[Document] = []
        self.prompts: list[list[str]] = []
        self.responses: dict[tuple[int, int], Any] = {}  # place of the document, number of the request -> answer
        self.separator: str | None = None
        for where, row in located:
            if row["doc_id"] not in self.firsts:
                with as_saved(f"{where}: not a sample as lm-eval saves it"):
                    self._read(row)

    def _read(self, row: Row) -> None:
        arguments = [(one["arg_0"], one["arg_1"]) for one in row["arguments"].values()]
        doc = Document(row["doc"])
        if not _has_layout(doc):
            raise another_task(self.file, self.name, "its documents have another layout")
        requests = doc.requests
        if not len(requests) == len(arguments) == len(row["resps"]):
            raise ValueError(f"{len(requests)} requests, {len(arguments)} prompts, {len(row['resps'])} answers")
        prompts = [""] * len(doc.probes)
        for number, (request, (prompt, argument)) in enumerate(zip(requests, arguments, strict=True)):
            prompts[request.number] = prompt
            self.responses[len(self.firsts), number] = _response(row["resps"][number][0])
            if request.target is not None and self.separator is None:
                separator = argument.removesuffix(request.target)
                self.separator = separator if separator != request.probe.separator else None
        self.docs.append(doc)
        self.prompts.append(prompts)
        self.firsts[row["doc_id"]] = row

    @property
    def saved_config(self) -> Mapping[str, Any]:
        """The config of the task in the run."""
        return self.file.task_config(self.name)

    def cases(self, separator: str | None) -> SavedCases:
        """The documents and prompts of the run."""
        source = (self.saved_config.get("metadata") or {}).get("data_source") or {}
        return SavedCases(self.docs, self.prompts, separator, list(source.get(LEFT_OUT) or ()))


def _has_layout(doc: Document) -> bool:
    """Whether the questions of a saved document have the fields that they have here."""
    try:
        return all(
            saved.keys() == probe.to_json().keys() for saved, probe in zip(doc["probes"], doc.probes, strict=True)
        )
    except (KeyError, TypeError):
        return False


def _response(saved: Any) -> Any:
    """The answer of `edited_hf`, or of a stock model class: a text, or log-probability and greediness as texts."""
    if isinstance(saved, str):
        return read_saved_response(saved)
    logprob, is_greedy = saved
    return float(logprob), str(is_greedy) == "True"


class SavedAnswers(LM):
    """A model class that gives the answers of a finished run."""

    def __init__(self, saved: SavedTask) -> None:
        super().__init__()
        self._saved = saved

    def loglikelihood(self, requests: list[Instance]) -> list[Any]:
        return [self._saved.responses[request.doc_id, request.idx] for request in requests]

    def generate_until(self, requests: list[Instance]) -> list[Any]:
        return self.loglikelihood(requests)

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[Any]:
        raise AssertionError("no editing task has such requests")


def task_files(include_paths: Sequence[str]) -> dict[str, Path]:
    """The YAML file of every task of the installed packages and of more folders, by the task's name."""
    manager = TaskManager(include_path=with_task_folders(list(include_paths)), include_defaults=False)
    return {name: entry.yaml_path for name, entry in manager.task_index.items() if entry.yaml_path is not None}


def build_task(saved: SavedTask, judge: object, known: Mapping[str, Path], separator: str | None) -> EditingTask:
    """The task of the run with a judge, on the documents of its samples.

    Args:
        judge: a choice of judge, as in ``--metadata judge=...``.
        known: the files of tasks, see :func:`task_files`.
        separator: white space between all prompts and targets, as a chat template has; ``None``: that of each question.

    Raises:
        EditingError: for a task that is not known here or cannot be built, and for a judge that a run refuses.
    """
    settings = saved.saved_config.get("metadata") or {}
    metadata = {key: value for key, value in settings.items() if key not in NOT_SETTINGS}
    metadata |= {"judge": judge, SAVED_CASES: saved.cases(separator)}
    where = f"{saved.file.path}: the task {saved.name}"
    if saved.name not in known:
        raise EditingError(
            f"{where} is not known here. Install the package of its benchmark, or name the folder of its YAML file "
            "with --include-path."
        )
    try:
        manager = TaskManager(include_defaults=False, metadata=metadata)
        task = manager.load([str(known[saved.name])])["tasks"][saved.name]
    except EditingError:
        raise
    except Exception as error:  # of code and files of other packages, which may raise anything
        raise EditingError(f"{where} cannot be built here: {first_line(error)}") from error
    if not isinstance(task, EditingTask):
        raise EditingError(f"{where} is here a {type(task).__name__}, which is no editing task.")
    if (kwargs := saved.saved_config.get("generation_kwargs")) is not None:
        task.restore_generation_kwargs(kwargs)
    return task


def judged_pipelines(task: EditingTask) -> list[FilterEnsemble]:
    """The filter pipelines in which the chosen judge decides on anything; where it selects cases, these are all."""
    if any(metric.get("population") == WRONG_JUDGE for metric in task.config.metric_list):
        return list(task.pipelines)
    return [pipeline for pipeline in task.pipelines if pipeline.name == PIPELINE]


def with_answers(task: EditingTask, saved: SavedTask) -> Sequence[Instance]:
    """The requests of the task with the answers of the run."""
    task.build_all_requests()
    answers = SavedAnswers(saved).loglikelihood(task.instances)
    for instance, answer in zip(task.instances, answers, strict=True):
        instance.resps = [answer]
    instances: Sequence[Instance] = task.instances
    return instances


class _Collect(ModelJudgeFilter):
    """Collect what the judge would be asked, and ask nothing."""

    def __init__(self, found: list[Item], concerned: type[ModelJudgeFilter], **options: Any) -> None:
        super().__init__(**options)
        self.found, self.concerned = found, concerned

    def concerns(self, probe: Mapping[str, Any]) -> bool:
        return self.concerned.concerns(self, probe)

    def apply(self, resps: Sequence[Any], docs: Sequence[Mapping[str, Any]]) -> list[Any]:
        answers, items = self.select(resps, docs)
        self.found += items.values()
        return answers


def items_to_judge(task: EditingTask, saved: SavedTask) -> list[Item]:
    """What the judge is asked about the answers of a task, at all stages."""
    found: list[Item] = []
    pipelines = [
        _with_judge_steps(pipeline, lambda step: partial(_Collect, found, step.func, **step.keywords))
        for pipeline in judged_pipelines(task)
    ]
    filter_all_stages(with_answers(task, saved), pipelines, task.stages)
    return found


def _with_judge_steps(pipeline: FilterEnsemble, change: Callable[[Any], Any]) -> FilterEnsemble:
    """The pipeline with other steps in place of those of the chosen judge."""
    steps = [change(step) if issubclass(step.func, ModelJudgeFilter) else step for step in pipeline.filters]
    return FilterEnsemble(name=pipeline.name, filters=steps)


def judge_task(task: EditingTask, saved: SavedTask) -> JudgedTask:
    """The judged pipelines of a task over the saved answers; what other pipelines gave stays as the run saved it.

    Raises:
        EditingError: if the judge cannot be used, or too few answers get a verdict.
    """
    dumped = as_json(task.dump_config())
    pipelines = judged_pipelines(task)
    names = [pipeline.name for pipeline in pipelines]
    task.use_pipelines([_with_judge_steps(one, lambda step: partial(step, are_saved=True)) for one in pipelines])
    results = evaluate(
        lm=SavedAnswers(saved),
        task_dict={"tasks": {saved.name: task}, "groups": {}},
        bootstrap_iters=saved.file.content["config"].get("bootstrap_iters"),
    )
    old, new = saved.file.tasks[saved.name], results["results"][saved.name]
    columns = {**old, **{key: value for key, value in new.items() if "," in key}}  # others are facts about the task
    samples = [row for row in saved.rows if row.get("filter") not in names]
    firsts = list(saved.firsts.values())
    samples += as_json([_as_saved(sample, firsts[sample["doc_id"]]) for sample in results["samples"][saved.name]])
    return JudgedTask(as_json(columns), _judged_config(saved.saved_config, dumped), samples)


def _as_saved(sample: dict[str, Any], first: Row) -> dict[str, Any]:
    """A sample in the form of lm-eval's files, with number, prompts and answers of a sample that the run saved."""
    kept = {name: first[name] for name in ("doc_id", "arguments", "resps")}
    return {
        **sample,
        **kept,
        "target": str(sample["target"]),
        "filtered_resps": sanitize_list(sample["filtered_resps"]),
    }


def _judged_config(saved: Mapping[str, Any], dumped: Mapping[str, Any]) -> dict[str, Any]:
    """The config of a task with what a judge adds: pipelines, metrics by pipeline, the judge's description."""
    judged = {name: dumped[name] for name in ("filter_list", "metric_list", "other_metrics", "metrics_by_filter")}
    return {**saved, **judged, "metadata": {**(saved.get("metadata") or {}), "judge": dumped["metadata"]["judge"]}}


def as_json(value: Any, default: Callable[[Any], Any] = handle_non_serializable) -> Any:
    """The value as lm-eval's files have it.

    Args:
        default: value of an object that JSON lacks.
    """
    return json.loads(json.dumps(value, default=default, ensure_ascii=False))


def plain_pipelines(task: EditingTask) -> Iterator[FilterEnsemble]:
    """The pipelines that ask no judge, each without a judge's decision on the population."""
    for pipeline in task.pipelines:
        if not any(getattr(one, "judges", False) for one in filter_classes(pipeline)):
            steps = [step for step in pipeline.filters if getattr(step, "func", step) is not HelperJudgeFilter]
            yield FilterEnsemble(name=pipeline.name, filters=steps)
