"""EditGLUE: the classification tasks behind AlphaEdit's curves of general ability.

Prompts, labels and the reading of answers are those of the release (``glue_eval``), zero-shot. A row is answered twice:
by five generated tokens (``f1``, ``mcc``, counts) and by the likelihood of the labels (``f1_new``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lm_eval.api.instance import Instance

from edit_hooks.prompt_context import answer_separator
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.logs import get_logger
from lm_eval_tasks.common.records.benchmark import settings_of_all_benchmarks
from lm_eval_tasks.common.settings import COMMON_SETTINGS, check_settings
from lm_eval_tasks.common.task.harness import Documents, HarnessTask
from lm_eval_tasks.general_ability.rows import Row, RowSource
from lm_eval_tasks.general_ability.scores import INVALID

logger = get_logger("lm_eval.editing_tasks")

NO_COUNTS = "this model class does not report the number of tokens of a label"


@dataclass(frozen=True, kw_only=True)
class LabelTask:
    """One classification task.

    Attributes:
        source: its rows.
        prompt: row -> prompt.
        gold: row -> right class.
        labels: class -> label.
        read: (text, class) in the order of the search: an answer that contains the text has this class.
        marker: only the part of an answer after the last marker is read.
        tie: class of an answer whose likeliest labels are equally likely.
    """

    source: RowSource
    prompt: Callable[[Row], str]
    gold: Callable[[Row], int]
    labels: Sequence[str]
    read: Sequence[tuple[str, int]]
    marker: str = ""
    tie: int = 0

    def read_answer(self, text: str) -> int:
        """Class of a generated answer, :data:`INVALID` if it names no label."""
        answer = (text.split(self.marker)[-1] if self.marker else text).lower()
        return next((label for part, label in self.read if part in answer), INVALID)

    def likeliest(self, pairs: Sequence[Any]) -> int | None:
        """Class with the highest mean log-probability per token; ``None`` without token counts."""
        if any(getattr(pair, "num_tokens", None) is None for pair in pairs):
            return None
        # Probabilities are compared, as released, so two that underflow are equal.
        means = [math.exp(pair[0] / pair.num_tokens) for pair in pairs]
        best = [label for label, mean in enumerate(means) if mean == max(means)]
        return best[0] if len(best) == 1 else self.tie


class EditGlueTask(HarnessTask):
    """lm-eval task of a :class:`LabelTask`, which the YAML names under ``custom_dataset``."""

    def prepare(self, config: dict[str, Any]) -> None:
        """Check the settings that all tasks share."""
        check_settings(config["metadata"], COMMON_SETTINGS, settings_of_all_benchmarks)

    @property
    def label_task(self) -> LabelTask:
        """Rows, prompts and labels."""
        task = self.config.custom_dataset
        if not isinstance(task, LabelTask):
            raise EditingError(f"{self.config.task}: custom_dataset is {task!r}; a LabelTask is needed.")
        return task

    def dump_config(self) -> dict[str, Any]:
        """The config for the results, with data set and function by name."""
        names = {"custom_dataset": self.label_task.source.name, "process_results": score_row.__name__}
        return {**super().dump_config(), **names}

    def download(self, dataset_kwargs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Load the rows and build the documents."""
        rows, origin = self.label_task.source.load(self.config.metadata)
        task = self.label_task
        docs = [{"prompt": task.prompt(row), "gold": task.gold(row), "row": dict(row)} for row in rows]
        self.config.metadata["data_source"] = origin
        logger.info("%s: %d rows from %s", self.config.task, len(docs), origin)
        self.dataset = {self.config.test_split: Documents(docs)}

    def test_docs(self) -> Documents[dict[str, Any]]:
        """The documents."""
        return self.dataset[self.config.test_split]

    def doc_to_text(self, doc: Mapping[str, Any], doc_to_text: Any = None) -> str:
        """The prompt."""
        return doc["prompt"]

    def doc_to_target(self, doc: Mapping[str, Any], doc_to_target: Any = None) -> str:
        """The right label."""
        return self.label_task.labels[doc["gold"]]

    def construct_requests(self, doc: Mapping[str, Any], ctx: str, **kwargs: Any) -> list[Instance]:
        """One generation, then the likelihood of every label in the order of the classes."""
        template = kwargs.pop("chat_template", None)
        delimiter = answer_separator(template) if kwargs.pop("apply_chat_template", False) and template else " "
        settings = dict(self.config.generation_kwargs or {})
        generation = Instance(request_type="generate_until", doc=doc, arguments=(ctx, settings), idx=0, **kwargs)
        return [
            generation,
            *(
                Instance(request_type="loglikelihood", doc=doc, arguments=(ctx, delimiter + label), idx=idx, **kwargs)
                for idx, label in enumerate(self.label_task.labels, start=1)
            ),
        ]

    def process_results(self, doc: Mapping[str, Any], results: Sequence[Any]) -> dict[str, Any]:
        """The answered classes of one row."""
        if self.is_predict_only:
            return {"bypass": None}
        return self.config.process_results(self.label_task, doc, results)


