"""DEFER against a plain loop and against its releases.

The loop has modules of its own, whole forward passes, torch's Adam, and makes one edit at a time: `Adapted` is what the
released classes do for one row, with the query token and the threshold given.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from golden_data import golden_case, golden_names, golden_tensors
from parity import relative_error, token_nll
from parity_layers import contract
from torch import nn
from torch.nn.functional import cross_entropy

from edit_hooks import Delta, EditRequest, edited, load_editor
from edit_hooks.contract.tiny_models import EDIT_LAYER, NATURAL_TOKENIZER, REQUESTS
from edit_hooks.editors.defer import DEFERConfig, initial_predictor
from edit_hooks.modeling.architectures import architecture_of, map_shape
from edit_hooks.modeling.tokens import split_continuation

EDIT_REQUESTS = [EditRequest(**record) for record in REQUESTS]
SETTINGS: dict[str, Any] = {"layers": [EDIT_LAYER], "num_steps": 12, "lr": 0.01}
TOLERANCE = 1e-8  # float64; the order of sums differs, and Adam divides by small second moments


class Adapted(nn.Module):
    """The map with DEFER's two linear maps beside it."""

    def __init__(self, original: nn.Module, threshold: float) -> None:
        super().__init__()
        width_out, width_in = map_shape(original)
        self.original, self.threshold, self.column = original, threshold, 0
        self.gate, self.predictor = nn.Linear(width_in, 1).double(), nn.Linear(width_in, width_out).double()

    def forward(self, x_1TF: torch.Tensor) -> torch.Tensor:
        output_1TD = self.original(x_1TF)
        query_F = x_1TF[0, self.column]
        gate, value_D = torch.sigmoid(self.gate(query_F)), self.predictor(query_F)
        if self.training:
            return gate * value_D.expand_as(output_1TD) + (1 - gate) * output_1TD
        return value_D.expand_as(output_1TD) if gate >= self.threshold else output_1TD

    def start_from(self, gate_weight, gate_bias, weight, bias) -> None:
        with torch.no_grad():
            self.gate.weight.copy_(gate_weight[None])
            self.gate.bias.copy_(gate_bias[None])
            self.predictor.weight.copy_(weight)
            self.predictor.bias.copy_(bias)

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        gate, predictor = self.gate, self.predictor
        named = {"gate_weight": gate.weight[0], "gate_bias": gate.bias[0]}
        named |= {"weight": predictor.weight, "bias": predictor.bias}
        return {name: tensor.detach().clone() for name, tensor in named.items()}


class PlainDefer:
    """A copy of the model with the adapted map, trained on one request after another."""

    def __init__(self, model: Any, tokenizer: Any, module: str, first: EditRequest, threshold: float = 0.5) -> None:
        self.model, self.tokenizer = copy.deepcopy(model).requires_grad_(False), tokenizer
        name = architecture_of(model).linear_name(module, EDIT_LAYER)
        self.adapted = Adapted(self.model.get_submodule(name), threshold)
        self.adapted.start_from(*initial_predictor(model.get_submodule(name), first, DEFERConfig(**SETTINGS)))
        parent, _, own_name = name.rpartition(".")
        setattr(self.model.get_submodule(parent), own_name, self.adapted)

    def train(self, request: EditRequest, query_token: str) -> list[float]:
        """Train on one request, from where the module stands; return the loss before each step."""
        prompt, target = split_continuation(self.tokenizer, request.text, f" {request.target_new}")
        ids, labels = torch.tensor([prompt + target]), torch.tensor(target)
        self.adapted.column = -1 if query_token == "last_text" else len(prompt) - 1
        self.adapted.train()
        optimizer = torch.optim.Adam([*self.adapted.gate.parameters(), *self.adapted.predictor.parameters()], lr=0.01)
        losses = []
        for _ in range(SETTINGS["num_steps"]):
            loss = cross_entropy(self.model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1], labels)
            losses.append(float(loss.detach()))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return losses

    @torch.no_grad()
    def logits(self, request: EditRequest) -> torch.Tensor:
        """The logits of prompt and target, looked up by the last prompt token."""
        prompt, target = split_continuation(self.tokenizer, request.text, f" {request.target_new}")
        self.adapted.column = len(prompt) - 1
        self.adapted.eval()
        return self.model(torch.tensor([prompt + target]), use_cache=False).logits


