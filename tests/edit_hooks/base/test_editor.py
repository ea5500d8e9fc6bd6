"""What `Editor.edit` accepts from `compute`, and the lengths of the texts that it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from broken_editors import Sound

from edit_hooks import Delta, EditingError, EditJob, EditRequest, load_editor
from edit_hooks.base.registry import EDITORS, editor_class
from edit_hooks.contract.subject import EDIT_REQUESTS, contract_settings, tiny_model, tiny_tokenizer
from edit_hooks.contract.tiny_models import NATURAL_TOKENIZER
from edit_hooks.deltas.delta import Factor
from edit_hooks.editors.ft_m import FTConfig
from edit_hooks.utils.errors import UnusableRequestError


class Returns(Sound):
    """Returns a value from `compute` as it is."""

    value: Any = None

    def compute(self, job: EditJob[FTConfig]) -> list[Delta]:
        return self.value


@pytest.mark.parametrize(
    ("value", "joint", "message"),
    [
        ([Delta()], False, "compute returned 1 deltas for 2 groups of requests"),
        ([Delta(), Delta(), Delta()], False, "compute returned 3 deltas for 2 groups of requests"),
        ([Delta(), Delta()], True, "compute returned 2 deltas for 1 groups of requests"),
        (None, False, "compute returned NoneType; a list with one Delta per group"),
        ([None, Delta()], False, "compute returned list of Delta, NoneType; a list with one Delta per group"),
        (Delta(), True, "compute returned Delta; a list with one Delta per group"),
    ],
)
def test_a_wrong_number_or_kind_of_deltas_is_an_error(value: object, joint: bool, message: str) -> None:
    editor = Returns(contract_settings(Sound))
    editor.value = value
    model, tokenizer = tiny_model("gpt2"), tiny_tokenizer(NATURAL_TOKENIZER["gpt2"])
    with pytest.raises(EditingError) as error:
        editor.edit(model, tokenizer, EDIT_REQUESTS[:2], joint=joint)
    assert str(error.value).startswith(f"editor 'Returns': {message}")


WEIGHT = "transformer.h.1.mlp.c_proj.weight"  # of the tiny GPT-2, 128 to 32


@pytest.mark.parametrize(
    ("delta", "message"),
    [
        (Delta(dense={WEIGHT: torch.zeros(3, 5)}), f"the edit of {WEIGHT} has shape [3, 5], the weight [128, 32]"),
        (Delta(dense={WEIGHT: torch.zeros(128, 32).half()}), f"the update of {WEIGHT} is torch.float16; .* float32"),
        (Delta(dense={WEIGHT: torch.zeros(128, 32).numpy()}), f"the update of {WEIGHT} is ndarray; a torch tensor"),
        (Delta(dense={WEIGHT[:-1]: torch.zeros(128, 32)}), f"no parameter '{WEIGHT[:-1]}'.*Did you mean '{WEIGHT}'"),
        (Delta(factors={WEIGHT: Factor(torch.zeros(32, 1), torch.zeros(128, 1), True)}), "no module"),
        (Delta(factors={WEIGHT[:-7]: Factor(torch.zeros(128, 1), torch.zeros(32, 1), True)}), "maps 32 -> 128"),
    ],
)
def test_an_update_that_the_model_cannot_hold_names_the_editor(delta: Delta, message: str) -> None:
    editor = Returns(contract_settings(Sound))
    editor.value = [delta]
    with pytest.raises(EditingError, match=r"editor 'Returns': .*" + message.replace("[", r"\[").replace("]", r"\]")):
        editor.edit(tiny_model("gpt2"), tiny_tokenizer(NATURAL_TOKENIZER["gpt2"]), EDIT_REQUESTS[:1], measure=False)


def test_the_factors_of_an_edit_are_contiguous_as_those_of_a_loaded_one() -> None:
    """A GPU multiplies strided ones by other kernels, so that a saved edit had other last bits than before."""
    left_DE, right_FE = torch.randn(2, 32).T, torch.randn(2, 128).T
    editor = Returns(contract_settings(Sound))
    editor.value = [Delta(factors={WEIGHT.removesuffix(".weight"): Factor(left_DE, right_FE, transposed=True)})]
    tiny = tiny_model("gpt2"), tiny_tokenizer(NATURAL_TOKENIZER["gpt2"])
    (delta,) = editor.edit(*tiny, EDIT_REQUESTS[:1], measure=False)
    (factor,) = delta.factors.values()
    assert factor.left.is_contiguous() and factor.right.is_contiguous()
    assert torch.equal(factor.left, left_DE) and torch.equal(factor.right, right_FE)


def test_the_first_edit_counts_the_tokens_of_sampled_contexts() -> None:
    """They are sampled for the model after the first check; a later edit knows them before."""
    model, tokenizer = tiny_model("gpt2"), tiny_tokenizer(NATURAL_TOKENIZER["gpt2"])
    limit = model.config.max_position_embeddings
    long = EditRequest(prompt="{}" + " a" * (limit - 1), subject="b", target_new="a")
    editor = load_editor("rome", {"layers": [1], "num_steps": 1})
    assert not editor.find_unusable(tokenizer, [long], limit, model)
    for _ in range(2):
        with pytest.raises(UnusableRequestError, match=f"the longest context included.*has {limit} positions"):
            editor.edit(model, tokenizer, [long])
    editor.edit(model, tokenizer, EDIT_REQUESTS[:1])


def test_an_appended_end_of_text_counts_under_a_wrapper() -> None:
    model, tokenizer = tiny_model("gpt2"), tiny_tokenizer(NATURAL_TOKENIZER["gpt2"])
    limit = model.config.max_position_embeddings
    request = EditRequest(prompt="a" + " a" * (limit - 1), target_new="a")
    for append_eos in (False, True):
        settings = {"base": "ft_m", "base_settings": {"append_eos": append_eos}}
        assert bool(load_editor("rect", settings).find_unusable(tokenizer, [request], limit)) == append_eos


@pytest.mark.parametrize(
    ("name", "append_eos", "past"), [("any_edit", False, 1), ("any_edit", True, 2), ("unke", True, 1)]
)
def test_the_longest_request_that_is_accepted_runs(name: str, append_eos: bool, past: int) -> None:
    """AnyEdit runs the end of the text as well; one token more had no position inside of the model."""
    model, tokenizer = tiny_model("gpt2"), tiny_tokenizer(NATURAL_TOKENIZER["gpt2"])
    limit = model.config.max_position_embeddings
    fit: dict[str, Any] = {"fit_steps": 1} if name == "unke" else {"base_settings": {"fit_steps": 1}}
    editor = load_editor(name, {"layers": [1], "num_steps": 1, "append_eos": append_eos, **fit})
    fits, long = (EditRequest(prompt="a" + " a" * (limit - past - 1 + more), target_new="a") for more in (0, 1))
    (delta,) = editor.edit(model, tokenizer, [fits], measure=False)
    assert delta.dense and editor.find_unusable(tokenizer, [long], limit)


@pytest.mark.parametrize("name", EDITORS)
def test_a_block_named_twice_is_refused(name: str) -> None:
    """LoRA trained one adapter of the block and wrote another; MELO and MEND build one network per name."""
    if editor_class(name).writes == ("context",):
        return
    settings = {**contract_settings(editor_class(name)), "layers": [1, 1]}
    with pytest.raises(EditingError, match=r"once|name one layer"):
        load_editor(name, settings).check_settings(tiny_model("llama"))


@pytest.mark.parametrize("name", ["mend", "melo"])
def test_a_role_named_twice_is_refused(name: str) -> None:
    model = tiny_model("llama")
    editor = load_editor(name, {**contract_settings(editor_class(name)), "modules": ["rewrite", "rewrite"]})
    with pytest.raises(EditingError, match="'modules' names 'rewrite' more than once"):
        editor.edit(model, tiny_tokenizer(NATURAL_TOKENIZER["llama"]), EDIT_REQUESTS[:1])


def test_a_wrapper_that_runs_more_tokens_than_its_base_says_so():
    class Own(editor_class("rect")):
        feeds_last_token = True

    assert Own({"base": "ft_m"}).num_tokens_past_target() == 1
    assert load_editor("rect", {"base": "ft_m"}).num_tokens_past_target() == 0
