"""The end of the text as part of the target: every editor that trains on a target has it, and none by default."""

from __future__ import annotations

import dataclasses

import pytest

from edit_hooks import EditingError, load_editor
from edit_hooks.base.registry import EDITORS, editor_class
from edit_hooks.contract.subject import EDIT_REQUESTS, contract_settings
from edit_hooks.contract.tiny_models import build_model, build_tokenizer
from edit_hooks.inference.items import Limits, ScoreItem
from edit_hooks.inference.scoring import score
from edit_hooks.locate.values.rows import rewriting_row
from edit_hooks.modeling.tokens import split_continuation

# The others change prompts, or nothing that is trained on a target; wrappers train as their base.
WITHOUT = {"ice", "ike", "ike_leaky_pool", "mello", "scr", "serac", "kn", "rect", "prune", "revive", "simie", "mirror"}
TRAINED = [name for name in EDITORS if name not in WITHOUT]
IN_RELEASE = {"loc_ft", "unke", "any_edit"}
REQUEST = EDIT_REQUESTS[0]


def default_of(name):
    fields = {field.name: field for field in dataclasses.fields(editor_class(name).config_class)}
    return fields["append_eos"].default if "append_eos" in fields else None


def test_every_editor_that_trains_on_a_target_has_the_setting():
    assert {name for name in EDITORS if default_of(name) is None} == WITHOUT
    assert {name for name in TRAINED if default_of(name)} == IN_RELEASE


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", [name for name in TRAINED if name != "ft_l"])
def test_the_end_becomes_likely_after_the_target(name):
    model, tokenizer = build_model("llama"), build_tokenizer("byte_bpe_bos")
    context, target = split_continuation(tokenizer, REQUEST.text, REQUEST.continuation)
    items = [ScoreItem(tuple(context), tuple(ids)) for ids in (target, [*target, tokenizer.eos_token_id])]
    log_p = {}
    for append_eos in (False, True):
        settings = {**contract_settings(editor_class(name)), "append_eos": append_eos}
        if "clamp_factor" in settings and name != "pmet":  # an optimized value, without an offset that is discarded
            settings |= {"num_steps": 20, "lr": 0.5}
        settings |= {"anchor": None} if "anchor" in settings else {}  # an edit over twice the anchor would be dropped
        (delta,) = load_editor(name, settings).edit(model, tokenizer, [REQUEST], measure=False)
        alone, ended = score(model, [(item, delta) for item in items], Limits(), lambda count: None)
        log_p[append_eos] = ended.logprob - alone.logprob
    assert log_p[True] > log_p[False] + 1e-3, log_p


def test_at_the_last_prompt_token_there_is_no_end():
    with pytest.raises(EditingError, match="append_eos=true with objective=last_token"):
        load_editor("ft_l", {"append_eos": True})


def test_the_row_has_one_label_more_and_the_same_key():
    tokenizer = build_tokenizer("byte_bpe_bos")
    plain, ended = (rewriting_row(tokenizer, REQUEST, "He said. {}", append_eos=append) for append in (False, True))
    assert ended.labels == (*plain.labels, (len(plain.ids), tokenizer.eos_token_id))
    assert ended.ids[:-1] == plain.ids and ended.ids[-1] == plain.labels[-1][1]
    assert (ended.position, ended.prompt_length) == (plain.position, plain.prompt_length)


def test_the_end_takes_a_position():
    """Beside the tokens of the text: the last target token is run as well."""
    for name in ("rome", "loc_ft"):
        plain, ended = (load_editor(name, {"append_eos": append}) for append in (False, True))
        assert ended.num_tokens_past_target() == plain.num_tokens_past_target() + 1
    assert load_editor("loc_ft").num_tokens_past_target() == 1


@pytest.mark.parametrize("name", ["memit", "ft_m", "wise"])
def test_a_tokenizer_without_an_end_is_refused(name):
    tokenizer = build_tokenizer("byte_bpe_bos")
    tokenizer.eos_token = None
    with pytest.raises(EditingError, match="no end-of-text token"):
        settings = {**contract_settings(editor_class(name)), "append_eos": True}
        load_editor(name, settings).edit(build_model("llama"), tokenizer, [REQUEST], measure=False)