def score_row(task: LabelTask, doc: Mapping[str, Any], results: Sequence[Any]) -> dict[str, Any]:
    """Columns of one row.

    Args:
        results: the generated text, then the answers to the labels in the order of the classes.
    """
    text, *pairs = results
    gold, answer, likeliest = doc["gold"], task.read_answer(text), task.likeliest(pairs)
    return {
        "f1": (gold, answer),
        "f1_new": (gold, likeliest),
        "mcc": (gold, answer),
        "correct": int(answer == gold),
        "incorrect": int(answer not in (gold, INVALID)),
        "invalid": int(answer == INVALID),
        "unscored_reason": {} if likeliest is not None else {"f1_new": NO_COUNTS},
    }


def _glue(name: str, subset: str, split: str, fields: Sequence[str], mini: str) -> RowSource:
    return RowSource(name=name, hub_id="nyu-mll/glue", subset=subset, split=split, fields=fields, mini=mini)


PAIR = ("sentence1", "sentence2")
YES_NO = (("yes", 1), ("no", 0))
RTE_PROMPT = "{sentence1}\nquestion: {sentence2} True or False?\nanswer:"

SST2 = LabelTask(
    source=_glue("sst2", "sst2", "validation", ["sentence"], "mini_sst2.jsonl"),
    prompt=lambda row: f"Review :{row['sentence']}\nSentiment :",
    gold=lambda row: int(row["label"]),
    labels=("negative", "positive"),
    read=(("positive", 1), ("negative", 0)),
    marker="Sentiment :",
)
MRPC = LabelTask(
    source=_glue("mrpc", "mrpc", "validation", PAIR, "mini_mrpc.jsonl"),
    prompt=lambda row: (
        "Are the sentences paraphrases of each other.\n"
        f"Sentence 1: {row['sentence1']}\nSentence 2: {row['sentence2']}\nAnswer:"
    ),
    gold=lambda row: int(row["label"]),
    labels=("No", "Yes"),
    read=YES_NO,
    marker="Answer:",
)
COLA = LabelTask(
    source=_glue("cola", "cola", "validation", ["sentence"], "mini_cola.jsonl"),
    # The space at the end is the release's; the label has another.
    prompt=lambda row: f"Is this sentence linguistically acceptable?\nSentence: {row['sentence']}\nAnswer: ",
    gold=lambda row: int(row["label"]),
    labels=("No", "Yes"),
    read=YES_NO,
    marker="Answer:",
)
RTE = LabelTask(
    source=_glue("rte", "rte", "validation", PAIR, "mini_entailment.jsonl"),
    prompt=lambda row: RTE_PROMPT.format_map(row),
    gold=lambda row: 1 - int(row["label"]),  # 0 is entailment
    labels=("False", "True"),
    read=(("false", 0), ("true", 1)),
    marker="answer:",
)
# The release takes label 1, not entailment, for "True".
RTE_INVERTED = LabelTask(**{**vars(RTE), "gold": lambda row: int(row["label"])})
NLI = LabelTask(
    source=_glue("nli", "rte", "train", PAIR, "mini_entailment.jsonl"),
    prompt=lambda row: f"{row['sentence1']} entails the {row['sentence2']} True or False? Answer:",
    gold=lambda row: int(row["label"] in (0, "entailment")),
    labels=("False", "True"),
    read=(("true", 1), ("false", 0)),
    marker="True or False? Answer:",
)
MMLU = LabelTask(
    source=RowSource(
        name="mmlu",
        hub_id="cais/mmlu",
        subset="all",
        split="validation",
        fields=["question", "subject", "choices"],
        mini="mini_mmlu.jsonl",
    ),
    prompt=lambda row: "".join(
        [
            f"Question: {row['question']}\n",
            *(f"({letter}) {choice}\n" for letter, choice in zip("ABCD", row["choices"], strict=True)),
            "Answer:",
        ]
    ),
    gold=lambda row: int(row["answer"]),
    labels=("A", "B", "C", "D"),
    read=(("a\n", 0), ("b\n", 1), ("c\n", 2), ("d\n", 3)),
    tie=INVALID,
)
