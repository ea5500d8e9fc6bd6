"""MyBenchmark: its files and the published schema."""

from __future__ import annotations

from pathlib import Path

from edit_hooks import EditRequest
from lm_eval_tasks import POPULATION, Benchmark, Case, Fields, Question, Source
from lm_eval_tasks.protocols.likelihood import GENERATE
from lm_eval_tasks.protocols.wild import WILD_CONTEXT


def parse(fields: Fields, row: int) -> Case:
    """Check and convert a record: an edit, rewordings of its prompt, and prompts of other facts."""
    new, true = fields.text("target_new"), fields.text("target_true")
    request = EditRequest.from_dict(
        {
            "prompt": fields.text("prompt"),
            "subject": fields.text("subject"),
            "target_new": new,
            "target_true": true,
            "case_id": str(row),
        },
        where=fields.where,
    )
    return Case(
        request=request,
        paraphrases=[Question(prompt, wanted=new, other=true) for prompt in fields.texts("paraphrases")],
        neighbors=[Question(prompt, wanted=true, other=new) for prompt in fields.texts("neighbors")],
    )


MY_BENCHMARK = Benchmark(
    name="my_benchmark",
    source=Source(
        title="MyBenchmark",
        hub_id="owner/my-benchmark",
        files=("my_benchmark.jsonl",),
        mini=Path(__file__).parent / "data" / "mini.jsonl",
    ),
    parse=parse,
    settings=(GENERATE, POPULATION, WILD_CONTEXT),  # every setting that your tasks read
)

BENCHMARKS = (MY_BENCHMARK,)
