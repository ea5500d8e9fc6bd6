"""Small tasks of lm-eval's own kinds, written as a user would write them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lm_eval
from lm_eval.tasks import TaskManager

import lm_eval_tasks

ROWS = """
import datasets

ROWS = [
    {"q": "Port Elna is the capital of", "choices": ["Dravonia", "Ostravia", "Velmaria"], "gold": 1},
    {"q": "Lake Odra lies in", "choices": ["Velmaria", "Dravonia"], "gold": 1},
    {"q": "The king of Ostravia was", "choices": ["Orlan", "Karsk"], "gold": 0},
    {"q": "They walked to", "choices": ["market", "Velmar", "Karska"], "gold": 2},
    {"q": "Velm is known for", "choices": ["bread", "ships"], "gold": 0},
]

def load(**kwargs):
    rows = datasets.Dataset.from_list(ROWS)
    return {"test": rows, "train": rows}

def label_of(doc, results):
    likeliest = max(range(len(results)), key=lambda index: results[index][0])
    return {"macro": (doc["gold"], likeliest), "missing": None}

def macro(items):
    return sum(gold == label for gold, label in items) ** 2 / len(items)

def nothing(items):
    return None
"""

BASE = """
custom_dataset: !function rows.load
test_split: test
fewshot_split: train
num_fewshot: 2
doc_to_text: "{{q}}"
doc_to_target: gold
metadata: {version: 1.0}
"""

TASKS = {
    "tiny_choice": "output_type: multiple_choice\ndoc_to_choice: choices\n"
    "metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]\n",
    "tiny_other_choice": "output_type: multiple_choice\ndoc_to_choice: choices\nnum_fewshot: 0\n"
    "metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]\n",
    "tiny_text": "output_type: generate_until\ndoc_to_target: '{{choices[gold]}}'\n"
    "generation_kwargs: {until: ['.'], max_gen_toks: 5}\n"
    "metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]\n",
    "tiny_perplexity": "output_type: loglikelihood_rolling\ndoc_to_text: ''\ndoc_to_target: '{{q}}'\nnum_fewshot: 0\n"
    "metric_list: [{metric: word_perplexity, aggregation: weighted_perplexity, higher_is_better: false}]\n",
    "tiny_macro": "output_type: multiple_choice\ndoc_to_choice: choices\nprocess_results: !function rows.label_of\n"
    "metric_list: [{metric: macro, aggregation: !function rows.macro, higher_is_better: true},"
    " {metric: missing, aggregation: !function rows.nothing, higher_is_better: true}]\n",
}

GROUP = """
group: tiny_group
task: [tiny_choice, tiny_other_choice]
aggregate_metric_list: [{metric: acc, aggregation: mean, weight_by_size: true}]
metadata: {version: 1.0}
"""


def write_tasks(folder: Path) -> Path:
    """The YAML files of the tasks and their group."""
    (folder / "rows.py").write_text(ROWS, encoding="utf-8")
    for name, text in TASKS.items():
        lines = dict(line.split(": ", 1) for line in (BASE + text).strip().splitlines())
        body = "".join(f"{key}: {value}\n" for key, value in lines.items())
        (folder / f"{name}.yaml").write_text(f"task: {name}\n{body}", encoding="utf-8")
    (folder / "group.yaml").write_text(GROUP, encoding="utf-8")
    return folder


def run_tasks(lm: Any, folder: Path, tasks: list[str], settings: dict[str, Any], **options: Any) -> dict[str, Any]:
    """`simple_evaluate` on tasks of the folder and on ours."""
    manager = TaskManager(
        include_path=[str(Path(lm_eval_tasks.__file__).parent), str(folder)], include_defaults=False, metadata=settings
    )
    return lm_eval.simple_evaluate(model=lm, tasks=tasks, task_manager=manager, **{"bootstrap_iters": 0, **options})
