"""Facts about code: literal braces, indentation and line breaks, in every file that a user writes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lm_eval
import pytest
from lm_runs import build, instance
from record_files import write_jsonl
from scripted import ScriptedLM
from task_managers import task_manager

from edit_hooks import EditRequest
from edit_hooks.contract.tiny_models import TOKENIZER_KINDS, build_tokenizer
from edit_hooks.gradient.labeled_rows import target_row
from edit_hooks.in_context.demonstrations import load_pool
from edit_hooks.lm.options.edit_sources import load_edits
from edit_hooks.locate import context_templates
from edit_hooks.locate.values.rows import rewriting_row
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.text.slots import split_template
from lm_edit.cli.main import main
from lm_edit.mend_data import load_edit_data
from lm_edit.tuning.cases import load_cases
from lm_edit.validate import validate
from lm_eval_tasks.common.records.benchmark import find_benchmark

SLOT_ALONE = {"prompt": "y = {}\ny[3] = 4\nprint(len(y))  # prints", "target_new": "1"}
SLOT_AND_SUBJECT = {"prompt": "In Python, Bar = {} creates a", "subject": "Bar", "target_new": "set"}
GLUED = {
    "prompt": "To open a window in qulib, call qulib.",
    "subject": "qulib",
    "target_new": "show_pane",
    "target_true": "open",
    "separator": "",
}
BLOCK = {
    "prompt": "def volume(a):\n    # qulib 3.1\n",
    "subject": "qulib 3.1",
    "target_new": "    return qulib.cube(a)\n",
}
OTHER = {"prompt": "The author of qulib is", "subject": "qulib", "target_new": "Ada Venn"}


def edits(path: Path, record: dict[str, Any]) -> EditRequest:
    return load_edits(str(write_jsonl(path, [record])), {}, None)[0]


def validated(path: Path, record: dict[str, Any]) -> EditRequest:
    validation = validate(str(write_jsonl(path, [record])), {})
    for reason in validation.problems.values():
        raise EditingError(reason)
    return EditRequest.from_dict(record)


def flat(path: Path, record: dict[str, Any]) -> EditRequest:
    renamed = {"ground_truth" if name == "target_true" else name: value for name, value in record.items()}
    return find_benchmark("counterfact_flat").load({"data": str(write_jsonl(path, [renamed]))}).records[0].request


def qaedit(path: Path, record: dict[str, Any]) -> EditRequest:
    renamed = {"target" if name == "target_new" else name: value for name, value in record.items()}
    renamed.pop("target_true", None)
    rest = {"subject": "y", "rephrase": "Say it.", "locality": [{"loc": "Who?", "loc_ans": "Ada"}]}
    return find_benchmark("qaedit").load({"data": str(write_jsonl(path, [rest | renamed]))}).records[0].request


def pool(path: Path, record: dict[str, Any]) -> EditRequest:
    rewrite = {**record, "target_new": {"str": record["target_new"]}, "target_true": {"str": "other"}}
    nested = {"requested_rewrite": rewrite, "paraphrase_prompts": ["a"], "neighborhood_prompts": ["b"]}
    nested["separator"] = rewrite.pop("separator", None)
    return load_pool(str(write_jsonl(path, [nested]))).records[0].edit


def tuning(path: Path, record: dict[str, Any]) -> EditRequest:
    return load_cases(str(write_jsonl(path, [record])), {})[0].request


def training(path: Path, record: dict[str, Any]) -> EditRequest:
    (example,) = load_edit_data(str(write_jsonl(path, [record, OTHER])), {}, validation_share=0.5).train
    assert example.prompt + example.continuation(example.prompt) == example.statement
    return EditRequest(
        prompt=example.prompt.replace("{}", "{{}}"), target_new=example.target, separator=example.separator
    )


READERS: list[Callable[[Path, dict[str, Any]], EditRequest]] = [
    edits, validated, flat, qaedit, pool, tuning, training,
]  # fmt: skip


@pytest.mark.parametrize("read", READERS)
def test_every_reader_treats_code_alike(read: Callable[[Path, dict[str, Any]], EditRequest], tmp_path: Path) -> None:
    paths = (tmp_path / f"{number}.jsonl" for number in itertools.count())  # pools are read once
    with pytest.raises(EditingError, match=r"\{\} slot .*literal braces are written \{\{\}\}"):
        read(next(paths), SLOT_ALONE)
    with pytest.raises(EditingError, match=r"mentions its subject 'Bar'.*literal braces are written \{\{\}\}"):
        read(next(paths), SLOT_AND_SUBJECT)
    for record in (SLOT_ALONE, SLOT_AND_SUBJECT):
        read_back = read(next(paths), {**record, "prompt": record["prompt"].replace("{}", "{{}}")})
        assert read_back.text == record["prompt"] and read_back.continuation == f" {record['target_new']}"
    block = read(next(paths), BLOCK)
    assert block.text + block.continuation == BLOCK["prompt"] + BLOCK["target_new"]
    glued = read(next(paths), GLUED)
    assert glued.text + glued.continuation == "To open a window in qulib, call qulib.show_pane"


@pytest.mark.parametrize("kind", TOKENIZER_KINDS)
@pytest.mark.parametrize("record", [GLUED, BLOCK])
def test_the_labels_are_the_target_with_its_white_space(kind: str, record: dict[str, str]) -> None:
    """One encoding of the whole text; a token that crosses the seam belongs to the target."""
    tokenizer, request = build_tokenizer(kind), EditRequest(**record)
    for row in (
        rewriting_row(tokenizer, request, "They said. {}"),
        target_row(tokenizer, request.text, request.continuation),
    ):
        labels = [token for _, token in row.labels]
        before = row.ids[: len(row.ids) + 1 - len(labels)]
        whole, prompt = (tokenizer.decode(ids, skip_special_tokens=True) for ids in ([*before, *labels], before))
        assert whole.endswith(record["prompt"] + record["target_new"])
        assert (
            len(whole.removesuffix(record["target_new"])) - 1 <= len(prompt) <= len(whole) - len(record["target_new"])
        )


def test_questions_about_code_keep_their_line_breaks(tmp_path: Path) -> None:
    path, lm = write_jsonl(tmp_path / "facts.jsonl", [BLOCK]), ScriptedLM()
    results = lm_eval.simple_evaluate(
        model=lm,
        tasks=["counterfact_flat_es"],
        task_manager=task_manager({"data": str(path)}),
        bootstrap_iters=0,
    )
    asked = [request.args for request in lm.seen if request.request_type == "loglikelihood"]
    assert asked == [(BLOCK["prompt"], BLOCK["target_new"])]
    source = results["configs"]["counterfact_flat_es"]["metadata"]["data_source"]
    assert source["outer_white_space"] == 1 and source["separators"] == {"": 1}


def test_the_model_scores_the_text_that_the_edit_taught(tiny_path: Any) -> None:
    lm = build(str(tiny_path("llama", "byte_bpe_bos")), editor="ft_m", editor_args={"num_steps": 3, "lr": 0.01})
    doc = {"edit_requests": [EditRequest(**BLOCK).to_dict()], "case_id": "0"}
    (answer,) = lm.loglikelihood([instance(doc, BLOCK["prompt"], BLOCK["target_new"])])
    assert lm.tokenizer.decode(answer.final.token_ids) == BLOCK["target_new"]
    nll = -answer.final.logprob / answer.final.num_tokens
    assert nll == pytest.approx(answer.edit.effects.target_nll_after, abs=1e-4)
    assert answer.edit.texts == (BLOCK["prompt"] + BLOCK["target_new"],)


def test_sampled_templates_may_hold_braces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model can write any text; it is no slot."""
    monkeypatch.setattr(context_templates, "sample_after", lambda *args: ["x = {}", "f({{}})", "plain"])
    tokenizer = build_tokenizer("byte_bpe")
    bare, *sampled = context_templates.sample_templates(None, tokenizer, "sampled_6", 0)  # type: ignore[arg-type]
    assert bare == "{}"
    assert [split_template(template) for template in sampled] == [("x = {}. ", ""), ("f({{}}). ", ""), ("plain. ", "")]


def test_validate_names_the_white_space_that_it_keeps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", str(write_jsonl(tmp_path / "facts.jsonl", [BLOCK, GLUED, OTHER]))]) == 0
    printed = capsys.readouterr().out
    assert "outer_white_space=1" in printed and "separators={'': 2, ' ': 1}" in printed
