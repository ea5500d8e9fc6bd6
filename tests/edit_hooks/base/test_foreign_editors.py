"""Editors of other packages: declarations that Python accepts, and a model that is not as it was."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from accelerate import cpu_offload

from edit_hooks import Delta, EditingError, EditJob, Editor, EditorConfig, EditRequest, architecture_of, config_field
from edit_hooks.base.footprint import NOTHING_CARRIED, StreamGrowth
from edit_hooks.base.registry import editor_class, load_editor
from edit_hooks.contract.tiny_models import EDIT_LAYER, build_model, build_tokenizer
from edit_hooks.modeling.fingerprint import guard, tensor_hash
from edit_hooks.utils.errors import ModelChangedError

REQUEST = EditRequest(prompt="{} is located in", subject="Port Amelin", target_new="Rome")


class Foreign(Editor[EditorConfig]):
    """Adds nothing to one weight, after what a test does to the model."""

    name = "foreign"
    config_class = EditorConfig
    needs_subject = False
    fault: Callable[[Any], object] = staticmethod(lambda job: None)

    def compute(self, job: EditJob[EditorConfig]) -> list[Delta]:
        self.fault(job)
        name = f"{architecture_of(job.model).rewrite_name(job.config.edited_layers[0])}.weight"
        update = torch.zeros_like(job.model.get_parameter(name)).requires_grad_()
        return [Delta(dense={name: update * 2}) for _ in job.groups]


def edit_with(fault: Callable[[Any], object], calls: int = 1) -> list[Delta]:
    editor = Foreign({"layers": [EDIT_LAYER]})
    editor.fault = fault
    model, tokenizer = build_model("gpt2"), build_tokenizer("byte_bpe")
    for _ in range(calls - 1):
        editor.fault = lambda job: None
        editor.edit(model, tokenizer, [REQUEST], measure=False)
        editor.fault = fault
    return editor.edit(model, tokenizer, [REQUEST], measure=False)


def weight(job: Any) -> torch.Tensor:
    return job.model.transformer.h[1].mlp.c_proj.weight


def one_entry(job: Any) -> None:
    weight(job).data.view(-1)[3] += 1  # no version counter counts this, and no sample of later calls has it


def swap(job: Any) -> None:
    job.model.transformer.h[1].mlp.c_proj.weight = torch.nn.Parameter(weight(job).detach().clone())


def patch_forward(job: Any) -> None:
    module = job.model.transformer.h[1].mlp.c_proj
    module.forward = lambda x: torch.zeros_like(x)


def swap_class(job: Any) -> None:
    module = job.model.transformer.h[1].mlp.c_proj
    module.__class__ = type("Edited", (type(module),), {})


def write_and_raise(job: Any) -> None:
    weight(job).data.add_(1)
    raise EditingError("the matrix is singular")


FAULTS: dict[str, tuple[Callable[[Any], object], str]] = {
    "one entry, behind autograd": (one_entry, "values of transformer.h.1.mlp.c_proj.weight"),
    "another parameter": (swap, "the parameter transformer.h.1.mlp.c_proj.weight"),
    "a tied embedding": (lambda job: job.model.lm_head.weight.data.mul_(2), "values of lm_head.weight"),
    "a hook": (lambda job: job.model.transformer.h[0].register_forward_hook(print), "_forward_hooks of transformer"),
    "training mode": (lambda job: job.model.train(), "training mode of lm_head"),
    "a gradient": (lambda job: setattr(weight(job), "grad", torch.ones(128, 32)), "the gradient of transformer.h.1"),
    "a frozen weight": (lambda job: weight(job).requires_grad_(False), "requires_grad of transformer.h.1.mlp.c_proj"),
    "the configuration": (lambda job: setattr(job.model.config, "use_cache", False), "the configuration"),
    "the padding side": (lambda job: setattr(job.tokenizer, "padding_side", "middle"), "the tokenizer's padding side"),
    "a forward in the place of the module's": (patch_forward, "the code of transformer.h.1.mlp.c_proj"),
    "another class": (swap_class, "the code of transformer.h.1.mlp.c_proj"),
    "the attention": (lambda job: job.model.set_attn_implementation("eager"), "the attention implementation"),
    "a write, then an error": (write_and_raise, "values of transformer.h.1.mlp.c_proj.weight"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_an_editor_that_leaves_the_model_changed_ends_the_run(fault: str) -> None:
    """Its results would be those of another model. The error is none that makes an edit a failed one."""
    change, named = FAULTS[fault]
    with pytest.raises(ModelChangedError, match=r"editor 'foreign' left .* changed: ") as caught:
        edit_with(change)
    assert named in str(caught.value) and not isinstance(caught.value, EditingError)


def test_later_calls_compare_a_sample_of_every_tensor() -> None:
    with pytest.raises(ModelChangedError, match="values of transformer"):
        edit_with(lambda job: weight(job).data.add_(1), calls=2)


def test_all_weights_are_read_once_also_for_edits_that_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run with unusable requests goes on after each, and reading the weights of a large model takes a minute."""
    whole: list[bool] = []
    state = guard._state
    monkeypatch.setattr(guard, "_state", lambda *arguments: whole.append(arguments[-1]) or state(*arguments))

    def fail(job: Any) -> None:
        raise EditingError("the matrix is singular")

    editor, model, tokenizer = Foreign({"layers": [EDIT_LAYER]}), build_model("gpt2"), build_tokenizer("byte_bpe")
    editor.fault = fail
    for _ in range(2):
        with pytest.raises(EditingError, match="singular"):
            editor.edit(model, tokenizer, [REQUEST], measure=False)
    assert whole == [True, True, False, False]


