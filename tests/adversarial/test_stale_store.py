"""A changed model is not served the edits, answers and statistics of the model before the change."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lm_eval.api.instance import Instance
from lm_runs import FAST, build, case, instance
from safetensors.torch import save_file

from edit_hooks import EditRequest, load_editor
from edit_hooks.contract.tiny_models import REQUESTS, SENTENCES, build_model, build_tokenizer, save_tiny
from edit_hooks.locate.moments.second_moments import MomentSettings, second_moments
from edit_hooks.locate.tracing.causal_trace import TraceSettings, trace_facts
from edit_hooks.modeling.fingerprint import identity as identity_module
from edit_hooks.store.store import Store
from lm_edit.edits import make_edits

QUESTION = ("Port Elna is the capital of", " Dravonia")


def ask(lm: Any) -> list[float]:
    """Log-probabilities of two answers: under an edit, and of the unedited model."""
    (answer,) = lm.loglikelihood([instance(case(), *QUESTION)])
    return [answer.final.logprob, answer.final.unedited.logprob]


def lm_of(folder: Path, *arguments: Any, **options: Any) -> Any:
    return build(str(folder), *arguments, **options)


def stored(folder: Path) -> int:
    return len(list((folder / "store" / "deltas").rglob("*.safetensors")))


def edit_json(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


# Changes of a checkpoint's files, and of the options under which it is loaded.
FILE_CHANGES: dict[str, dict[str, Any]] = {
    "rope_theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 20.0}},
    "norm eps": {"rms_norm_eps": 0.1},
    "activation": {"hidden_act": "relu"},
    "heads": {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16},
    "sliding window": {"sliding_window": 2},
}


# The plain run tries one field of the configuration; `-m slow` the others.
@pytest.mark.parametrize(
    "change",
    [
        *(pytest.param(name, marks=[pytest.mark.slow] if name != "heads" else []) for name in FILE_CHANGES),
        *("normalizer", "tokenizer", "add_bos_token"),
    ],
)
def test_a_changed_model_is_edited_and_asked_again(change: str, tmp_path: Path) -> None:
    folder = save_tiny(tmp_path, "mistral", "byte_bpe_bos")
    before = ask(lm_of(folder, tmp_path))
    assert stored(tmp_path) == 1 and ask(lm_of(folder, tmp_path)) == before and stored(tmp_path) == 1
    options: dict[str, Any] = {}
    if change in FILE_CHANGES:
        edit_json(folder / "config.json", **FILE_CHANGES[change])
    elif change == "normalizer":
        edit_json(folder / "tokenizer.json", normalizer={"type": "Lowercase"})
    elif change == "tokenizer":
        build_tokenizer("metaspace_bos").save_pretrained(tmp_path / "other")
        options["tokenizer"] = str(tmp_path / "other")
    else:
        options["add_bos_token"] = False
    fresh = ask(lm_of(folder, **options))
    assert all(abs(left - right) > 1e-4 for left, right in zip(fresh, before, strict=True)), "the change has no effect"
    assert ask(lm_of(folder, tmp_path, **options)) == fresh
    assert stored(tmp_path) == 2
    assert ask(lm_of(folder, tmp_path, **options)) == fresh and stored(tmp_path) == 2


def test_a_changed_adapter_is_edited_and_asked_again(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    folder = save_tiny(tmp_path, "llama")
    torch.manual_seed(0)
    config = LoraConfig(r=2, lora_alpha=2, target_modules=["q_proj"], init_lora_weights=False)
    get_peft_model(build_model("llama"), config).save_pretrained(tmp_path / "adapter")
    adapter = str(tmp_path / "adapter")
    before = ask(lm_of(folder, tmp_path, peft=adapter))
    edit_json(tmp_path / "adapter" / "adapter_config.json", lora_alpha=40)
    fresh = ask(lm_of(folder, peft=adapter))
    assert all(abs(left - right) > 1e-4 for left, right in zip(fresh, before, strict=True))
    assert ask(lm_of(folder, tmp_path, peft=adapter)) == fresh and stored(tmp_path) == 2


def test_context_templates_are_sampled_anew(tmp_path: Path) -> None:
    """The resolved configuration is stored apart from the edits, and is part of their keys."""
    folder = save_tiny(tmp_path, "llama")
    options = {"editor_args": {"num_steps": 2, "context_templates": "sampled_6"}}

    def templates(**store: Path) -> list[str]:
        lm = lm_of(folder, *store.values(), **options)
        ask(lm)
        return lm.get_model_info()["edited_hf"]["editor_config"]["context_templates"]

    before = templates(tmp_path=tmp_path)
    edit_json(folder / "config.json", **FILE_CHANGES["rope_theta"])
    assert templates(tmp_path=tmp_path) == templates() != before


def test_a_model_changed_in_the_process_is_edited_and_asked_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Also by writes that the version counters of autograd do not see."""
    folder = save_tiny(tmp_path, "llama")
    options = {"editor_args": {"num_steps": 2, "context_templates": "sampled_6"}}
    lm = lm_of(folder, tmp_path, **options)
    before = ask(lm)
    head = lm.model.lm_head.weight
    original = head.detach().clone()
    version = head._version
    head.data.mul_(1.5)
    assert head._version == version
    after = ask(lm)
    assert "was changed after it answered" in caplog.text
    assert all(abs(left - right) > 1e-4 for left, right in zip(after, before, strict=True)) and stored(tmp_path) == 2
    assert after == ask(build(lm.model, tokenizer=lm.tokenizer, **options))
    head.data.copy_(original)
    assert ask(lm) == before and stored(tmp_path) == 2


