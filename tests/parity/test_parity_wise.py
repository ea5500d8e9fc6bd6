"""WISE against EasyEdit's numbers: losses, thresholds and side weights of two edits on the same memory.

The release pads on the left without position ids, and its distances count the pads. So does our editor where the
tokenizer pads every text itself, as one that adds special tokens in front, and the model hides pads from its attention.
Then its rows are the release's, column by column.
"""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch
from golden_data import GOLDEN_MODELS, golden_case
from parity import relative_error
from parity_layers import contract
from torch import nn
from transformers import BatchEncoding, PreTrainedModel, PreTrainedTokenizerBase

from edit_hooks import Delta, EditRequest, load_editor
from edit_hooks.memory.side_memory import MemoryBank


def editor_settings(case: dict[str, Any], mask: torch.Tensor) -> dict[str, Any]:
    """The release's settings in our names."""
    settings = case["hparams"]
    (weight_name,) = settings["inner_params"]
    return {
        "layers": [2],
        "module": "mlp_in" if "c_fc" in weight_name else "mlp_out",
        "num_steps": settings["n_iter"],
        "lr": settings["edit_lr"],
        "alpha": settings["alpha"],
        "beta": settings["beta"],
        "gamma": settings["gamma"],
        "act_ratio": settings["act_ratio"],
        "norm_constraint": settings["norm_constraint"],
        "save_every": settings["save_freq"],
        "merge_every": settings.get("merge_freq", 2 * settings["save_freq"]),
        "merge_density": settings.get("densities", 0.53),
        "retrieve": settings.get("retrieve", True),
        "replay": settings.get("replay", False),
        "context_templates": case["context_templates"],
        "loc_prompts": [case["requests"][0]["loc_prompt"]],
        "mask": mask,
    }


def left_padding(tokenizer: PreTrainedTokenizerBase, width: int) -> PreTrainedTokenizerBase:
    """A copy of the tokenizer whose encodings begin with pad tokens, up to ``width`` tokens in all."""

    class LeftPadding(type(tokenizer)):
        def __call__(self, text: str, **arguments: Any) -> BatchEncoding:
            padding = {"padding": "max_length", "max_length": width, "padding_side": "left"}
            return super().__call__(text, **arguments, **padding)

    padded = copy.copy(tokenizer)
    padded.__class__ = LeftPadding
    return padded


