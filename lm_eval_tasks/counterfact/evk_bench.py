"""EVK-Bench: prompts of CounterFact, or of another benchmark, and CounterFact's attribute prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from edit_hooks.utils.errors import EditingError
from lm_eval_tasks.common.asking.documents import of_all_cases
from lm_eval_tasks.common.records.benchmark import Benchmark, find_benchmark
from lm_eval_tasks.common.records.cases import Case
from lm_eval_tasks.common.records.dataset import LoadedRecords
from lm_eval_tasks.common.settings import Setting, Settings
from lm_eval_tasks.counterfact.benchmark import COUNTERFACT, CounterfactCase
from lm_eval_tasks.protocols.stability import EVK_NUM_TEXTS, PROMPTS_OF, embedding_docs, text_doc


@dataclass(frozen=True, kw_only=True)
class PromptBenchmark(Benchmark[CounterfactCase]):
    """CounterFact, or the benchmark that the setting ``evk_prompts`` names."""

    def load(self, settings: Settings) -> LoadedRecords[Any]:
        return _chosen(settings).load(settings)

    def check_settings(self, settings: Settings, further: Sequence[Setting[Any]] = ()) -> None:
        chosen = _chosen(settings)
        super().check_settings(settings, further if chosen is COUNTERFACT else [*further, *chosen.declared_settings])


def _chosen(settings: Settings) -> Benchmark[Any]:
    name = PROMPTS_OF.read(settings)
    return COUNTERFACT if name is None else find_benchmark(name)


EVK_BENCH = PromptBenchmark(
    name=COUNTERFACT.name, source=COUNTERFACT.source, parse=COUNTERFACT.parse, settings=COUNTERFACT.settings
)


@of_all_cases
def evk_embedding_docs(cases: Sequence[Case], settings: Settings) -> list[dict[str, Any]]:
    """Documents of embedding stability, of the first cases."""
    return embedding_docs(cases, settings)


@of_all_cases
def evk_text_docs(cases: Sequence[Case], settings: Settings) -> list[dict[str, Any]]:
    """Documents of text stability, of the first attribute prompts.

    Raises:
        EditingError: the records have no attribute prompts.
    """
    room = EVK_NUM_TEXTS.read(settings)
    docs = []
    for case in cases:
        if not isinstance(case, CounterfactCase):
            raise EditingError(
                f"evk_prompts={PROMPTS_OF.read(settings)}: its records have no attribute prompts, which text stability "
                "asks; only CounterFact's nested layout has them. Run counterfact_evk_es alone, or drop evk_prompts."
            )
        if room == 0:
            break
        prompts = case.attribute_prompts[:room]
        docs.append(text_doc(case, prompts, settings))
        room -= len(prompts)
    return docs