def test_a_pass_of_an_offloaded_model_is_no_change() -> None:
    """Editors of the prompt can use one, in which every pass puts other parameters into their places."""
    editor = type("Prompting", (Foreign,), {"name": "prompting", "writes": ("context",)})()
    editor.compute = lambda job: [job.model(torch.tensor([[3, 4]])), [Delta()]][1]
    model = cpu_offload(build_model("gpt2"))
    assert len(editor.edit(model, build_tokenizer("byte_bpe"), [REQUEST])) == 1


def test_a_state_that_a_stream_would_lose_is_refused() -> None:
    """A class inherits what its base states."""
    state = {"count": torch.ones(())}
    for growth, is_refused in ((NOTHING_CARRIED, True), (None, False), (StreamGrowth("a count", "no"), False)):
        editor = type("Carrying", (Foreign,), {"name": "carrying", "stream_growth": growth})({"layers": [EDIT_LAYER]})
        editor.compute = lambda job: [Delta(stream_state=dict(state)) for _ in job.groups]
        arguments = (build_model("gpt2"), build_tokenizer("byte_bpe"), [REQUEST])
        if is_refused:
            with pytest.raises(EditingError, match="has a stream_state, and 'stream_growth' of the class"):
                editor.edit(*arguments, measure=False)
        else:
            (delta,) = editor.edit(*arguments, measure=False)
            assert editor.condensed(arguments[0], [delta])[0].stream_state == state


def test_codes_and_scales_of_a_quantized_weight_are_sampled() -> None:
    """A tensor of another package may lack every operation but the list of its parts."""

    class Coded:
        def __init__(self) -> None:
            self.codes, self.scale = torch.arange(600, dtype=torch.uint8), torch.ones(1, dtype=torch.bfloat16)

        def __tensor_flatten__(self) -> tuple[list[str], None]:
            return ["codes", "scale"], None

    weight: Any = Coded()
    before = tensor_hash.sample_of(weight)
    assert len(before) >= tensor_hash.NUM_SAMPLED and tensor_hash.sample_of(weight) == before
    weight.scale += 1
    assert tensor_hash.sample_of(weight) != before


def test_what_returns_to_its_place_is_no_change() -> None:
    def write_and_restore(job: Any) -> None:
        copy = weight(job).detach().clone()
        weight(job).data.add_(1)
        weight(job).data.copy_(copy)

    (delta,) = edit_with(write_and_restore)
    assert not delta.dense["transformer.h.1.mlp.c_proj.weight"].requires_grad, "the graph would stay in memory"


def test_diagnostics_that_no_file_holds_are_named_before_the_edit_is_used() -> None:
    class Tensors(Foreign):
        def compute(self, job: EditJob[EditorConfig]) -> list[Delta]:
            return [Delta(diagnostics={"final_loss": torch.zeros(())}) for _ in job.groups]

    with pytest.raises(EditingError, match=r"entry 'final_loss' of a delta's diagnostics is not JSON .*float\(loss\)"):
        Tensors().edit(build_model("gpt2"), build_tokenizer("byte_bpe"), [REQUEST], measure=False)


