"""FT-L (every target token at the prompt's last position, weights in a ball) against EasyEdit's numbers."""

from __future__ import annotations

import pytest
from golden_data import GOLDEN_MODELS, golden_case
from parity import golden_requests, relative_error, token_nll

from edit_hooks import edited, load_editor

PROMPT = "The capital of Ostravia is"


@pytest.mark.parametrize("rate", ["0.0005", "0.005"])
@pytest.mark.parametrize("model_name", GOLDEN_MODELS)
def test_single_edits_give_the_numbers_of_the_release(model_name, rate, golden_model):
    model, tokenizer = golden_model(model_name)
    cases = [golden_case("ft-l", model_name, f"lr{rate}-edit{number}") for number in range(3)]
    settings = cases[0][0]["hparams"]
    config = {**settings, "layers": [cases[0][0]["layer"]]}
    deltas = load_editor("ft_l", config=config).edit(model, tokenizer, golden_requests())
    for delta, (case, tensors) in zip(deltas, cases, strict=True):
        where = f"requests {case['requests']}"
        weights = delta.weights()
        for name, reference in tensors.items():
            parameter = name.removeprefix("delta.").removesuffix(".every_8th_row")
            ours = weights[parameter][::8] if name.endswith(".every_8th_row") else weights[parameter]
            error = relative_error(ours, reference)
            assert error < 1e-3, f"{where}: {name} off by {error:.1e}"
        (matrix,) = (tensor for tensor in weights.values() if tensor.dim() == 2)
        assert float(matrix.double().norm()) == pytest.approx(case["weight_norm"], rel=1e-4), where
        losses = [record["loss"] for record in delta.diagnostics["losses"]]
        assert losses == pytest.approx(case["losses"], abs=1e-3), where
        with edited(model, delta):
            for after in case["target_nll_after"]:
                nll = token_nll(model, after["prompt_ids"], after["target_ids"])
                assert nll.tolist() == pytest.approx(after["nll_per_token"], abs=1e-2), where
