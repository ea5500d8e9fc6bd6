"""What makes a run's model another one besides weights: tokenizer, configuration, generation, adapters, hooks."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from paths import RECORDS
from result_files import write_run
from saved_results import evaluate_here
from tokenizers import processors
from transformers import AutoTokenizer

from edit_hooks.modeling.fingerprint.identity import CONFIG_EXCLUSIONS
from edit_hooks.utils.storage.json_io import within_64_bits
from lm_edit import load_results
from lm_edit.cli.main import main
from lm_eval_tasks.report.model_parts import NO_ANSWER, differing_parts, model_parts

IDENTITY: dict[str, Any] = {
    "key": "11" * 32,
    "weights": "ab" * 32,
    "dtype": "torch.float32",
    "model": {"class": "transformers.models.llama.modeling_llama.LlamaForCausalLM", "source": None, "modules": "m"},
    "config": {
        "rope_theta": 1e4,
        "tie_word_embeddings": False,
        "_attn_implementation": "sdpa",
        "text_config": {"_name_or_path": "/models/a", "dtype": "float32", "hidden_size": 8},
        "quantization_config": {"quant_method": "bitsandbytes", "bnb_4bit_compute_dtype": "float32"},
    },
    "end_tokens": 2,
    "hooks": [],
    "adapters": {"default": {"r": 8}},
    "tokenizer": {"class": "transformers.LlamaTokenizerFast", "rules": "aa", "vocab_file": "/models/a/tokenizer.model"},
    "libraries": {"torch": "2.9.0", "transformers": "5.0.0"},
}


def changed(path: str, value: Any) -> dict[str, Any]:
    """The identity with another value at ``part.entry``."""
    identity = copy.deepcopy(IDENTITY)
    *places, last = path.split(".")
    inner = identity
    for place in places:
        inner = inner[place]
    inner[last] = value
    return identity


@pytest.mark.parametrize(
    ("path", "value", "part"),
    [
        ("tokenizer.rules", "bb", "tokenizer"),
        ("tokenizer.chat_template", "{{ messages }}", "tokenizer"),
        ("config.rope_theta", 1e6, "config"),
        ("config.tie_word_embeddings", True, "config"),
        ("config.quantization_config.bnb_4bit_compute_dtype", "bfloat16", "config"),
        ("config.text_config.hidden_size", 16, "config"),
        ("end_tokens", [2, 3], "generation"),
        ("generation", {"repetition_penalty": 1.1}, "generation"),
        ("adapters.default.r", 16, "adapters"),
        ("adapters", {}, "adapters"),
        ("model.class", "transformers.models.qwen2.modeling_qwen2.Qwen2ForCausalLM", "class"),
        ("hooks", ["model: hook", "random"], "hooks"),
    ],
)
def test_what_changes_answers_is_a_part(path: str, value: Any, part: str) -> None:
    parts, others = (model_parts({"model_identity": identity}) for identity in (IDENTITY, changed(path, value)))
    differing = {name for name in {*parts, *others} if parts.get(name) != others.get(name)}
    assert differing == {part}


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("libraries", {"torch": "2.13.0", "transformers": "5.24.0"}),
        ("key", "22" * 32),
        ("model.modules", "other attributes"),
        ("model.class", "transformers.models.llama.moved.LlamaForCausalLM"),
        ("config._attn_implementation", "flash_attention_2"),
        ("config.use_cache", True),
        ("config.text_config._name_or_path", "/elsewhere/b"),
        ("config.text_config.dtype", "bfloat16"),
        ("config.field_of_a_later_release", None),
        ("config.list_of_a_later_release", []),
        ("tokenizer.vocab_file", "./tokenizer.model"),
        ("tokenizer.response_template", None),
    ],
)
def test_releases_folders_and_speed_are_none(path: str, value: Any) -> None:
    assert model_parts({"model_identity": changed(path, value)}) == model_parts({"model_identity": IDENTITY})


def test_parts_that_were_not_recorded_are_left_out() -> None:
    assert model_parts({}) == {}
    assert model_parts({"model_identity": {"weights": "ab"}}) == {}
    assert model_parts({"model_identity": {**IDENTITY, "hooks": ["model: hook", "1"]}}) == model_parts(
        {"model_identity": {**IDENTITY, "hooks": ["model: hook", "2"]}}
    )
    assert CONFIG_EXCLUSIONS.keys() <= NO_ANSWER.keys()


def test_only_parts_that_differ_are_named() -> None:
    assert differing_parts(["a=1; b=2", "a=1; b=3; c=4", ""]) == {
        "a=1; b=2": "a=1; b=2",
        "a=1; b=3; c=4": "a=1; b=3; c=4",
        "": "",
    }
    assert differing_parts(["a=1; b=2", "a=1; b=3"]) == {"a=1; b=2": "b=2", "a=1; b=3": "b=3"}
    assert differing_parts([]) == {}


def test_runs_of_two_tokenizers_are_two_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "a", model_identity=IDENTITY)
    write_run(tmp_path / "b", model_identity=changed("tokenizer.rules", "bb"))
    frame = load_results(tmp_path)
    assert frame["run"].nunique() == 2 and frame["run_name"].nunique() == 1 and not frame.attrs["superseded"]
    names = [model_parts({"model_identity": one})["tokenizer"] for one in (IDENTITY, changed("tokenizer.rules", "bb"))]
    assert main(["results", "show", str(tmp_path)]) == 0
    head = capsys.readouterr().out.splitlines()[0]
    assert all(f"r_rome (tokenizer={name})" in head for name in names)
    assert main(["results", "submit", str(tmp_path), "--repository", str(tmp_path / "repository")]) == 0
    assert main(["results", "check", str(tmp_path / "repository")]) == 0


def test_a_copy_of_a_folder_is_the_same_model_and_one_with_another_tokenizer_is_not(
    tmp_path: Path, tiny_path: Callable[..., Path]
) -> None:
    """As where a new revision on the hub mends tokenizer.json: prompts begin with another token."""
    given = tiny_path("gpt2", "byte_bpe")
    copied, mended = tmp_path / "copied" / given.name, tmp_path / "mended" / given.name
    for folder in (copied, mended):
        shutil.copytree(given, folder)
    tokenizer = AutoTokenizer.from_pretrained(mended)
    token = (tokenizer.eos_token, tokenizer.eos_token_id)
    processor = processors.TemplateProcessing(single=f"{token[0]} $A", special_tokens=[token])
    tokenizer.backend_tokenizer.post_processor = processor
    tokenizer.save_pretrained(mended)
    rows = {}
    for name, folder in {"given": given, "copied": copied, "mended": mended}.items():
        model_args = f"pretrained={folder},mode=none,store=off"
        evaluate_here(tmp_path / "runs" / name, model_args, ["bake_es"], RECORDS / "bake_qa.jsonl", limit=2)
        rows[name] = load_results(tmp_path / "runs" / name).iloc[0]
    assert rows["given"]["run"] == rows["copied"]["run"] != rows["mended"]["run"]
    assert rows["given"]["model_hash"] == rows["mended"]["model_hash"]
    shown = differing_parts([rows["given"]["model_parts"], rows["mended"]["model_parts"]])
    assert all(text.startswith("tokenizer=") and ";" not in text for text in shown.values()), shown


def test_a_number_beyond_64_bits_is_saved_as_a_float_and_is_the_same_part() -> None:
    """SQLite behind Trackio refuses the tokenizer's 10^30, and with it all numbers that are logged in one step."""
    tokenizer = {**IDENTITY["tokenizer"], "model_max_length": int(1e30), "padded": [2**63, -(2**63)]}
    long = {**IDENTITY, "tokenizer": tokenizer}
    saved = json.loads(json.dumps(within_64_bits(long)))
    assert saved["tokenizer"]["model_max_length"] == 1e30 and isinstance(saved["tokenizer"]["model_max_length"], float)
    assert saved["tokenizer"]["padded"] == [2.0**63, -(2**63)] and isinstance(saved["tokenizer"]["padded"][1], int)
    assert model_parts({"model_identity": saved}) == model_parts({"model_identity": long})
    assert within_64_bits(IDENTITY) == IDENTITY