@torch.no_grad()
def our_logits(model: Any, tokenizer: Any, request: EditRequest, steps: list[Delta]) -> torch.Tensor:
    prompt, target = split_continuation(tokenizer, request.text, f" {request.target_new}")
    with edited(model, *steps, prompt_lengths=[len(prompt)]):
        return model(torch.tensor([prompt + target]), use_cache=False).logits


def close(ours: Any, theirs: Any) -> None:
    torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("query_token", ["last_prompt", "last_text"])
@pytest.mark.parametrize(
    ("model_type", "module"),
    [("gpt2", "mlp_out"), ("gpt2", "mlp_in"), ("llama", "mlp_out"), ("gemma3_text", "mlp_out")],
)
def test_edits_are_those_of_the_plain_loop(model_type, module, query_token, tiny_model, tiny_tokenizer):
    """Four edits side by side against four loops: losses, parameters, gate, and answers to all four prompts."""
    model, tokenizer = tiny_model(model_type, dtype=torch.float64), tiny_tokenizer(NATURAL_TOKENIZER[model_type])
    editor = load_editor("defer", {**SETTINGS, "module": module, "query_token": query_token})
    deltas = editor.edit(model, tokenizer, EDIT_REQUESTS)
    num_hits = 0
    for request, delta in zip(EDIT_REQUESTS, deltas, strict=True):
        plain = PlainDefer(model, tokenizer, module, request)
        losses = plain.train(request, query_token)
        close(torch.tensor([entry["loss"] for entry in delta.diagnostics["losses"]]), torch.tensor(losses))
        assert delta.hook_edit is not None and delta.hook_edit.tensors.keys() == plain.adapted.tensors.keys()
        for name, tensor in plain.adapted.tensors.items():
            close(delta.hook_edit.tensors[name], tensor)
        for asked in EDIT_REQUESTS:
            close(our_logits(model, tokenizer, asked, [delta]), plain.logits(asked))
        num_hits += delta.diagnostics["gate"] >= 0.5
    assert num_hits >= 3


@pytest.mark.parametrize("engine", ["fast", "reference"])
@pytest.mark.parametrize("query_token", ["last_prompt", "last_text"])
@pytest.mark.parametrize("model_type", ["gpt2", "llama", "gemma3_text"])
def test_a_stream_of_two_is_one_module_trained_twice(model_type, query_token, engine, tiny_model, tiny_tokenizer):
    """With a new Adam per edit."""
    model, tokenizer = tiny_model(model_type, dtype=torch.float64), tiny_tokenizer(NATURAL_TOKENIZER[model_type])
    editor = load_editor("defer", {**SETTINGS, "query_token": query_token, "engine": engine})
    plain = PlainDefer(model, tokenizer, "mlp_out", EDIT_REQUESTS[0])
    steps: list[Delta] = []
    for request in EDIT_REQUESTS[:2]:
        steps += editor.edit(model, tokenizer, [request], history=steps)
        losses = plain.train(request, query_token)
        close(torch.tensor([entry["loss"] for entry in steps[-1].diagnostics["losses"]]), torch.tensor(losses))
        assert steps[-1].hook_edit is not None
        for name, tensor in plain.adapted.tensors.items():
            close(steps[-1].hook_edit.tensors[name], tensor)
        for asked in EDIT_REQUESTS:
            close(our_logits(model, tokenizer, asked, steps), plain.logits(asked))