def test_answers_of_a_hooked_model_are_not_stored_as_those_of_the_plain_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A hook changes what a model computes and leaves weights and configuration as they are."""
    folder = save_tiny(tmp_path, "llama")
    hooked = lm_of(folder, tmp_path)
    handle = hooked.model.model.layers[0].register_forward_hook(lambda module, inputs, output: output * 1.5)
    changed = ask(hooked)
    assert "the model has forward hooks (model.layers.0: " in caplog.text
    assert ask(lm_of(folder, tmp_path)) == ask(lm_of(folder)) != changed
    assert ask(hooked) == changed
    handle.remove()
    assert ask(hooked) == ask(lm_of(folder))


def test_an_editor_resolves_its_settings_for_every_tokenizer() -> None:
    """Also within a process, where resolved settings are kept in memory."""
    model, tokenizers = build_model("llama"), [build_tokenizer(kind) for kind in ("byte_bpe_bos", "byte_bpe")]
    settings = {"context_templates": "sampled_6", "layers": [1]}
    editor, rect = load_editor("rome", settings), load_editor("rect", {"base": "rome", "base_settings": settings})
    for tokenizer in [*tokenizers, tokenizers[0]]:
        fresh = load_editor("rome", settings).resolve_config(model, tokenizer).to_dict()
        assert editor.resolve_config(model, tokenizer).to_dict() == fresh
        assert rect.resolve_config(model, tokenizer).to_dict()["base_settings"] == fresh
        assert editor.resolve_config(model, tokenizer) is editor.resolve_config(model, tokenizer)


def test_files_named_in_settings_count_by_their_content(tmp_path: Path) -> None:
    model, file, folder = build_model("llama"), tmp_path / "P.safetensors", tmp_path / "embedder"
    (folder / "part").mkdir(parents=True)

    def settings() -> list[Any]:
        alphaedit = load_editor("alphaedit", {"projectors": str(file), "layers": [1]})
        editors = [alphaedit, load_editor("ike", {"embedder": str(folder)})]
        return [editor.default_config(model).to_dict() for editor in editors]

    seen = []
    for number in range(2):
        save_file({"layer1": torch.eye(64) * number}, file)
        (folder / "part" / "weights.bin").write_bytes(bytes([number]))
        seen.append(settings())
        assert settings() == seen[-1]
    assert all(before != after for before, after in zip(*seen, strict=True))


@pytest.mark.parametrize("model_type", ["gpt2", "gemma3_text"])
def test_use_of_a_model_does_not_change_its_identity(
    model_type: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Questions under edits, stock tasks and generations in turn."""
    lm = lm_of(save_tiny(tmp_path, model_type), tmp_path)
    before = lm.identity
    rolling = Instance("loglikelihood_rolling", {}, ("The band released",), 0, metadata=("test", 0, 1))
    for _ in range(2):
        ask(lm)
        lm.loglikelihood([instance({}, *QUESTION), instance({}, "The", " band")])
        lm.loglikelihood_rolling([rolling])
        for doc in (case(), {}):
            lm.generate_until([instance(doc, QUESTION[0], {"until": ["."], "max_gen_toks": 3}, "generate_until")])
    assert lm.identity == before and "was changed" not in caplog.text


