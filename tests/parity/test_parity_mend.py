"""MEND against its release: statistics, edits with a given network, and the loss of a training step with its gradients.

The network's weights are a seeded draw, repeated here; only what the release computes with them is stored.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from golden_data import GOLDEN_MODELS, golden_case, golden_json, golden_names
from parity import golden_requests, relative_error

from edit_hooks import Delta, load_editor
from edit_hooks.editors.mend import MENDConfig, edited_shapes
from edit_hooks.gradient.artifact import save_network
from edit_hooks.gradient.hypernetwork import HyperNetwork
from edit_hooks.modeling.architectures import is_transposed
from edit_hooks.modeling.fingerprint.identity import model_identity
from edit_hooks.training.edit_data import EditExample, NumberedExample
from edit_hooks.training.mend.config import ARTIFACT_SETTINGS, TrainingConfig
from edit_hooks.training.mend.loss import MENDLoss

# Repeated with another attention kernel, the release differs from itself by up to 1.5e-5 (updates, gradients), 7e-7
# (statistics) and 3e-6 (losses, absolute).
UPDATE_BOUND, STATISTICS_BOUND, LOSS_BOUND = 1e-4, 1e-5, 1e-4

EDITS = [(model, name) for model, name in golden_names("mend") if "edit" in name or "batch" in name]
PARTS = ("U", "V", "bias", "scale", "shift")


def probe(length: int) -> torch.Tensor:
    """The vector with which the golden numbers contract a matrix."""
    return torch.cos(torch.arange(length, dtype=torch.float64))


def config_of(described: dict[str, Any], **settings: Any) -> MENDConfig:
    names = ("layers", "modules", "rank", "num_hidden")
    return MENDConfig(**{name: described[name] for name in names}, **{"sign": "plus", **settings})


def drawn_network(model_name: str, model: Any, **settings: Any) -> HyperNetwork:
    """The network that the release was given, with the statistics that it made of the three edits."""
    described = golden_json(f"mend/{model_name}")["network"]
    config = config_of(described, **settings)
    network = HyperNetwork(edited_shapes(model, config), config.network_settings())
    assert [f"{name}.weight" for name in network.shapes] == described["inner_params"]
    case, statistics = golden_case("mend", model_name, "statistics")
    generator = torch.Generator().manual_seed(described["network_seed"])
    with torch.no_grad():
        network.step_sizes.copy_(torch.tensor(described["step_sizes"]))
        for shape, factors in network.networks.items():
            for block in factors.blocks:
                for name in PARTS:
                    middle, spread = described["network_draw"][name]
                    drawn = 2 * torch.rand(getattr(block, name).shape, generator=generator) - 1
                    getattr(block, name).copy_(middle + spread * drawn)
            factors.mean.copy_(statistics[f"{shape}.mean"])
            factors.squares.copy_(statistics[f"{shape}.squares"])
            factors.count.fill_(case["counts"][shape])
    return network


def edit(network: HyperNetwork, loaded: Any, described: dict[str, Any], folder: Path, **settings: Any) -> list[Delta]:
    """The edits that our editor makes with an artifact of this network."""
    model, tokenizer = loaded
    fixed = {name: getattr(network.settings, name) for name in ("normalize", "sign")}
    config = config_of(described["network"], **fixed).to_dict()
    manifest = {
        "model": model_identity(model, tokenizer).to_dict(),
        "editor": {name: config[name] for name in ARTIFACT_SETTINGS},
    }
    save_network(network, manifest, folder)
    requests = [golden_requests()[number] for number in described["edits"]]
    editor = load_editor("mend", {"artifact": str(folder), **settings})
    return editor.edit(model, tokenizer, requests, joint=len(requests) > 1)


@pytest.mark.parametrize("engine", ["fast", "reference"])
@pytest.mark.parametrize(("model_name", "name"), EDITS)
def test_mend_gives_the_updates_of_the_release(model_name, name, engine, golden_model, tmp_path):
    loaded = golden_model(model_name)
    case, tensors = golden_case("mend", model_name, name)
    network = drawn_network(model_name, loaded[0], normalize=case["normalize"])
    if "step_sizes" in case:
        network.step_sizes.data.copy_(torch.tensor(case["step_sizes"]))
    described = {**case, "network": golden_json(f"mend/{model_name}")["network"]}
    (delta,) = edit(network, loaded, described, tmp_path, engine=engine)
    assert delta.weights().keys() == case["norms"].keys()
    for weight, update in delta.weights().items():
        module = loaded[0].get_submodule(weight.removesuffix(".weight"))
        update = (update.T if is_transposed(module) else update).double()
        for side, ours in (("out", update @ probe(update.shape[1])), ("in", probe(update.shape[0]) @ update)):
            error = relative_error(ours, tensors[f"{weight}.{side}"])
            assert error < UPDATE_BOUND, f"{model_name} {name} {weight} {side} off by {error:.1e}"
        assert float(update.norm()) == pytest.approx(case["norms"][weight], rel=UPDATE_BOUND)
    losses = [record["loss"] for record in delta.diagnostics["losses"]]
    assert losses == pytest.approx([case["nll_before"], case["nll_after"]], abs=LOSS_BOUND)


def training_loss(model_name: str, loaded: Any, network: HyperNetwork) -> tuple[MENDLoss, list[NumberedExample]]:
    """The loss with this network, and the three edits with the paraphrase and the locality text of the golden case."""
    case, described = (golden_json(f"mend/{model_name}")[name] for name in ("training", "network"))
    settings = {name: described[name] for name in ("layers", "modules", "rank", "num_hidden")}
    config = TrainingConfig(**settings, sign="plus", c_edit=case["c_edit"], c_loc=case["c_loc"])
    prompt, answer = case["locality"]
    examples = [
        EditExample(
            prompt=request.text,
            target=request.target_new,
            paraphrases=(case["paraphrase"],),
            locality=((prompt, answer.strip()),),
        )
        for request in golden_requests()
    ]
    return MENDLoss(*loaded, network, config, []), [NumberedExample(example, 0) for example in examples]


@pytest.mark.parametrize("model_name", GOLDEN_MODELS)
def test_the_statistics_of_three_edits(model_name, golden_model):
    loaded = golden_model(model_name)
    network = drawn_network(model_name, loaded[0])
    for factors in network.networks.values():
        for buffer in (factors.mean, factors.squares, factors.count):
            buffer.zero_()
    loss, examples = training_loss(model_name, loaded, network)
    with torch.no_grad():
        for example in examples:
            loss([[example]], observe=True)
    case, tensors = golden_case("mend", model_name, "statistics")
    for shape, factors in network.networks.items():
        assert int(factors.count) == case["counts"][shape]
        for name in ("mean", "squares"):
            error = relative_error(getattr(factors, name), tensors[f"{shape}.{name}"])
            assert error < STATISTICS_BOUND, f"{model_name} {shape} {name} off by {error:.1e}"


@pytest.mark.parametrize("model_name", GOLDEN_MODELS)
def test_the_loss_of_a_training_step_and_its_gradients(model_name, golden_model):
    """With fixed statistics, and a locality mask without the last position: it predicts nothing of the text."""
    loaded = golden_model(model_name)
    case, tensors = golden_case("mend", model_name, "training")
    network = drawn_network(model_name, loaded[0])
    loss, (example, *_) = training_loss(model_name, loaded, network)
    (terms,) = loss([[example]], observe=False)
    assert terms.metrics["edit"] == pytest.approx(case["edit"], abs=LOSS_BOUND)
    assert terms.metrics["locality"] == pytest.approx(case["locality_kl"], abs=LOSS_BOUND)
    assert float(terms.loss.detach()) == pytest.approx(case["loss"], abs=LOSS_BOUND)
    terms.loss.backward()
    assert relative_error(network.step_sizes.grad, tensors["step_sizes"]) < UPDATE_BOUND
    for shape, factors in network.networks.items():
        for number, block in enumerate(factors.blocks):
            for part in PARTS:
                name = f"{shape}.blocks.{number}.{part}"
                gradient = getattr(block, part).grad.double()
                assert float(gradient.norm()) == pytest.approx(case["gradient_norms"][name], rel=UPDATE_BOUND), name
                if gradient.dim() == 1:
                    assert relative_error(gradient, tensors[name]) < UPDATE_BOUND, name
                else:
                    across, along = gradient @ probe(gradient.shape[1]), probe(gradient.shape[0]) @ gradient
                    assert relative_error(across, tensors[f"{name}.out"]) < UPDATE_BOUND, name
                    assert relative_error(along, tensors[f"{name}.in"]) < UPDATE_BOUND, name


def test_the_paper_subtracts_what_the_release_adds(golden_model, tmp_path):
    loaded = golden_model("tiny-gpt2")
    case, _ = golden_case("mend", "tiny-gpt2", "edit0")
    described = {**case, "network": golden_json("mend/tiny-gpt2")["network"]}
    plus, minus = (
        edit(drawn_network("tiny-gpt2", loaded[0], sign=sign), loaded, described, tmp_path / sign)[0].weights()
        for sign in ("plus", "minus")
    )
    for name, update in plus.items():
        assert torch.equal(minus[name], -update)
