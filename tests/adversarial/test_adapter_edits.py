"""MELO's inputs at their edges: factors that do not fit, texts as long as the context, emptied clusters in a stream."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from adapter_databases import adapters_of, clusters_of
from hook_edits import EDIT_REQUESTS, make, nll, stream_of
from safetensors.torch import save_file
from tiny_architectures import ARCHITECTURES

from edit_hooks import Delta, EditingError, EditRequest
from edit_hooks.base.checks import position_limit
from edit_hooks.contract.tiny_models import EDIT_LAYER, build_model, build_tokenizer
from edit_hooks.memory.adapter_database import NO_ADAPTER
from edit_hooks.modeling.architectures import map_shape
from edit_hooks.utils.errors import UnusableRequestError

(NAME,) = ARCHITECTURES["gpt2"].module_names("mlp_in", EDIT_LAYER)


@pytest.fixture(scope="module")
def gpt2():
    return build_model("gpt2"), build_tokenizer("byte_bpe")


def test_factors_that_do_not_fit_are_refused_before_the_weights_are_loaded(gpt2, tmp_path):
    outline = copy.deepcopy(gpt2[0]).to("meta")
    width = map_shape(outline.get_submodule(NAME))[1]
    save_file({"elsewhere": torch.zeros(width, 2)}, tmp_path / "elsewhere.safetensors")
    (tmp_path / "text.safetensors").write_text("no tensors", encoding="utf-8")
    for factors, message in (
        ({NAME: torch.zeros(2, width)}, rf"a floating-point \[{width}, number of edits \* 2\] is needed"),
        ({NAME: torch.zeros(width, 1)}, "is needed"),
        ({NAME: torch.zeros(width)}, "is needed"),
        ({NAME: torch.zeros(width, 2, dtype=torch.long)}, "torch.int64"),
        ({}, f"no tensor for {NAME}; it has none"),
        (str(tmp_path / "elsewhere.safetensors"), f"no tensor for {NAME}; it has elsewhere"),
        (str(tmp_path / "text.safetensors"), "cannot be read"),
        (str(tmp_path / "missing.safetensors"), "missing.safetensors"),
    ):
        with pytest.raises(EditingError, match=message):
            make("melo", initial_factors=factors).check_settings(outline)
    for wrong in ({NAME: [1.0]}, 3, ["a"]):
        with pytest.raises(EditingError, match="initial_factors"):
            make("melo", initial_factors=wrong)


def test_the_stored_configuration_names_given_factors_by_their_checksum(gpt2, tmp_path):
    model, tokenizer = gpt2
    save_file({NAME: torch.randn(map_shape(model.get_submodule(NAME))[1], 2)}, tmp_path / "factors.safetensors")
    settings = {"initial_factors": str(tmp_path / "factors.safetensors"), "num_steps": 1}
    (delta,) = make("melo", **settings).edit(model, tokenizer, EDIT_REQUESTS[:1])
    assert set(delta.meta["config"]["initial_factors"][NAME]) == {"shape", "dtype", "sha256"}


@pytest.mark.parametrize(
    ("editor", "settings", "behind"),
    [
        ("melo", {}, -1),
        ("melo", {"append_eos": True}, 0),
        ("melo", {"append_eos": "released"}, 1),
        ("melo", {"query_token": "last_text"}, 0),
        ("melo", {"query_token": "last_text", "append_eos": "released"}, 2),
        ("defer", {"append_eos": "released"}, 1),
        ("defer", {"query_token": "last_text", "append_eos": "released"}, 2),
        ("grace", {"append_eos": "released"}, 1),
    ],
    ids=str,
)
def test_a_text_of_the_whole_context_is_edited_and_a_longer_one_refused(editor, settings, behind, gpt2):
    model, tokenizer = gpt2
    limit = position_limit(model.config)
    request = EDIT_REQUESTS[0]

    def run_tokens(text: str) -> int:
        return len(tokenizer(f"{text} {request.target_new}").input_ids) + behind

    text = request.text
    while run_tokens(f"the {text}") <= limit:
        text = f"the {text}"
    while run_tokens(f".{text}") <= limit:
        text = f".{text}"
    assert run_tokens(text) == limit
    made = make(editor, num_steps=1, **settings)
    fits, longer = (EditRequest(prompt=prompt, target_new=request.target_new) for prompt in (text, f"the. {text}"))
    assert len(made.edit(model, tokenizer, [fits])) == 1
    with pytest.raises(UnusableRequestError, match="positions"):
        made.edit(model, tokenizer, [longer])


def test_an_emptied_cluster_stays_in_a_stream_and_its_prompt_is_answered_as_before(gpt2, tmp_path):
    """Two facts in one cluster; a third with another target, nearer to its center than they are, drops both."""
    model, tokenizer = gpt2
    first = EDIT_REQUESTS[0]
    second = EditRequest(prompt=EDIT_REQUESTS[1].text, target_new=first.target_new)
    third = dataclasses.replace(EDIT_REQUESTS[2], target_new=EDIT_REQUESTS[1].target_new)
    steps = stream_of("melo", model, tokenizer, [first, second, third], radius=1e3)
    Delta.summed(steps).save(tmp_path / "stream.safetensors")
    whole = Delta.load(tmp_path / "stream.safetensors")
    emptied, other = clusters_of(whole.hook_edit)
    assert (emptied.adapter_ids, other.adapter_ids) == ([NO_ADAPTER], [2])
    assert torch.equal(emptied.queries[0], emptied.center_Q)
    assert sorted(adapters_of(whole.hook_edit)) == [2]
    assert nll(model, tokenizer, first, whole) == nll(model, tokenizer, first, None)
    assert nll(model, tokenizer, third, whole) < nll(model, tokenizer, third, None)