def change_rope(model: Any) -> None:
    model.model.rotary_emb.inv_freq *= 0.1


def change_eps(model: Any) -> None:
    model.model.norm.variance_epsilon = 0.1


@pytest.mark.parametrize("change", [change_rope, change_eps])
def test_statistics_and_traces_belong_to_one_model(change: Callable[[Any], None], tmp_path: Path) -> None:
    model, tokenizer = build_model("llama"), build_tokenizer("byte_bpe_bos")
    store, settings = Store(tmp_path / "store"), MomentSettings(SENTENCES[:4])
    fact = [EditRequest(**REQUESTS[0])]

    def collect(store: Store | None, folder: Path | None) -> tuple[torch.Tensor, float]:
        moment = second_moments(model, tokenizer, [2], settings, folder=folder, quiet=True)[2]
        trace = trace_facts(model, tokenizer, fact, TraceSettings(samples=1, answer="true"), store=store, quiet=True)
        assert moment.matrix_FF is not None
        return moment.matrix_FF, trace.clean

    collect(store, tmp_path / "stats")
    change(model)
    (moment, clean), (fresh_moment, fresh_clean) = collect(store, tmp_path / "stats"), collect(None, None)
    assert torch.equal(moment, fresh_moment) and clean == fresh_clean
    assert len(list((tmp_path / "stats").rglob("*.json"))) == 2
    assert store.size()["traces"][0] == 2


def test_statistics_of_another_dtype_or_tokenizer_are_others(tmp_path: Path) -> None:
    settings = MomentSettings(SENTENCES[:4])
    pairs = [
        (build_model("llama"), build_tokenizer("byte_bpe_bos")),
        (build_model("llama", dtype=torch.bfloat16), build_tokenizer("byte_bpe_bos")),
        (build_model("llama"), build_tokenizer("byte_bpe")),
    ]
    for number, (model, tokenizer) in enumerate(pairs, start=1):
        for _ in range(2):
            second_moments(model, tokenizer, [1], settings, folder=tmp_path, quiet=True)
            assert len(list(tmp_path.rglob("*.json"))) == number


# --- saved edits -----------------------------------------------------------------------------------------------------


def save_edit(model_folder: Path, out: Path) -> str:
    requests = out.with_suffix(".jsonl")
    requests.write_text(json.dumps(case()["edit_requests"][0]) + "\n")
    options = {"pretrained": str(model_folder), "editor_args": FAST, "store": "off", "device": "cpu"}
    make_edits(out, str(requests), model_options=options)
    return str(out)


def test_a_saved_edit_names_what_differs_from_its_model(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = save_tiny(tmp_path, "llama")
    edit = save_edit(folder, tmp_path / "edit")

    def loaded() -> list[str]:
        lm = lm_of(folder, load_edit=edit, editor_args=None)
        ask(lm)
        return lm.get_model_info()["edited_hf"]["loaded_edit"]["model_differences"]

    assert loaded() == [] and "differs" not in caplog.text
    edit_json(folder / "config.json", rms_norm_eps=0.1)
    (eps, _) = found = loaded()
    assert "config.rms_norm_eps (made with 1e-06, here 0.1)" in eps and all(text in caplog.text for text in found)
    edit_json(folder / "config.json", rms_norm_eps=1e-6)
    edit_json(folder / "tokenizer.json", normalizer={"type": "Lowercase"})
    (rules,) = loaded()
    assert "tokenizer.rules" in rules


# --- releases of libraries -------------------------------------------------------------------------------------------


def test_results_of_another_release_are_made_again_and_said_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = save_tiny(tmp_path, "llama")
    before = ask(lm_of(folder, tmp_path))
    installed = identity_module._version
    monkeypatch.setattr(identity_module, "_version", lambda name: "4.0" if name == "transformers" else installed(name))
    caplog.set_level(logging.INFO)
    for _ in range(2):
        assert ask(lm_of(folder, tmp_path)) == before
    assert stored(tmp_path) == 2
    sentences = [record.getMessage() for record in caplog.records if "libraries.transformers" in record.getMessage()]
    assert len(sentences) == 1 and f"made with {installed('transformers')}, here 4.0" in sentences[0]
