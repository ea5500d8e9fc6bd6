"""Training data of editors, from a file or a benchmark.

It consists of edits with paraphrases and unrelated texts. All edits of a prompt are either trained on or held out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from math import ceil, floor
from pathlib import Path
from typing import Any

from edit_hooks.training.edit_data import EditData, EditExample
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.logs import get_logger
from edit_hooks.utils.settings.numbers import require_whole
from edit_hooks.utils.storage.files import names_file, sha256_of, user_path
from edit_hooks.utils.storage.hashing import key_of
from edit_hooks.utils.storage.json_io import JSON_SUFFIXES, read_rows
from lm_eval_tasks.common.records.benchmark import load_cases
from lm_eval_tasks.common.records.cases import Case, OmittedRecord
from lm_eval_tasks.common.records.fields import Fields
from lm_eval_tasks.common.settings import SEPARATOR, Settings
from lm_eval_tasks.zsre.benchmark import LOCALITY_PREFIX, counterfactual_answer

logger = get_logger("lm_eval.edited_hf")

WHAT = "file of training edits"


def load_edit_data(
    source: str,
    settings: Settings,
    *,
    validation: str | None = None,
    validation_share: float = 0.1,
    num_edits: int | None = None,
) -> EditData:
    """Training and validation edits, each distinct one once.

    A benchmark must not be evaluated on the edits trained on; the report, which goes to the manifest, identifies them.

    Args:
        source: a benchmark, or a JSON or JSONL file of its records. Of MEND's zsRE files (``src``, ``alt``,
            ``rephrase``, ``loc``, ``loc_ans``), records with an empty ``alt`` are left out as in the benchmark
            ``zsre``, and counted in the report.
        settings: for benchmarks: ``data``, ``data_revision``, ``pretrained``; for both: ``separator``, that of records
            without one of their own.
        validation: a file of validation edits; their prompts are not trained on. By default edits of the source are
            held out, at even distances.
        validation_share: share of the edit prompts to hold out, between 0 and 1.
        num_edits: use only the first edits of the source.

    Raises:
        EditingError: for unknown sources, malformed records and too few edits.
    """
    if not 0 < validation_share < 1:
        raise EditingError(f"validation share {validation_share!r}; a number between 0 and 1 is needed.")
    examples, report = _read_distinct(source, settings)
    if num_edits is not None:
        examples = examples[: require_whole("num_edits", num_edits)]
    if validation is not None:
        held_out, report["validation"] = _read_distinct(validation, settings)
        held = {example.prompt for example in held_out}
        if shared := sum(example.prompt in held for example in examples):
            report["left_out_for_validation"] = shared
    else:
        share = Fraction(validation_share).limit_denominator(10**9)
        held = _prompts_to_hold_out(examples, share)
        held_out = [example for example in examples if example.prompt in held]
        rule = f"every {share.denominator}th edit" if share.numerator == 1 else f"a share of {float(share):g}"
        report["validation"] = f"{rule} of the source, held out"
    examples = [example for example in examples if example.prompt not in held]
    if not examples or not held_out:
        hint = "add edits, or name a file with --validation"
        if validation is None and not held_out and (num_prompts := len({example.prompt for example in examples})) > 1:
            hint = (
                f"a share of {validation_share:g} of {num_prompts} prompts is less than one: give --validation-share "
                f"{ceil(100 / num_prompts) / 100:g} or more, name a file with --validation, or add edits"
            )
        raise EditingError(f"{source} gives {len(examples)} training and {len(held_out)} validation edits; {hint}.")
    report |= {
        "num_edits": len(examples),
        "num_validation": len(held_out),
        "without_paraphrase": sum(not example.paraphrases for example in examples),
        "without_locality": sum(not example.locality for example in examples),
        "edits": key_of([_content(example) for example in [*examples, *held_out]]),
    }
    return EditData(examples, held_out, report)


def _read_distinct(source: str, settings: Settings) -> tuple[list[EditExample], dict[str, Any]]:
    """The distinct edits of a source in its order, and its description for the report."""
    examples, report = _read(source, settings)
    distinct = list(dict.fromkeys(examples))
    return distinct, report | ({"repeated": len(examples) - len(distinct)} if len(distinct) < len(examples) else {})


def _prompts_to_hold_out(examples: Sequence[EditExample], share: Fraction) -> set[str]:
    """This share of the prompts, at even distances."""
    prompts = dict.fromkeys(example.prompt for example in examples)
    return {one for number, one in enumerate(prompts) if floor((number + 1) * share) > floor(number * share)}


def _read(source: str, settings: Settings) -> tuple[list[EditExample], dict[str, Any]]:
    """The edits of a source and its description for the report."""
    if names_file(source) and (path := user_path(source, WHAT)).suffix in JSON_SUFFIXES:
        rows = read_rows(path, WHAT)
        if isinstance(rows[0][1], Mapping) and "src" in rows[0][1]:
            return _read_zsre(path, rows, SEPARATOR.read(settings))
    loaded = load_cases(source, settings)
    examples = [example for case in loaded.records for example in _to_examples(case)]
    return examples, {"benchmark": source, **loaded.source}


def _content(example: EditExample) -> list[Any]:
    """What the digest of the edits covers; the separator of the texts' scripts belongs to the texts."""
    own = [] if example.separator is None else [{"separator": example.separator}]
    return [example.prompt, example.target, *example.paraphrases, *map(list, example.locality), *own]


def _read_zsre(
    path: Path, rows: Sequence[tuple[str, Any]], separator: str | None
) -> tuple[list[EditExample], dict[str, Any]]:
    """The edits of MEND's zsRE files; those of its training part lack fields that the benchmark needs."""
    examples: list[EditExample] = []
    left_out: Counter[str] = Counter()
    for where, record in rows:
        if not isinstance(record, Mapping):
            raise EditingError(f"{where}: an edit is {record!r}; a mapping is needed.")
        try:
            example = _parse_zsre(Fields(record, where))
            examples.append(replace(example, separator=separator) if example.separator is None else example)
        except OmittedRecord as reason:
            left_out[str(reason)] += 1
    report: dict[str, Any] = {"file": path.name, "sha256": sha256_of(path)}
    if left_out:
        report["left_out"] = dict(left_out)
        counts = ", ".join(f"{count} ({reason})" for reason, count in left_out.items())
        logger.warning("%s: records left out: %s", path.name, counts)
    return examples, report


def _to_examples(case: Case) -> Iterator[EditExample]:
    """All edits of a case; its paraphrases and neighbors are those of the first."""
    yield EditExample(
        prompt=case.request.text,
        target=case.request.target_new,
        paraphrases=tuple(question.prompt for question in case.paraphrases),
        locality=tuple((question.prompt, question.wanted) for question in case.neighbors),
        separator=case.request.separator,
    )
    for request in case.further_requests:
        yield EditExample(prompt=request.text, target=request.target_new, separator=request.separator)


def _parse_zsre(fields: Fields) -> EditExample:
    """A record of MEND's zsRE files; subject and true answer are not needed here.

    Raises:
        OmittedRecord: as the benchmark ``zsre``.
    """
    rephrase = fields.text_or_empty("rephrase") if fields.has("rephrase") else ""
    return EditExample(
        prompt=fields.text("src"),
        target=counterfactual_answer(fields),
        paraphrases=(rephrase,) if rephrase else (),
        locality=((fields.text("loc").removeprefix(LOCALITY_PREFIX), fields.text("loc_ans")),),
    )
