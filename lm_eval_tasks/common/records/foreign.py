"""Files that people have and that no benchmark reads: recognized, so that the error can name them and what to do."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.settings.released_settings import is_released
from edit_hooks.utils.storage.files import read_text
from edit_hooks.utils.storage.yaml_io import parse_yaml
from lm_eval_tasks.common.records.fields import Fields
from lm_eval_tasks.common.records.synonyms import find_triple

OWN_LAYOUT = (
    "Write them as facts of your own (docs/guides/own-facts.md), a JSON object each with {fields}. Then "
    "evaluate with --tasks counterfact_flat and data=FILE, or edit with --edits FILE."
)


class Foreign(NamedTuple):
    """A layout without a benchmark.

    Attributes:
        title: its name, for messages.
        fields: dotted paths that all of its records have, and no record of a benchmark.
        remedy: what to do with such a file.
    """

    title: str
    fields: Sequence[str]
    remedy: str


KNOWN_FACTS = Foreign(
    "ROME's known facts (known_1000.json)",
    ("attribute", "subject", "prediction"),
    "They have no new answer, so they can be traced, not edited: lm-edit trace --edits FILE. To edit them, add "
    "'target_new' to each record.",
)
FOREIGN = (
    Foreign(
        "HalluEditBench",
        ("topic", "subject", "relation", "object", "question"),
        OWN_LAYOUT.format(
            fields="'prompt' (question), 'subject', 'target_new' (object) and 'rephrase_prompt' (paraphrased_question)"
        ),
    ),
    KNOWN_FACTS,
    Foreign(
        "UltraEditBench",
        ("prompt", "rephrase_prompt", "ans", "loc", "loc_ans"),
        OWN_LAYOUT.format(
            fields="'prompt', 'target_new' (ans), 'rephrase_prompt', 'locality_prompt' (loc) and "
            "'locality_ground_truth' (loc_ans), and 'subject' for editors that need one"
        ),
    ),
)
CONVERT = (  # NA and None are answers, too; an empty cell is an empty text
    "Convert it, as with pandas: pd.read_csv({name!r}, sep={separator!r}, dtype=str, keep_default_na=False)"
    ".to_json('facts.jsonl', orient='records', lines=True, force_ascii=False)"
)
SEPARATORS = ",;\t|"  # of tables; spreadsheet programs write semicolons where the comma is the decimal mark
EASYEDIT_SETTINGS = (
    "it is a settings file of EasyEdit, not a file of records. Give it as editor_args=FILE (lm-edit: --editor-args "
    "FILE): the error then has its settings in the names used here."
)


def recognize(record: object) -> Foreign | None:
    """The layout of a record, if it is one of :data:`FOREIGN`."""
    if not isinstance(record, Mapping):
        return None
    fields = Fields(record, "")
    found = next((layout for layout in FOREIGN if all(map(fields.has, layout.fields))), None)
    return found or _triples(record)


def _triples(record: Mapping[str, Any]) -> Foreign | None:
    """The layout of a record that is a triple of a knowledge graph."""
    if (names := find_triple(map(str, record))) is None:
        return None
    subject, relation, obj = names
    fields = (
        f"'prompt' ({relation} in words, as \"The capital of {{}} is\"), 'subject' ({subject}) and 'target_new' ({obj})"
    )
    return Foreign(f"triples ({', '.join(names)})", names, OWN_LAYOUT.format(fields=fields))


def describe(layout: Foreign, path: object) -> str:
    """The error about a file of such records."""
    return f"{path}: it holds records of {layout.title}, which no task reads. {layout.remedy}"


def is_known_facts(record: object) -> bool:
    """Whether a record has the layout of ROME's known facts, which tracing reads."""
    return recognize(record) is KNOWN_FACTS


def refuse_other_formats(path: Path) -> None:
    """Refuse a YAML file or a table in text, which is no file of records, by what it is.

    Raises:
        EditingError: as described, with what to do.
    """
    needed = "a JSON list of records, or one JSON object per line, is needed"
    if path.suffix in (".yaml", ".yml"):
        is_settings = _holds_settings(read_text(path, "YAML file"))
        raise EditingError(f"{path}: {EASYEDIT_SETTINGS if is_settings else f'it is a YAML file; {needed}.'}")
    if path.suffix in (".csv", ".tsv"):
        text = read_text(path, "file of records")
        first = text.partition("\n")[0]
        separator = max(SEPARATORS, key=first.count)
        header = next(csv.reader([first], delimiter=separator), [])
        if layout := recognize(dict.fromkeys(header)):
            raise EditingError(describe(layout, path))
        convert = CONVERT.format(name=path.name, separator=separator)
        raise EditingError(f"{path}: it is a table with the columns {', '.join(header)}; {needed}. {convert}")


def _holds_settings(text: str) -> bool:
    """Whether a YAML text is a settings file of EasyEdit; one of records is a list, and text may be anything."""
    try:
        content = parse_yaml(text)
    except ValueError:
        return False
    return isinstance(content, dict) and is_released(content)
