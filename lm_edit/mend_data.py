"""Training data of `mend` and `serac`, from a file or a benchmark.

It consists of edits with paraphrases and unrelated texts.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edit_hooks.training.edit_data import EditData, EditExample
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.files import sha256_of
from edit_hooks.utils.hashing import key_of
from edit_hooks.utils.json_io import read_rows
from edit_hooks.utils.numbers import require_whole
from lm_eval_tasks.common.benchmark import find_benchmark
from lm_eval_tasks.common.cases import Case
from lm_eval_tasks.common.fields import Fields
from lm_eval_tasks.common.settings import Settings

FIELDS = ("prompt", "subject", "target_new", "paraphrases", "locality")


def load_edit_data(
    source: str,
    settings: Settings,
    *,
    validation: str | None = None,
    validation_share: float = 0.1,
    num_edits: int | None = None,
) -> EditData:
    """Training and validation edits.

    A benchmark must not be evaluated on the edits trained on; the report, which goes to the manifest, identifies them.

    Args:
        source: a benchmark, or a JSON or JSONL file. Records of a file hold ``prompt`` (optionally with ``{}`` and
            ``subject``), ``target_new``, ``paraphrases`` (list of texts) and ``locality`` (list of ``prompt`` and
            ``answer``), or have the layout of MEND's zsRE files (``src``, ``alt``, ``rephrase``, ``loc``, ``loc_ans``).
        settings: for benchmarks: ``data``, ``data_revision``, ``pretrained``.
        validation: a file of validation edits; by default every n-th edit of the source is held out.
        validation_share: share of the edits to hold out, between 0 and 1.
        num_edits: use only the first edits of the source.

    Raises:
        EditingError: for unknown sources, malformed records and too few edits.
    """
    if not 0 < validation_share < 1:
        raise EditingError(f"validation share {validation_share!r}; a number between 0 and 1 is needed.")
    examples, report = _read(source, settings)
    if num_edits is not None:
        examples = examples[: require_whole("num_edits", num_edits)]
    if validation is not None:
        held_out, held_report = _read(validation, settings)
        report["validation"] = held_report
    else:
        every = max(2, round(1 / validation_share))
        held_out, examples = examples[every - 1 :: every], [e for i, e in enumerate(examples) if i % every != every - 1]
        report["validation"] = f"every {every}th edit of the source, held out"
    if not examples or not held_out:
        raise EditingError(f"{source} gives {len(examples)} training and {len(held_out)} validation edits; add some.")
    report |= {
        "num_edits": len(examples),
        "num_validation": len(held_out),
        "without_paraphrase": sum(not example.paraphrases for example in examples),
        "without_locality": sum(not example.locality for example in examples),
        "edits": key_of([[e.prompt, e.target, *e.paraphrases, *map(list, e.locality)] for e in [*examples, *held_out]]),
    }
    return EditData(examples, held_out, report)


def _read(source: str, settings: Settings) -> tuple[list[EditExample], dict[str, Any]]:
    """The edits of a source and its description for the report."""
    path = Path(source).expanduser()
    if path.suffix in (".jsonl", ".json"):
        examples = [_parse(record, where) for where, record in read_rows(path, "file of training edits")]
        return examples, {"file": path.name, "sha256": sha256_of(path)}
    loaded = find_benchmark(source, "a JSON or JSONL file").load(settings)
    return [_to_example(case) for case in loaded.records], {"benchmark": source, **loaded.source}


def _to_example(case: Case) -> EditExample:
    return EditExample(
        prompt=case.request.text,
        target=case.request.target_new,
        paraphrases=tuple(question.prompt for question in case.paraphrases),
        locality=tuple((question.prompt, question.wanted) for question in case.neighbors),
    )


def _parse(record: Any, where: str) -> EditExample:
    """One record of a file, in either layout."""
    if not isinstance(record, Mapping):
        raise EditingError(f"{where}: an edit is {record!r}; a mapping is needed.")
    fields = Fields(record, where)
    if "src" in record:
        return EditExample(
            prompt=fields.text("src"),
            target=fields.text("alt"),
            paraphrases=(fields.text("rephrase"),),
            locality=((fields.text("loc").removeprefix("nq question: "), fields.text("loc_ans")),),
        )
    if unknown := set(record) - {*FIELDS, "case_id", "target_true", "relation_id"}:
        raise EditingError(f"{where}: unknown {', '.join(sorted(unknown))!r}. Accepted: {', '.join(FIELDS)}.")
    prompt = fields.text("prompt")
    if "{}" in prompt:
        prompt = prompt.replace("{}", fields.text("subject"))
    locality = fields.objects("locality") if "locality" in record else []
    return EditExample(
        prompt=prompt,
        target=fields.text("target_new"),
        paraphrases=tuple(text for text in fields.texts("paraphrases") if text),
        locality=tuple((item.text("prompt"), item.text("answer")) for item in locality),
    )
