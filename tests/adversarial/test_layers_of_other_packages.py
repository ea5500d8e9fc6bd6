"""Linear maps of other packages: what is read of them; those that break a promise are refused by what they do."""

from __future__ import annotations

import pytest
import torch
from mend_runs import trainer
from quantized_models import ON_PROMPTS, CodedLinear, editor_of, forbidden_forward, tokenizer_of
from torch import nn

from edit_hooks import edited
from edit_hooks.base.registry import EDITORS
from edit_hooks.contract.subject import EDIT_REQUESTS
from edit_hooks.contract.tiny_models import build_model
from edit_hooks.deltas.row_edits import RowEdits
from edit_hooks.modeling import weights
from edit_hooks.modeling.fingerprint.tensor_hash import weights_digest
from edit_hooks.modeling.weights import AddedMap, read_weight
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.scopes import undone


class PackedLinear(nn.Module):
    """Codes in integer buffers, and neither a weight nor widths: nothing shows that it is a linear map."""

    def __init__(self, linear):
        super().__init__()
        self.register_buffer("qweight", torch.zeros(linear.in_features // 8, linear.out_features, dtype=torch.int32))

    def forward(self, x):
        raise AssertionError("not run")


class WithoutGradients(CodedLinear):
    """As of torchao's layers that quantize activations, too."""

    @torch.no_grad()
    def forward(self, x):
        return super().forward(x)


class OtherGradients(CodedLinear):
    """Only half of the output passes a gradient."""

    def forward(self, x):
        out = super().forward(x)
        half = out.shape[-1] // 2
        return torch.cat([out[..., :half], out[..., half:].detach()], -1)


class CoarseActivations(CodedLinear):
    """Activations of so few bits that the output is no linear function of the input."""

    def forward(self, x):
        return super().forward(x.sign() + 0 * x)


class Broken(CodedLinear):
    """As of layers that need a GPU."""

    def forward(self, x):
        raise RuntimeError("no kernel")


def float8(linear):
    linear.weight = nn.Parameter(linear.weight.detach().to(torch.float8_e4m3fn), requires_grad=False)
    return linear


REFUSED = {
    PackedLinear: "cannot be tested alone",
    WithoutGradients: "no gradient reaches",
    OtherGradients: "gradient of its input is another one",
    CoarseActivations: "no affine function",
    Broken: "no kernel",
    float8: "does not run alone",
}


@pytest.mark.parametrize("change", REFUSED)
@pytest.mark.parametrize("place", ["model.layers.1.mlp.down_proj", "model.layers.2.self_attn.q_proj"])
def test_maps_that_break_a_promise_are_refused_before_any_work(change, place):
    """By what modules and tensors are and do, also above the edited module: gradients have to pass there."""
    model, tokenizer = build_model("llama"), tokenizer_of("llama")
    parent, _, child = place.rpartition(".")
    setattr(model.get_submodule(parent), child, change(model.get_submodule(place)))
    with forbidden_forward(model):
        for name in EDITORS if change is PackedLinear else ("r_rome", "ft_m", "ike", "grace"):
            if name in ON_PROMPTS:
                assert editor_of(name).edit(model, tokenizer, [EDIT_REQUESTS[0]])
            else:
                with pytest.raises(EditingError, match=f"{place}.*{REFUSED[change]}.*dequantize=True"):
                    editor_of(name).edit(model, tokenizer, [EDIT_REQUESTS[0]])


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_matrix_of_a_map_is_read_from_its_outputs(bias, dtype, monkeypatch):
    """In parts, without its bias, and with the updates beside it; the map is as before, also after a failure."""
    monkeypatch.setattr(weights, "ROWS_AT_ONCE", 7)
    torch.manual_seed(0)
    linear = nn.Linear(24, 16, bias=bias)
    if bias:
        linear.bias.data += 100
    coded = CodedLinear(linear)
    coded.scale = coded.scale.to(dtype)
    if dtype != torch.float32:  # refuses other states, as HQQ does
        coded.forward = lambda x: nn.functional.linear(x, coded.codes.to(dtype) * coded.scale, coded.bias)
        coded.bias = nn.Parameter(coded.bias.to(dtype)) if bias else None
    kept = coded.bias
    wanted = (coded.codes.to(dtype) * coded.scale).float()
    assert torch.equal(read_weight(coded), wanted) and coded.bias is kept
    added = AddedMap(coded)
    added.add_low_rank(torch.ones(16, 1), torch.ones(24, 1))
    with undone(added.remove):
        added.attach()
        assert torch.equal(read_weight(coded), wanted + 1)
    coded.forward = lambda x: nn.functional.linear(x, wanted.to(x) * (len(x[0]) < 7))  # another map on many rows
    with pytest.raises(EditingError, match="unit vectors are not its matrix"):
        read_weight(coded)
    assert coded.bias is kept


def test_weights_in_a_class_of_another_package_identify_a_model(monkeypatch):
    """As of torchao: codes and scales inside a tensor, which has no bytes of its own."""

    class Codes(torch.Tensor):
        def __tensor_flatten__(self):
            return ["codes", "scale"], None

    def model_of(codes, scale):
        linear = nn.Linear(4, 3)
        weight = torch.zeros(3, 4).as_subclass(Codes)
        weight.codes, weight.scale = codes, scale
        linear.weight = nn.Parameter(weight, requires_grad=False)
        linear.weight.codes, linear.weight.scale = codes, scale
        linear.bias.data.zero_()
        return linear

    ones, twos = torch.ones(3, 4, dtype=torch.int8), torch.full((3, 4), 2, dtype=torch.int8)
    scales = torch.ones(3), torch.zeros(3)
    found = {weights_digest(model_of(codes, scale)) for codes in (ones, twos) for scale in scales}
    assert len(found) == 4 and weights_digest(model_of(ones.clone(), torch.ones(3))) in found


def test_training_of_mend_is_refused_before_any_work(tmp_path):
    model = build_model("llama")
    model.model.layers[2].mlp.down_proj = PackedLinear(model.model.layers[2].mlp.down_proj)
    with forbidden_forward(model), pytest.raises(EditingError, match=r"layers\.2\.mlp\.down_proj"):
        trainer(model, tokenizer_of("llama"), tmp_path / "mend")


def test_saved_edits_of_weights_that_cannot_be_read_are_refused():
    model = build_model("llama")
    place = "model.layers.1.mlp.down_proj"
    (delta,) = editor_of("r_rome").edit(model, tokenizer_of("llama"), [EDIT_REQUESTS[0]])
    for change in (PackedLinear, WithoutGradients, float8):
        broken = build_model("llama")
        broken.model.layers[1].mlp.down_proj = change(broken.get_submodule(place))
        for apply in (lambda model: edited(model, delta).__enter__(), lambda model: RowEdits(model, [delta])):
            with pytest.raises(EditingError, match=place):
                apply(broken)
