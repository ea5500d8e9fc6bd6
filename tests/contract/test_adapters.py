"""Edits under adapters: the unedited model is peft's own, and one edit gives one number in every way of answering."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from adapters import ADDITIVE, FACTS, KINDS, OUTSIDE, SCALING, facts_as_ids, likelihoods, load, save_base
from adapters import save_adapter as write_adapter
from lm_runs import build, case, instance
from transformers import AutoModelForCausalLM, AutoTokenizer

from edit_hooks import Delta, EditingError, EditRequest, Factor, edited, load_editor
from edit_hooks.base.registry import editor_class
from edit_hooks.contract.state import snapshot
from edit_hooks.contract.subject import contract_settings
from edit_hooks.contract.tiny_models import build_tokenizer
from edit_hooks.deltas.hook_edit import HookEdit
from edit_hooks.deltas.saving.export import export_merged, export_peft, read_peft
from edit_hooks.inference.decoding import generate
from edit_hooks.inference.items import GenerateItem, Limits, ScoreItem
from edit_hooks.inference.reference import generate_reference, score_reference
from edit_hooks.inference.scoring import score
from edit_hooks.inference.written import written
from edit_hooks.lm.model import EditedHFLM
from edit_hooks.modeling.adapter_layers import require_additive

REQUEST = EditRequest(prompt="{} is the capital of", subject="Port Elna", target_new="Dravonia", target_true="Peru")
# Those whose adapter is at the ends of a model, on every base; the others on a tied one.
ENDS = ("lora of the head", "lora of the embedding", "trained head", "trained embedding", "trained tokens")
PAIRS = [("tied", kind) for kind in (*ADDITIVE, *SCALING)]
PAIRS += [("untied", kind) for kind in ("lora", *ENDS[:4])]
PAIRS += [pytest.param("padded", kind, marks=pytest.mark.slow) for kind in ("lora", *ENDS[:4])]


@pytest.fixture(scope="module")
def paths(tmp_path_factory) -> Any:
    """(base, kind) -> path of the base model and of the adapter."""
    folder = tmp_path_factory.mktemp("adapters")
    bases = functools.cache(lambda base: save_base(folder / base, base))
    return functools.cache(
        lambda base, kind: (bases(base), write_adapter(bases(base), kind, folder / f"{base}-{kind.replace(' ', '-')}"))
    )


def ask(lm: EditedHFLM) -> list[float]:
    asked = [instance(case(unedited=False), prompt, answer) for prompt, answer in FACTS]
    return [answer.final.logprob for answer in lm.loglikelihood(asked)]


# -- the unedited model ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("base", "kind"), PAIRS)
def test_the_unedited_model_is_that_of_peft(paths, base, kind):
    path, adapter = paths(base, kind)
    right = likelihoods(load(path, adapter), path)
    assert right != pytest.approx(likelihoods(AutoModelForCausalLM.from_pretrained(path), path), abs=1e-3)
    assert ask(build(path, peft=adapter, mode="none")) == pytest.approx(right, abs=2e-4)


@pytest.mark.parametrize("kind", ["lora of the head", "trained head", "trained embedding", "trained tokens"])
def test_a_model_object_keeps_what_its_adapter_has_trained(paths, kind):
    """Tying its weights again would put the base model's in place of the adapter's."""
    path, adapter = paths("tied", kind)
    model = load(path, adapter)
    right = likelihoods(model, path)
    lm = EditedHFLM(pretrained=model, tokenizer=AutoTokenizer.from_pretrained(path), mode="none", store="off")
    assert ask(lm) == pytest.approx(right, abs=2e-4)
    assert likelihoods(model, path) == pytest.approx(right, abs=1e-5)


@pytest.mark.parametrize("kind", OUTSIDE)
def test_adapters_that_act_around_the_model_are_refused(paths, kind):
    """Edits and questions run the model inside, so the adapter would have no effect."""
    path, adapter = paths("tied", kind)
    with pytest.raises(EditingError, match=rf"\({kind.upper()}_TUNING\) acts around the model.*Merge it"):
        build(path, peft=adapter, mode="none").load()


def test_an_adapter_of_a_longer_vocabulary_brings_its_rows(paths, tmp_path):
    """Trained with two added tokens: peft saves the whole embedding beside such an adapter."""
    path, _ = paths("tied", "lora")
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.add_tokens(["<one>", "<two>"])
    model = AutoModelForCausalLM.from_pretrained(path)
    model.resize_token_embeddings(len(tokenizer))
    wrapped = peft_model(model, KINDS["lora"]())
    wrapped.save_pretrained(tmp_path / "adapter", save_embedding_layers=True)
    tokenizer.save_pretrained(tmp_path / "adapter")
    right = likelihoods(wrapped.eval(), path)
    lm = build(path, peft=str(tmp_path / "adapter"), tokenizer=str(tmp_path / "adapter"), mode="none")
    assert ask(lm) == pytest.approx(right, abs=2e-4)
    rows = lm.model.get_base_model().get_input_embeddings().weight.shape[0]
    assert rows == len(tokenizer) == len(AutoTokenizer.from_pretrained(path)) + 2


def peft_model(model, config):
    from peft import get_peft_model

    return get_peft_model(model, config)


def test_a_difference_is_not_added_twice_to_tied_weights(paths):
    path, adapter = paths("tied", "lora")
    with pytest.raises(EditingError, match="tied: lm-eval would add the difference twice"):
        build(path, delta=path, mode="none")
    with pytest.raises(EditingError, match="cannot be combined"):
        build(path, delta=path, peft=adapter, mode="none")


# -- edits by editors -----------------------------------------------------------------------------------------------


def answers(model: Any, delta: Delta, path: str) -> dict[str, list[float]]:
    """Log-likelihoods under an edit: per row beside the unedited model, written, one by one, and in place."""
    items = [(ScoreItem(*ids), delta) for ids in facts_as_ids()]
    ways = {
        "rows": score(model, [*items, (items[0][0], None)], Limits(), lambda count: None)[:2],
        "written": score(model, written(items), Limits(), lambda count: None),
        "reference": score_reference(model, items, lambda count: None),
    }
    found = {way: [answer.logprob for answer in scored] for way, scored in ways.items()}
    if delta.hook_edit is None:
        with edited(model, delta):
            found["in place"] = likelihoods(model, path)
    return found


def assert_one_number(model: Any, delta: Delta, path: str) -> None:
    before = likelihoods(model, path)
    found = answers(model, delta, path)
    for way, values in found.items():
        assert values == pytest.approx(found["reference"], abs=2e-3), way
    assert found["reference"] != pytest.approx(before, abs=1e-3), "the edit changes nothing"
    questions = [(GenerateItem(context, (), 5), delta) for context, _ in facts_as_ids()]
    tokenizer = build_tokenizer("byte_bpe_bos")
    texts = generate(model, tokenizer, questions, Limits(), lambda count: None)
    assert texts == generate_reference(model, tokenizer, questions, lambda count: None)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("kind", "editor"),
    [
        *((kind, editor) for kind in (*ADDITIVE, *SCALING) for editor in ("r_rome", "ft_m")),
        *((kind, editor) for kind in ("trained map", "trained tokens", "dora") for editor in ("mend", "grace")),
    ],
)
def test_one_edit_is_one_number_or_is_refused_by_name(paths, kind, editor):
    path, adapter = paths("tied", kind)
    model = load(path, adapter)
    tokenizer = build_tokenizer("byte_bpe_bos")
    before = snapshot(model, tokenizer)
    made = load_editor(editor, contract_settings(editor_class(editor)))
    refused = kind in SCALING and editor in ("r_rome", "mend")  # they compute updates that act beside the weight
    refused |= (kind, editor) == ("hra", "ft_m")  # no gradient reaches the weight inside
    if refused:
        with pytest.raises(EditingError, match=r"layers.1.mlp.down_proj is inside an adapter layer .*merge_and_unload"):
            made.edit(model, tokenizer, [REQUEST])
    else:
        (delta,) = made.edit(model, tokenizer, [REQUEST])
        assert_one_number(model, delta, path)
    assert before == snapshot(model, tokenizer)


def test_an_edit_of_an_adapted_map_through_the_model_class(paths, tmp_path):
    """In single edits, in a stream, and from its file."""
    path, adapter = paths("tied", "trained head")
    settings = {"peft": adapter, "editor": "r_rome", "editor_args": contract_settings(editor_class("r_rome"))}
    rows = build(path, **settings)
    expected = ask(rows)
    assert ask(build(path, answer="patch", **settings)) == pytest.approx(expected, abs=2e-3)
    assert ask(build(path, engine="reference", **settings)) == pytest.approx(expected, abs=2e-3)
    (delta,) = rows.editor.edit(rows.model, rows.tokenizer, [EditRequest(**case()["edit_requests"][0])])
    delta.meta |= {"model": rows.identity.to_dict()}
    delta.save(tmp_path / "edit.safetensors")
    loaded = build(path, peft=adapter, load_edit=str(tmp_path / "edit.safetensors"), editor_args=None)
    assert ask(loaded) == pytest.approx(expected, abs=2e-3)


# -- edits of the ends of a model -----------------------------------------------------------------------------------


def random_edit(model: Any, what: str) -> Delta:
    """An edit of random numbers at the head, the embedding or a map."""
    inner = getattr(model, "get_base_model", lambda: model)()
    (rows, width), generator = inner.get_input_embeddings().weight.shape, torch.Generator().manual_seed(9)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.3

    name = "lm_head" if "head" in what else "model.embed_tokens"
    if what.startswith("low-rank"):
        return Delta(factors={name: Factor(normal(rows, 2), normal(width, 2))})
    return Delta(dense={f"{name}.weight": normal(rows, width)})


@pytest.mark.one_in(2)
@pytest.mark.parametrize("what", ["low-rank head", "dense head", "low-rank embedding", "dense embedding"])
@pytest.mark.parametrize(
    ("base", "kind"), [("tied", None), ("untied", None), *(("tied", kind) for kind in ENDS), ("untied", "trained head")]
)
def test_an_edit_of_an_end_is_one_number(paths, base, kind, what):
    path, adapter = paths(base, kind or "lora")
    model = AutoModelForCausalLM.from_pretrained(path) if kind is None else load(path, adapter)
    before = snapshot(model, build_tokenizer("byte_bpe_bos"))
    delta = random_edit(model, what)
    if kind == "trained tokens" and "head" in what:  # whose rows are not those of the weight
        with pytest.raises(EditingError, match="lm_head is inside an adapter layer"):
            answers(model, delta, path)
    else:
        assert_one_number(model, delta, path)
    assert before == snapshot(model, build_tokenizer("byte_bpe_bos"))


def test_an_edit_of_a_tied_head_leaves_the_embedding(paths):
    path, _ = paths("tied", "lora")
    model = AutoModelForCausalLM.from_pretrained(path)
    embedding = model.get_input_embeddings().weight
    before = embedding.detach().clone()
    with edited(model, random_edit(model, "dense head")) as inside:
        assert torch.equal(embedding, before) and inside.get_output_embeddings().weight is embedding
    with edited(model, random_edit(model, "dense embedding")):
        assert not torch.equal(embedding, before)


@pytest.mark.parametrize("what", ["low-rank head", "dense head", "dense embedding"])
@pytest.mark.parametrize("base", ["tied", "untied"])
def test_a_merged_checkpoint_answers_as_the_edited_model(paths, tmp_path, base, what):
    """A tied head that the edit changes has a weight of its own there, and the model is tied again afterwards."""
    path, _ = paths(base, "lora")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    before = snapshot(model, tokenizer)
    delta = random_edit(model, what)
    with edited(model, delta):
        right = likelihoods(model, path)
    merged = AutoModelForCausalLM.from_pretrained(export_merged(model, tokenizer, delta, tmp_path / "merged"))
    assert likelihoods(merged, path) == pytest.approx(right, abs=1e-4)
    assert merged.config.tie_word_embeddings == (base == "tied" and "head" not in what)
    assert before == snapshot(model, tokenizer)


def test_an_exported_edit_of_a_tied_head_is_read_as_an_edit_and_by_peft(paths, tmp_path):
    path, _ = paths("tied", "lora")
    model = AutoModelForCausalLM.from_pretrained(path)
    delta = random_edit(model, "low-rank head")
    with edited(model, delta):
        right = likelihoods(model, path)
    folder = str(export_peft(delta, tmp_path / "adapter"))
    assert ask(build(path, load_edit=folder, editor_args=None)) == pytest.approx(right, abs=1e-3)
    assert ask(build(path, peft=folder, mode="none")) == pytest.approx(right, abs=1e-3)


def test_hooks_at_the_head_are_refused(paths):
    """It is computed apart from the pass, so they would have no effect."""
    path, _ = paths("untied", "lora")
    model = AutoModelForCausalLM.from_pretrained(path)
    rows, width = model.get_output_embeddings().weight.shape
    tensors = {
        "keys": torch.zeros(1, width),
        "values": torch.ones(1, rows),
        "radii": torch.ones(1),
        "index": torch.tensor([0]),
    }
    settings = {"module": "lm_head", "replacement": "replace_last", "query": "prefill", "labels": [[1]]}
    with pytest.raises(EditingError, match="hooks lm_head, the head"):
        answers(model, Delta(hook_edit=HookEdit("codebook", tensors, settings)), path)


# -- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("lora", "norms")])
def test_a_refused_load_edit_names_the_remedy(paths, kind):
    path, adapter = paths("tied", kind)
    with pytest.raises(EditingError, match=f"Load it with peft={adapter} instead"):
        read_peft(adapter, AutoModelForCausalLM.from_pretrained(path))


def test_a_model_with_adapters_is_not_merged_by_an_export(paths, tmp_path):
    path, adapter = paths("tied", "lora")
    model = load(path, adapter)
    for one in (model, model.get_base_model()):
        with pytest.raises(EditingError, match=r"Merge them into it .*save the model"):
            export_merged(one, AutoTokenizer.from_pretrained(path), random_edit(model, "dense head"), tmp_path / "out")


def test_a_layer_is_tested_again_when_its_adapter_changes(paths):
    """A reflection of two of many directions is noticed; without its adapter the layer is that of the weight."""
    path, adapter = paths("tied", "hra")
    model = load(path, adapter)
    layer = model.get_base_model().get_submodule("model.layers.1.mlp.down_proj")
    states = [copy.deepcopy(layer.state_dict()), layer.training]
    for _ in range(2):
        with pytest.raises(EditingError, match="scales or rotates"):
            require_additive(layer, "down_proj")
    assert states[1] == layer.training and all(
        torch.equal(value, layer.state_dict()[name]) for name, value in states[0].items()
    )
    with model.disable_adapter():
        require_additive(layer, "down_proj")
    with pytest.raises(EditingError, match="scales or rotates"):
        require_additive(layer, "down_proj")
