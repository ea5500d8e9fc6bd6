"""Every public object prints one short line, and its table in a notebook is escaped.

The tests follow ``__all__``: a new public class needs an example here, or a reason why it has none.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from collections.abc import Callable, Mapping
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from board_frames import frames
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from edit_hooks import Delta, EditJob, EditRequest, Factor, HookEdit, Registration, StreamGrowth, load_editor
from edit_hooks.answers import EditedAnswer, FailedAnswer, GeneratedText, ScoredContinuation
from edit_hooks.base.artifacts.trained_artifact import ArtifactKind
from edit_hooks.deltas.context_edit import ContextEdit
from edit_hooks.edit_report import EditReport, Effects
from edit_hooks.training import LossTerms, NumberedExample, TrainingSettings
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.text.readable import MAX_CELL, MAX_LINE, MAX_ROWS, readable
from judges import Item, Report, Verdict
from judges.base import Judgment
from lm_edit import CaseDocument, SavedQuestion, SavedResponse
from lm_edit.leaderboard.table import build_board
from lm_edit.results.files.runs import ResultFile
from lm_eval_tasks import Case, HubFile, Question, Setting, all_benchmarks

PACKAGES = ("edit_hooks", "edit_hooks.training", "judges", "lm_eval_tasks", "lm_edit")
HOSTILE = "<script>alert(1)</script>\x1b[31m\u202e\n" * 200
REQUEST = EditRequest(prompt="The capital of {} is" + " very" * 500, subject="France", target_new=HOSTILE)
TENSOR = torch.zeros(300, 40)
JSON = {"text": HOSTILE, "numbers": list(range(1000)), "nested": [[[[HOSTILE]]]] * 50}
VERDICT = Verdict(label="correct", judge="j", raw_reply=HOSTILE, answer=HOSTILE)
ANSWER = GeneratedText(raw=HOSTILE, token_ids=tuple(range(500)))
DELTA = Delta(
    factors={f"model.layers.{n}.mlp.down_proj": Factor(TENSOR, TENSOR) for n in range(40)},
    dense={"model.norm.weight": TENSOR},
    hook_edit=HookEdit("codebook", {"keys": TENSOR}, {"module": HOSTILE, **JSON}),
    contexts=(ContextEdit(HOSTILE, HOSTILE, demonstrations=(HOSTILE,) * 50),),
    stream_state={"keys": TENSOR},
    warnings=[HOSTILE] * 50,
    diagnostics={"final_loss": 0.5, "steps": 3},
    meta={"editor": HOSTILE, "requests": [{"prompt": HOSTILE, "target_new": HOSTILE}] * 50, "config": JSON},
    intermediates={"keys": TENSOR},
)
DOCUMENT = CaseDocument(
    run="r", file="f", task=HOSTILE, task_version="1", data_hash="", protocol="", judge="", doc_id=0, case_id=HOSTILE,
    category="", edits=[JSON] * 9, questions=[SavedQuestion(kind="k", prompt=HOSTILE, wanted="w", target=None)] * 90,
    metrics=JSON, reasons=JSON, report=JSON, extras=JSON,
)  # fmt: skip


def board() -> Any:
    scores = {name: {"bake_es/efficacy_prob": [0.0, 1.0] * 40} for name in ("unedited", "rome", HOSTILE)}
    return build_board(*frames(scores), resamples=9)


EXAMPLES: dict[str, Callable[[], object]] = {
    "edit_hooks.ArtifactKind": lambda: ArtifactKind("format/1", HOSTILE, HOSTILE, "lm-edit train"),
    "edit_hooks.Delta": lambda: DELTA,
    "edit_hooks.EditJob": lambda: EditJob(
        nn.Sequential(*[nn.Linear(2, 2)] * 50),
        HOSTILE,
        load_editor("rome").config_class(),
        [REQUEST] * 9,
        False,
        [],
        print,
    ),
    "edit_hooks.EditRequest": lambda: REQUEST,
    "edit_hooks.Editor": lambda: load_editor("memit", {"context_templates": ["{}", *["a {}"] * 200], "layers": [3]}),
    "edit_hooks.EditorConfig": lambda: load_editor("memit").config_class.from_mapping(
        {"context_templates": ["{}", *["a {}"] * 200]}
    ),
    "edit_hooks.Factor": lambda: Factor(TENSOR, TENSOR),
    "edit_hooks.HookEdit": lambda: DELTA.hook_edit,
    "edit_hooks.Registration": lambda: Registration(nn.Sequential(*[nn.Linear(2, 2)] * 50), print),
    "edit_hooks.training.LossTerms": lambda: LossTerms(TENSOR, JSON),
    "edit_hooks.training.NumberedExample": lambda: NumberedExample(REQUEST, 3),
    "edit_hooks.training.TrainingSettings": TrainingSettings,
    "judges.Item": lambda: Item(HOSTILE, HOSTILE, HOSTILE),
    "judges.Judgment": lambda: Judgment([VERDICT] * 1000, Report(judge="j", num_items=9, num_scored=9)),
    "judges.Report": lambda: Report(judge=HOSTILE, num_items=9, num_scored=9, reasons={HOSTILE: 3}),
    "judges.Verdict": lambda: VERDICT,
    "lm_eval_tasks.Benchmark": lambda: all_benchmarks()["qaedit"],
    "lm_eval_tasks.Case": lambda: Case(REQUEST, [Question(HOSTILE, "a")] * 50, extras=JSON),
    "lm_eval_tasks.HubFile": lambda: HubFile(repository="owner/name", paths=(HOSTILE,) * 9, revision="main"),
    "lm_eval_tasks.Question": lambda: Question(HOSTILE, "a"),
    "lm_eval_tasks.Setting": lambda: Setting("name", HOSTILE, HOSTILE, str),
    "lm_eval_tasks.Source": lambda: all_benchmarks()["bake"].source,
    "lm_edit.CaseDocument": lambda: DOCUMENT,
    "lm_edit.SavedQuestion": lambda: DOCUMENT.questions[0],
    "lm_edit.SavedResponse": lambda: SavedResponse(text=HOSTILE),
    # Values that these return, and that people look at.
    "edit_hooks.edit_report.EditReport": lambda: EditReport(editor="rome", texts=(HOSTILE,) * 9, diagnostics=JSON),
    "edit_hooks.answers.EditedAnswer": lambda: EditedAnswer(final=ANSWER, stages={"9": ANSWER}),
    "edit_hooks.answers.FailedAnswer": lambda: FailedAnswer(HOSTILE),
    "edit_hooks.answers.ScoredContinuation": lambda: ScoredContinuation(
        logprob=-1.0, is_greedy=True, token_ids=tuple(range(500))
    ),
    "edit_hooks.StreamGrowth": lambda: StreamGrowth("the texts of the facts", "with edits"),
    "edit_hooks.ContextEdit": lambda: DELTA.contexts[0],
    "lm_edit.leaderboard.Board": board,
    "lm_edit.leaderboard.Section": lambda: board().sections[0],
    "lm_edit.leaderboard.Row": lambda: board().sections[0].rows[0],
    "lm_edit.leaderboard.Cell": lambda: next(iter(board().sections[0].rows[0].cells.values())),
    "lm_edit.results.ResultFile": lambda: ResultFile(
        Path("results.json"), {"results": {HOSTILE: JSON}, "configs": {}, "n-samples": {}, "config": {}}
    ),
}
WITHOUT_EXAMPLE = {
    "EditingError": "an exception prints its message",
    "CoverageError": "an exception prints its message",
    "OmittedRecord": "an exception prints its message",
    "EditingTask": "lm-eval's task prints its name and group",
    "HookKind": "abstract; no dataclass",
    "Judge": "a protocol",
    "PerRowAdapters": "no dataclass",
    "Fields": "no dataclass",
    "Trainer": "abstract; no dataclass",
    "TrainingQuestions": "no dataclass",
}


class _Texts(HTMLParser):
    """The tags of a table, and its text."""

    def __init__(self, table: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.text = ""
        self.feed(table)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.add(tag)

    def handle_data(self, data: str) -> None:
        self.text += data


def check(value: Any) -> None:
    line, table = repr(value), value._repr_html_()
    assert len(line) <= MAX_LINE and "\n" not in line and line.isprintable(), line
    assert line.startswith(type(value).__name__ + "(")
    read = _Texts(table)
    assert read.tags <= {"table", "caption", "b", "tr", "th", "td"}, "foreign text is no markup"
    assert "<script" not in table and read.text.isprintable()
    assert len(read.text) <= MAX_ROWS * (MAX_CELL + 200)


@pytest.mark.parametrize("name", EXAMPLES)
def test_one_short_line_and_an_escaped_table(name: str) -> None:
    check(EXAMPLES[name]())


def test_every_public_class_has_an_example() -> None:
    named = [
        f"{package}.{name}"
        for package in PACKAGES
        for name in importlib.import_module(package).__all__
        if inspect.isclass(getattr(importlib.import_module(package), name)) and name not in WITHOUT_EXAMPLE
    ]
    here = {name.replace("lm_edit.results.", "lm_edit.") for name in EXAMPLES}
    assert {name.replace("lm_edit.results.", "lm_edit.") for name in named} <= here
    plain = [name for name in WITHOUT_EXAMPLE if dataclasses.is_dataclass(_public(name))]
    assert not plain, "a dataclass prints all of its fields"


def _public(name: str) -> object:
    packages = map(importlib.import_module, PACKAGES)
    return next(getattr(package, name) for package in packages if name in package.__all__)


def test_an_edit_names_its_editor_facts_weights_and_health() -> None:
    delta = Delta(
        factors={"h.1": Factor(torch.zeros(8, 2), torch.zeros(4, 2))},
        effects=Effects(wrecked=False),
        diagnostics={"final_loss": 0.03125},
        meta={
            "editor": "rome",
            "requests": [{"prompt": "The capital of {} is", "subject": "France", "target_new": "Lyon"}],
        },
    )
    assert repr(delta) == (
        "Delta(editor='rome', edits=['The capital of France is Lyon'], writes=['h.1.weight'], rank=2, "
        "size='96 bytes', final_loss=0.03125, wrecked=False)"
    )
    assert "The capital of France is Lyon" in _Texts(delta._repr_html_()).text
    both = Delta.summed([delta, delta])
    assert repr(both).startswith("Delta(editor='rome', edits=['The capital of France is Lyon', 'The ")


def test_fields_that_are_no_default_are_shown() -> None:
    assert repr(EditRequest(prompt="a", target_new="b")) == "EditRequest(prompt='a', target_new='b')"
    editor = load_editor("rome", {"num_steps": 7})
    assert repr(editor) == "ROME(name='rome', writes=['weights'], settings={num_steps: 7})"
    assert re.fullmatch(r"ROMEConfig\(num_steps=7\)", repr(editor.config_class.from_mapping({"num_steps": 7})))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@given(meta=st.dictionaries(st.sampled_from(["editor", "requests", "parts", "config"]), json_values), facts=json_values)
def test_whatever_a_saved_edit_holds(meta: Mapping[str, Any], facts: Any) -> None:
    check(Delta(meta=dict(meta), diagnostics={"warnings": facts, "final_loss": facts}))
    check(EditReport(editor="rome", diagnostics={"warnings": facts}))


def test_deep_and_wide_values_are_counted_not_walked() -> None:
    deep: Any = []
    for _ in range(100_000):
        deep = [deep, deep]  # as a tree of 2**100000 entries

    @dataclasses.dataclass
    @readable
    class Holder:
        value: Any

    assert repr(Holder(deep)) == "Holder(value=[[[... 2 in all], [... 2 in all]], ... 2 in all])"
    with pytest.raises(EditingError):
        EditRequest(prompt="", target_new="b")
    while deep:  # freed step by step: nested frees would overflow the stack
        deep = deep[0]