def test_diagnostics_with_the_names_of_a_report_are_refused() -> None:
    """An ``error`` of 0.1 in the solve would be read as a failed edit, and the run would report none."""

    class Named(Foreign):
        def compute(self, job: EditJob[EditorConfig]) -> list[Delta]:
            return [Delta(diagnostics={"error": 0.1}) for _ in job.groups]

    with pytest.raises(EditingError, match=r"meaning of their own for 'error'.* as in \w+_error"):
        Named().edit(build_model("gpt2"), build_tokenizer("byte_bpe"), [REQUEST], measure=False)


@pytest.mark.parametrize("writes", [("hooks",), ("context",)])
def test_a_change_that_the_class_does_not_declare_is_refused(writes: tuple[str, ...]) -> None:
    """Tables compare editors of the prompt apart, and measure no damage of theirs."""
    editor = type("Undeclared", (Foreign,), {"name": "undeclared", "writes": writes})({"layers": [EDIT_LAYER]})
    with pytest.raises(
        EditingError, match=rf"a delta changes weights, and 'writes' of the class is \('{writes[0]}',\)"
    ):
        editor.edit(build_model("gpt2"), build_tokenizer("byte_bpe"), [REQUEST], measure=False)


class Undecorated(EditorConfig):
    lr: float = config_field("learning rate", default=1.0)


@dataclass(kw_only=True)
class Decorated(Undecorated):
    steps: int = config_field("steps", default=1)


class TakesAName(Foreign):
    name = "rome"


class HasAPath(Foreign):
    name = "../mine"


class IsAFolder(Foreign):
    name = ".."


class GrowsInWords(Foreign):
    name = "grows_in_words"
    stream_growth = "with edits"


class WritesText(Foreign):
    name = "writes_text"
    writes = "weights"


class WritesNothingKnown(Foreign):
    name = "writes_nothing_known"
    writes = ("weight",)


class LosesSettings(Foreign):
    name = "loses_settings"
    config_class = Undecorated


class LosesSettingsOfABase(Foreign):
    name = "loses_settings_of_a_base"
    config_class = Decorated


class HasNoCompute(Editor[EditorConfig]):
    name = "has_no_compute"
    config_class = EditorConfig


class HasNoConfig(Foreign):
    name = "has_no_config"
    config_class = dict


DECLARATIONS = {
    "TakesAName": "is 'rome', which is a built-in editor",
    "HasAPath": r"'../mine'; letters, digits",
    "IsAFolder": r"'\.\.'; letters, digits",
    "GrowsInWords": r"'stream_growth' of .* is 'with edits'; an edit_hooks\.StreamGrowth or None",
    "WritesText": "'writes' of .* is 'weights'; a tuple with some of weights, hooks, context",
    "WritesNothingKnown": r"'writes' of .* is \('weight',\)",
    "LosesSettings": r"lr of Undecorated are not settings; put @dataclass\(kw_only=True\) before class Undecorated",
    "LosesSettingsOfABase": "lr of Decorated are not settings",
    "HasNoCompute": "does not define compute",
    "HasNoConfig": "a subclass of edit_hooks.EditorConfig is needed",
}


class TakesOtherArguments(Foreign):
    def __init__(self, lr: float) -> None:
        self.lr = lr


class TakesNoArgument(Foreign):
    def __init__(self) -> None:
        super().__init__()


@dataclass(kw_only=True)
class NeedsAPath(EditorConfig):
    path: str


class HasANeed(Foreign):
    config_class = NeedsAPath


@pytest.mark.parametrize("name", ["TakesOtherArguments", "TakesNoArgument"])
def test_an_init_that_loses_the_settings_is_refused(name: str) -> None:
    with pytest.raises(EditingError, match=rf"{name}.__init__ does not take the settings, or does not pass them on"):
        load_editor(f"{__name__}:{name}")


def test_a_setting_without_default_is_asked_for() -> None:
    model = build_model("gpt2")
    with pytest.raises(EditingError, match=r"'path' has no default and is not given; give it, as in editor_args=path:"):
        load_editor(f"{__name__}:HasANeed").check_settings(model)
    load_editor(f"{__name__}:HasANeed", {"path": "x"}).check_settings(model)


@pytest.mark.parametrize("name", DECLARATIONS)
def test_a_declaration_that_would_be_lost_is_refused(name: str) -> None:
    with pytest.raises(EditingError, match=DECLARATIONS[name]):
        editor_class(f"{__name__}:{name}")
    assert editor_class(f"{__name__}:Foreign") is Foreign