def test_the_start_is_drawn_as_torchs_linear(tiny_model):
    """Bounds and spread of ``nn.Linear``, weights and biases; another seed and another request draw others."""
    module = tiny_model("gpt2").get_submodule(architecture_of(tiny_model("gpt2")).linear_name("mlp_in", EDIT_LAYER))
    width_out, width_in = map_shape(module)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        gate, predictor = nn.Linear(width_in, 1), nn.Linear(width_in, width_out)
    first, other, again = (
        initial_predictor(module, EDIT_REQUESTS[number], DEFERConfig(**SETTINGS, seed=seed))
        for number, seed in ((0, 0), (1, 0), (0, 1))
    )
    for ours, theirs in zip(first, (gate.weight[0], gate.bias[0], predictor.weight, predictor.bias), strict=True):
        assert ours.shape == theirs.shape and float(ours.abs().max()) <= width_in**-0.5
    for ours, theirs in ((first.weight, predictor.weight), (first.bias, predictor.bias)):
        assert float(ours.std()) == pytest.approx(float(theirs.std()), rel=0.1)
        assert abs(float(ours.mean())) < 0.1 * width_in**-0.5
    assert not torch.equal(first.weight, other.weight) and not torch.equal(first.weight, again.weight)


# ------------------------------------------------------------------ released code

GOLDEN_BOUNDS = {torch.float32: 5e-4, torch.float64: 1e-6}  # of parameters; its float64 loss passes through float32
LOSS_BOUND, GATE_BOUND, NLL_BOUND = 1e-5, 1e-5, 1e-4


def golden_settings(case: dict[str, Any], name: str, model_name: str) -> dict[str, Any]:
    """Our settings for those of a golden case, with its drawn gate and predictor."""
    settings, prefix = case["hparams"], f"init.{case['init']}."
    stored = golden_tensors(f"defer/{model_name}")
    start = {key.removeprefix(prefix): tensor for key, tensor in stored.items() if key.startswith(prefix)}
    start["gate_weight"], start["gate_bias"] = start["gate_weight"][0], start["gate_bias"][0]
    (weight,) = settings["inner_params"]
    return {
        "layers": [int(weight.partition("[")[2].partition("]")[0])],
        "module": "mlp_in" if "c_fc" in weight else "mlp_out",
        "num_steps": settings["n_iter"],
        "lr": settings["edit_lr"],
        "threshold": settings["threshold"],
        "query_token": "last_text" if name.startswith("easyedit") else "last_prompt",
        "append_eos": "released" if case["appended_eos_text"] else False,
        "initial_predictor": start,
    }


@pytest.mark.parametrize(("model_name", "name"), golden_names("defer"))
def test_defer_gives_the_gate_and_the_predictor_of_the_releases(model_name, name, golden_model):
    """The GRACE repository with and without its end of the text, and EasyEdit, from the same drawn start."""
    case, tensors = golden_case("defer", model_name, name)
    dtype = getattr(torch, case["dtype"])
    model, tokenizer = golden_model(model_name, dtype)
    editor = load_editor("defer", golden_settings(case, name, model_name))
    history: list[Delta] = []
    for number, step in enumerate(case["steps"]):
        history += editor.edit(model, tokenizer, [EditRequest(**step["request"])], history=history)
        losses = [record["loss"] for record in history[-1].diagnostics["losses"]]
        assert losses == pytest.approx(step["losses"], abs=LOSS_BOUND)
        assert history[-1].hook_edit is not None
        for part, ours in history[-1].hook_edit.tensors.items():
            pairs = zip((".out", ".in"), contract(ours), strict=True) if part == "weight" else [("", ours.reshape(-1))]
            for side, kept in pairs:
                error = relative_error(kept, tensors[f"step{number}.{part}{side}"])
                assert error < GOLDEN_BOUNDS[dtype], f"{part} off by {error:.1e} in step {number}"
        own = step["after"][number]
        assert history[-1].diagnostics["gate"] == pytest.approx(own["gate"]["last_prompt"], abs=GATE_BOUND)
        if name.startswith("easyedit"):  # without a cache, it looks every text up by its own last token
            continue
        for after in step["after"]:
            with edited(model, *history, prompt_lengths=[len(after["prompt_ids"])]):
                nll = token_nll(model, after["prompt_ids"], after["target_ids"])
            assert nll.tolist() == pytest.approx(after["nll"], abs=NLL_BOUND)
