"""Edits with rewordings and unrelated texts, for training hyper-networks: from a file or from a benchmark's records."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from edit_hooks.training.edit_data import EditData, EditExample
from edit_hooks.utils.errors import EditingError, near_misses
from edit_hooks.utils.hashing import key_of
from lm_eval_tasks.common.dataset import Loaded, read_rows
from lm_eval_tasks.common.fields import Fields

FIELDS = ("prompt", "subject", "target_new", "paraphrases", "locality")


def load_edit_data(
    source: str,
    settings: Mapping[str, Any],
    *,
    validation: str | None = None,
    validation_share: float = 0.1,
    num_edits: int | None = None,
) -> EditData:
    """Training and validation edits.

    Args:
        source: a JSON(L) file or a benchmark (one of :data:`BENCHMARKS`). Lines hold ``prompt`` (maybe with ``{}`` and
            ``subject``), ``target_new``, ``paraphrases`` (list of texts) and ``locality`` (list of ``prompt`` and
            ``answer``), or are laid out as MEND's zsRE files (``src``, ``alt``, ``rephrase``, ``loc``, ``loc_ans``).
        settings: of a benchmark: ``data``, ``data_revision``, ``pretrained``.
        validation: a file of validation edits; without one, every so many-th edit of the source is held out.
        validation_share: share of the edits held out.
        num_edits: only the first so many.

    A benchmark must not be evaluated on the edits trained on; the report (it goes to the manifest) says which they are.

    Raises:
        EditingError: for unknown sources, malformed records and too few edits.
    """
    if not 0 < validation_share < 1:
        raise EditingError(f"validation share {validation_share!r}; a number between 0 and 1 is needed.")
    examples, report = _read(source, settings)
    examples = examples[:num_edits]
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


def _read(source: str, settings: Mapping[str, Any]) -> tuple[list[EditExample], dict[str, Any]]:
    path = Path(source).expanduser()
    if path.suffix in (".jsonl", ".json"):
        if not path.is_file():
            raise EditingError(f"training data {source} is not a file.")
        examples = [_parse(record, where) for where, record in read_rows(path)]
        return examples, {"file": path.name, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    if source not in BENCHMARKS:
        raise EditingError(
            f"no training edits of {source!r}.{near_misses(source, BENCHMARKS)} Accepted: {', '.join(BENCHMARKS)}, or "
            "a JSONL file."
        )
    loaded, convert = BENCHMARKS[source](settings)
    return [convert(record) for record in loaded.records], {"benchmark": source, **loaded.source}


def _parse(record: Any, where: str) -> EditExample:
    """One line of a file, in either layout."""
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
    locality = [
        Fields(item, f"{where}, locality") for item in (fields.objects("locality") if "locality" in record else ())
    ]
    return EditExample(
        prompt=prompt,
        target=fields.text("target_new"),
        paraphrases=tuple(text for text in (fields.texts("paraphrases") if "paraphrases" in record else ()) if text),
        locality=tuple((item.text("prompt"), item.text("answer")) for item in locality),
    )


Benchmark = Callable[[Mapping[str, Any]], tuple[Loaded[Any], Callable[[Any], EditExample]]]


def _bake(settings: Mapping[str, Any]) -> tuple[Loaded[Any], Callable[[Any], EditExample]]:
    from lm_eval_tasks.bake.records import load_records

    def convert(record: Any) -> EditExample:
        request = record.request
        return EditExample(
            prompt=request.text,
            target=request.target_new,
            paraphrases=tuple(record.paraphrases),
            locality=tuple((prompt, request.target_true) for prompt in record.neighbors),
        )

    return load_records(settings, "qa"), convert


def _qaedit(settings: Mapping[str, Any]) -> tuple[Loaded[Any], Callable[[Any], EditExample]]:
    from lm_eval_tasks.qaedit.records import load_records

    def convert(record: Any) -> EditExample:
        return EditExample(
            prompt=record.request.text,
            target=record.request.target_new,
            paraphrases=(record.rephrase,),
            locality=((record.locality_question, record.locality_answer),),
        )

    return load_records(settings), convert


BENCHMARKS: dict[str, Benchmark] = {"bake": _bake, "qaedit": _qaedit}