@contextlib.contextmanager
def pads_hidden(model: nn.Module, pad_token_id: int, seen: list[torch.Tensor]) -> Iterator[None]:
    """The model as the release calls it: no attention to pad tokens. Adds the embedded token ids to ``seen``."""

    def hide(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return args, {**kwargs, "attention_mask": (kwargs["input_ids"] != pad_token_id).long()}

    def record(_module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        seen.append(args[0])

    handles = [
        model.register_forward_pre_hook(hide, with_kwargs=True),
        model.get_input_embeddings().register_forward_pre_hook(record),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def is_part_of(ids: torch.Tensor, fed: list[list[int]]) -> bool:
    """Whether the rows are the first ones of those fed by the release, up to some column."""
    rows, columns = ids.shape
    return ids.tolist() == [row[:columns] for row in fed[:rows]]


def released_edits(
    case: dict[str, Any],
    mask: torch.Tensor,
    loaded: tuple[PreTrainedModel, PreTrainedTokenizerBase],
    engine: str = "fast",
) -> list[Delta]:
    """A golden case's stream of edits on the rows of the release, and the rows compared token by token."""
    model, tokenizer = loaded
    history: list[Delta] = []
    for request, fed in zip(case["requests"], case["fed"], strict=True):
        editor = load_editor("wise", {**editor_settings(case, mask), "engine": engine})
        padded = left_padding(tokenizer, len(fed["input_ids"][0]))
        edit = EditRequest(prompt=request["prompt"], target_new=request["target_new"])
        seen: list[torch.Tensor] = []
        with pads_hidden(model, tokenizer.pad_token_id, seen):
            history += editor.edit(model, padded, [edit], history=history, measure=False)
        # The rows of the release, and in later passes those of them that have labels, or those of a past edit.
        assert seen[0].tolist() == fed["input_ids"]
        known = [past["input_ids"] for past in case["fed"]] if case["hparams"].get("replay") else [fed["input_ids"]]
        assert all(any(is_part_of(ids, rows) for rows in known) for ids in seen)
        assert history[-1].hook_edit.settings["activation"] == case["hparams"]["hidden_act"]
    return history


def golden_mask(case: dict[str, Any], tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    bits = numpy.unpackbits(tensors["mask"].numpy(), count=case["shape"][0] * case["shape"][1])
    return torch.from_numpy(bits).bool().view(case["shape"])


@pytest.mark.parametrize("engine", ["fast", "reference"])
@pytest.mark.parametrize("model_name", GOLDEN_MODELS)
def test_two_edits_give_the_side_weights_of_the_release(model_name, engine, golden_model):
    case, tensors = golden_case("wise", model_name, "seq01")
    mask = golden_mask(case, tensors)
    deltas = released_edits(case, mask, golden_model(model_name), engine)
    banks = [MemoryBank.from_hook_edit(delta.hook_edit, mask.float()) for delta in deltas]
    for number, (delta, bank, losses) in enumerate(zip(deltas, banks, case["losses"], strict=True), start=1):
        for ours, theirs in zip(delta.diagnostics["losses"], losses, strict=True):
            expected = (theirs["loss"], theirs["ft"], theirs["act"])
            assert (ours["loss"], ours["nll"], ours["margin"]) == pytest.approx(expected, abs=2e-3)
        (memory,) = bank.memories
        assert torch.count_nonzero(memory.change[~mask]) == 0
        if f"delta_after_edit{number}" in tensors:
            assert relative_error(memory.change[mask], tensors[f"delta_after_edit{number}"]) < 5e-4
    (stored,) = banks[-1].stored  # after save_freq edits, with the threshold of both
    assert stored.threshold == pytest.approx(case["editing_min_act"][0], rel=1e-3)


@pytest.mark.parametrize(
    ("model_name", "name"), [("tiny-llama", "early-stop-edit1"), ("tiny-gpt2", "early-stop-seq10")]
)
def test_long_runs_that_stop_early_follow_the_release(model_name, name, golden_model):
    """As many evaluations and steps as there, and the entries outside the mask shrunk by weight decay."""
    case, tensors = golden_case("wise", model_name, name)
    mask, loaded = golden_mask(case, tensors), golden_model(model_name)
    deltas = released_edits(case, mask, loaded)
    weight = loaded[0].get_submodule(deltas[0].hook_edit.settings["module"]).weight.detach()
    for number, (delta, losses) in enumerate(zip(deltas, case["losses"], strict=True), start=1):
        ours = [record["loss"] for record in delta.diagnostics["losses"]]
        assert len(ours) == len(losses) and delta.diagnostics["stop_reason"] == "loss"
        assert delta.diagnostics["steps"] == case["n_steps"][number - 1]
        assert ours == pytest.approx([record["loss"] for record in losses], abs=5e-4)
        (memory,) = MemoryBank.from_hook_edit(delta.hook_edit, weight).memories
        assert relative_error(memory.change[mask], tensors[f"delta_after_edit{number}"]) < 5e-4
        kept = (1 - 1e-5 * case["hparams"]["edit_lr"]) ** sum(case["n_steps"][:number])
        torch.testing.assert_close(memory.change[~mask], weight[~mask] * (kept - 1), rtol=1e-4, atol=0)
        distance = case["activation_distance_after_each_edit"][number - 1]["min"]
        assert memory.threshold == pytest.approx(distance, rel=5e-4)


def test_replay_follows_the_release(golden_model, monkeypatch):
    """Five edits, merged in twos: losses, thresholds, merged memories; of the recent edits the first is drawn."""
    monkeypatch.setattr(random.Random, "choice", lambda _self, edits: edits[0])
    case, _ = golden_case("wise", "tiny-llama", "replay-seq")
    mask = golden_mask(*golden_case("wise", "tiny-llama", "seq01"))
    deltas = released_edits(case, mask, loaded := golden_model("tiny-llama"))
    for delta, losses in zip(deltas, case["losses"], strict=True):
        ours = [(record["loss"], record["nll"], record["margin"]) for record in delta.diagnostics["losses"]]
        for found, theirs in zip(ours, losses, strict=True):
            assert found == pytest.approx((theirs["loss"], theirs["ft"], theirs["act"]), abs=2e-4)
    weight = loaded[0].get_submodule(deltas[0].hook_edit.settings["module"]).weight.detach()
    bank = MemoryBank.from_hook_edit(Delta.summed(deltas).hook_edit, weight)
    assert [memory.threshold for memory in bank.stored] == pytest.approx(case["editing_min_act"], rel=1e-4)
    assert [float(memory.change.norm()) for memory in bank.stored] == pytest.approx(case["stored_norms"], rel=1e-4)
    assert float(bank.current.change.norm()) == pytest.approx(case["current_norm"], rel=1e-4)


@pytest.mark.parametrize("name", ["merge-replay-strong-seq012", "merge-seq0123"])
@pytest.mark.parametrize("model_name", GOLDEN_MODELS)
def test_memories_are_merged_as_in_the_release(model_name, name, golden_model):
    """A memory per edit, merged in twos by TIES: a third edit with replay, and a second merge with a merged memory.

    Merged memories to 1e-3 and losses to 5e-3 (a kernel of attention moves them); no replay moves the loss by 20.
    """
    case, tensors = golden_case("wise", model_name, name)
    deltas = released_edits(case, golden_mask(case, tensors), loaded := golden_model(model_name))
    weight = loaded[0].get_submodule(deltas[0].hook_edit.settings["module"]).weight.detach()
    for number, (delta, losses, step) in enumerate(zip(deltas, case["losses"], case["steps"], strict=True), start=1):
        assert [record["loss"] for record in delta.diagnostics["losses"]] == pytest.approx(
            [record["loss"] for record in losses], abs=5e-3
        )
        bank = MemoryBank.from_hook_edit(Delta.summed(deltas[:number]).hook_edit, weight)
        if step["memory_min_act"]:  # with retrieve: a threshold per memory
            assert [memory.threshold for memory in bank.stored] == pytest.approx(step["memory_min_act"], rel=1e-3)
        # a memory that was just merged is no longer there alone
        name = f"{'merged' if step['merge'] else 'delta'}_after_edit{number}"
        change = bank.stored[-1].change
        assert float(change.norm()) == pytest.approx(case["norms"][name], rel=1e-3)
        for side, ours in zip(("out", "in"), contract(change), strict=True):
            assert relative_error(ours, tensors[f"{name}.{side}"]) < 1e-3, name
