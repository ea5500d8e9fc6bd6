"""One call with requests that an editor cannot use: the error names all of them, before anything is computed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from editor_settings import ROME_CONFIG
from tokenizers import Regex, normalizers
from transformers import PreTrainedTokenizerBase

from edit_hooks import Delta, EditRequest, load_editor
from edit_hooks.base.editor import Editor
from edit_hooks.base.job import EditJob
from edit_hooks.base.shipped import shipped_files
from edit_hooks.editors.bird import BIRD, BIRDConfig
from edit_hooks.in_context.combined import EditorWithContext
from edit_hooks.lm.editing.independent import IndependentEdits
from edit_hooks.modeling.fingerprint.identity import model_identity
from edit_hooks.utils.errors import UnusableRequestError

QUICK: dict[str, Any] = {"layers": [1], "num_steps": 2, "context_templates": ["{}", "You can see. {}"]}
BIRD_SETTINGS = {**QUICK, "alpha": 0.002, "beta": 0.8}
KN_SETTINGS = {"layers": [1], "num_steps": 2}
SNOWMAN = "\u2603"  # the tokenizer of these tests drops it, and a space before it


def request(case_id: str | None, **changes: Any) -> EditRequest:
    fields = {"prompt": "{} lies in", "subject": "Velm", "target_new": "Karsk", "target_true": "Brenholt"}
    return EditRequest(**{**fields, "relation_id": "P17", "case_id": case_id, **changes})


@pytest.fixture
def tokenizer(tiny_tokenizer: Callable[[str], PreTrainedTokenizerBase]) -> PreTrainedTokenizerBase:
    dropping: Any = copy.deepcopy(tiny_tokenizer("byte_bpe"))
    dropping.backend_tokenizer.normalizer = normalizers.Replace(Regex(rf" ?{SNOWMAN}"), "")
    return dropping


FROM_SETTINGS = {
    "bird, no relation": ("bird", BIRD_SETTINGS, {"relation_id": None}, "no 'relation_id'"),
    "bird, unknown relation": ("bird", BIRD_SETTINGS, {"relation_id": "P0"}, "no phrases are known"),
    "bird, no old object": ("bird", BIRD_SETTINGS, {"target_true": None}, "no 'target_true'"),
    "bird, an old object without a token": ("bird", BIRD_SETTINGS, {"target_true": SNOWMAN}, "case b: no token covers"),
    "kn, no old answer": ("kn", KN_SETTINGS, {"target_true": None}, "no 'target_true'"),
    "kn, an old answer without a token": ("kn", KN_SETTINGS, {"target_true": SNOWMAN}, "no token to attribute"),
    "rect over kn": ("rect", {"base": "kn", "base_settings": KN_SETTINGS}, {"target_true": None}, "no 'target_true'"),
    "ft_m, a prompt without a token": (
        "ft_m",
        {"layers": [1]},
        {"prompt": SNOWMAN, "subject": None},
        "no token before",
    ),
}
FROM_ROWS = {
    "the last block": ("rome", {**ROME_CONFIG, "layers": [2]}, {}, "block 2 is the last one"),
    "no token to perturb": (
        "rome",
        {**QUICK, "evk_align": True, "evk_drifts": ["relation"], "evk_weight": 0.0},
        {"prompt": "{}"},
        "no token for evk_drifts",
    ),
}


def assert_names(error: UnusableRequestError, bad: Sequence[EditRequest], reason: str) -> None:
    assert list(error.reasons) == [one.key for one in bad]
    assert reason in str(error) and all(reason.partition(": ")[2] in text for text in error.reasons.values())


@pytest.mark.parametrize("name", FROM_SETTINGS)
def test_requests_at_fault_are_named_before_any_work(name, tokenizer, tiny_model, monkeypatch):
    """With and without the model, so that a run finds them before it loads the weights."""
    editor_name, settings, changes, reason = FROM_SETTINGS[name]
    editor = load_editor(editor_name, settings)
    # The bad ones differ, as requests with equal fields have one key.
    bad = [request("b", **changes), request("c", **changes, target_new="Dravonia")]
    requests = [request("a"), *bad, request("d", target_new="Ostravia")]
    for model in (None, tiny_model("gpt2")):
        assert list(editor.find_unusable(tokenizer, requests, 64, model)) == [one.key for one in bad]
    monkeypatch.setattr(type(editor), "compute", lambda self, job: pytest.fail("an edit is computed"))
    with pytest.raises(UnusableRequestError) as caught:
        editor.edit(tiny_model("gpt2"), tokenizer, requests)
    assert_names(caught.value, bad, reason)


@pytest.mark.parametrize("name", [*FROM_SETTINGS, *FROM_ROWS])
def test_a_request_without_a_case_is_named_by_its_text(name, tokenizer, tiny_model):
    editor, settings, changes, _ = {**FROM_SETTINGS, **FROM_ROWS}[name]
    bad = request(None, **changes)
    with pytest.raises(UnusableRequestError) as caught:
        load_editor(editor, settings).edit(tiny_model("gpt2"), tokenizer, [bad])
    assert repr(bad.text) in str(caught.value) and "None" not in str(caught.value)


@pytest.mark.parametrize("name", FROM_ROWS)
def test_all_requests_that_fail_for_their_tokens_are_named(name, tokenizer, tiny_model):
    editor, settings, changes, reason = FROM_ROWS[name]
    bad = [request("b", **changes), request("c", **changes, target_new="Dravonia")]
    good = [request("a", prompt="They love {}"), request("d", prompt="We all love {}")]
    with pytest.raises(UnusableRequestError) as caught:
        load_editor(editor, settings).edit(tiny_model("gpt2"), tokenizer, [good[0], *bad, good[1]])
    assert_names(caught.value, bad, reason)


def test_both_editors_of_an_edit_with_contexts_are_asked(tokenizer):
    editor = EditorWithContext(load_editor("kn", KN_SETTINGS), load_editor("ice"))
    bad = request("b", target_true=None)
    assert list(editor.find_unusable(tokenizer, [request("a"), bad], 64)) == [bad.key]


def test_a_run_computes_the_other_edits_in_one_batch(tokenizer, tiny_model, monkeypatch):
    batches: list[int] = []
    compute = BIRD.compute

    def counted(self: Editor[BIRDConfig], job: EditJob[BIRDConfig]) -> list[Delta]:
        batches.append(len(job.requests))
        return compute(self, job)

    monkeypatch.setattr(BIRD, "compute", counted)
    model = tiny_model("gpt2")
    requests = [request("a"), request("b", relation_id="P0"), request("c", target_new="Dravonia")]
    edits = IndependentEdits(
        model, tokenizer, load_editor("bird", BIRD_SETTINGS), None, model_identity(model, tokenizer), quiet=True
    )
    made = list(edits.in_order([(one,) for one in requests]))
    assert batches == [2]
    assert [isinstance(edit, Delta) for edit in made] == [True, False, True]


def test_settings_of_a_shipped_file_count(tiny_model, tokenizer):
    """They are known with the model, before sampled settings are, and after that with these."""
    model = tiny_model("gpt2")
    editor = load_editor("bird", {**BIRD_SETTINGS, "shipped": "gpt2-xl", "context_templates": "sampled_6"})
    del editor.overrides["beta"]
    assert (editor.known_config().beta, editor.known_config(model).beta) == (0.8, 1.2)
    assert isinstance(editor.known_config(model).context_templates, str)
    config = editor.resolve_config(model, tokenizer)
    assert editor.known_config(model) is config and len(config.context_templates) > 1


def test_no_shipped_file_of_bird_does_without_the_old_object():
    """Requests without one are refused before the model is known."""
    for _, content in shipped_files("bird"):
        config = BIRDConfig(
            **{name: content["config"][name] for name in ("alpha", "beta") if name in content["config"]}
        )
        assert config.alpha * config.beta > 0
