"""Random files and option texts: whatever is refused is refused by an EditingError with a short printable message."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from edit_hooks.in_context.demonstrations import load_pool
from edit_hooks.lm.options.edit_sources import load_edits
from edit_hooks.lm.options.editing import EditingOptions
from edit_hooks.request import EditRequest
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.printable import MAX_MESSAGE, printable
from edit_hooks.utils.settings.options import parse_checkpoints, parse_editor_args
from edit_hooks.utils.storage.yaml_io import read_yaml
from judges.evaluation.quality import load_pairs
from judges.prompt import load_prompt
from judges.settings import read_settings
from lm_edit.results.answers.samples import read_saved_answers
from lm_eval_tasks.common.records.benchmark import find_benchmark

SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12) | st.just("\x1b[2J{}" * 300)
REQUEST_KEYS = ["prompt", "subject", "target_new", "case_id", "requested_rewrite", "str", "paraphrase_prompts"]
OTHER_KEYS = ["doc", "doc_id", "resps", "question", "gold", "answer", "label", "preset", "backend", "model"]
KEYS = st.text() | st.sampled_from([*REQUEST_KEYS, *OTHER_KEYS])
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=5))
RECORDS = st.dictionaries(KEYS, VALUES, max_size=6) | VALUES
JSON_LINES = st.lists(RECORDS.map(json.dumps), max_size=3).map("\n".join)
JSON_LISTS = st.lists(RECORDS, max_size=2).map(json.dumps)
CONTENTS = (JSON_LINES | JSON_LISTS).map(str.encode) | st.binary(max_size=80)

READERS: dict[str, Callable[[str], object]] = {
    "edits": lambda path: load_edits(path, {}, None),
    "bake": lambda path: find_benchmark("bake").load({"data": path}),
    "bake_j": lambda path: find_benchmark("bake_j").load({"data": path}),
    "bake_concept": lambda path: find_benchmark("bake_concept").load({"data": path}),
    "qaedit": lambda path: find_benchmark("qaedit").load({"data": path, "bad_records": "skip"}),
    "pool": lambda path: (load_pool.cache_clear(), load_pool(path)),
    "pairs": load_pairs,
    "samples": lambda path: read_saved_answers([path]),
    "settings": read_yaml,
    "judge": lambda path: read_settings(str(Path(path).rename(Path(path).with_suffix(".yaml")))),
    "prompt": load_prompt,
}


def accepts_or_refuses(call: Callable[[], object]) -> bool:
    """Whether a call works, or is refused with a message that can be printed; any other error is raised."""
    try:
        call()
    except EditingError as error:
        message = str(error)
        message.encode("utf-8")
        is_printable = all(character == "\n" or character.isprintable() for character in message)
        return 0 < len(message) <= MAX_MESSAGE and is_printable
    return True


@pytest.mark.parametrize("reader", READERS)
@given(content=CONTENTS)
@example(content=b'{"a": ' * 50_000)
@example(content=b'[{"prompt": ' + b"9" * 5000 + b"}]")
@example(content=b'{"doc": 5, "resps": [[5]], "doc_id": 0}')
@example(content=b'{"doc": {"probes": [5]}, "resps": [[5]], "doc_id": 0}')
@example(content=b'{"requested_rewrite": {"prompt": "{} a", "subject": "b", "target_new": "c"}}')
@example(content=b"\xef\xbb\xbf[]")
@example(content=b"---\n- 1\n---\n{question}{gold}{answer}")
@example(content=b'{"prompt": "\\ud800", "target_new": "\\ud800", "question": "\\udfff", "gold": "", "answer": ""}')
def test_files(tmp_path: Path, reader: str, content: bytes) -> None:
    path = tmp_path / "file.json"
    path.write_bytes(content)
    assert accepts_or_refuses(lambda: READERS[reader](str(path)))


@given(text=st.text() | st.from_regex(r"[a-z_]{1,6}[:=][\[\]{}&*!0-9.,;:a-z]*", fullmatch=True))
@example(text="lr:!!python/object/apply:os.system [ls]")
@example(text="a:0x" + "9" * 5000)
@example(text="{a: *b}")
@example(text="a:2001-99-99")
@example(text="~nobody/x.yaml")
@example(text="x" * 5000 + ".yaml")
@example(text="{? {a: b} : c}")
def test_texts_of_options(text: str) -> None:
    assert accepts_or_refuses(lambda: parse_editor_args(text))
    assert accepts_or_refuses(lambda: parse_checkpoints(text))
    assert accepts_or_refuses(lambda: read_settings(text))
    assert accepts_or_refuses(lambda: load_prompt(text))
    assert accepts_or_refuses(lambda: load_edits(text, {}, None))


@given(name=st.sampled_from(sorted(EditingOptions.__dataclass_fields__)), value=VALUES)
@example(name="mode", value=[])
@example(name="icl", value={})
def test_values_of_options(name: str, value: Any) -> None:
    assert accepts_or_refuses(lambda: EditingOptions(**{name: value}))
    assert accepts_or_refuses(lambda: EditingOptions(**{"mode": "sequential", "edits": "bake", name: value}))


@given(record=st.dictionaries(KEYS, VALUES, max_size=5), where=st.text())
def test_records_of_the_api(record: dict[str, Any], where: str) -> None:
    assert accepts_or_refuses(lambda: EditRequest.from_dict(record, where=where))


@given(text=st.text(alphabet=st.characters(), max_size=400), limit=st.integers(40, 200))
def test_printable_texts(text: str, limit: int) -> None:
    shown = printable(text, limit)
    assert len(shown) <= limit and printable(shown, limit) == shown
    assert all(character == "\n" or character.isprintable() for character in shown)
    if len(text) <= limit and text.isprintable():
        assert shown == text
