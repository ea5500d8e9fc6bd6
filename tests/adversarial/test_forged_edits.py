"""Files of strangers: whatever a saved edit or an adapter holds, it is used as it is or refused with file and field."""

from __future__ import annotations

import copy
import json
import random
import shutil
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from forged import EDITS, MISSING, ODD, TENSOR_CHANGES, Forgery, forgeries, read, save_real
from hook_edits import loaded
from own_hook_editor import SteerHooks
from random_deltas import random_delta
from safetensors.torch import load_file, save_file

from edit_hooks import Delta, EditingError, Factor
from edit_hooks.deltas.hook_edit import HookEdit
from edit_hooks.deltas.saving.export import CONFIG_NAME, ORIGIN_NAME, WEIGHTS_NAME, export_peft
from edit_hooks.deltas.saving.saved import check_base, editor_of, read_edit, requests_of
from edit_hooks.inference.decoding import generate
from edit_hooks.inference.items import GenerateItem, Limits, ScoreItem
from edit_hooks.inference.reference import score_reference
from edit_hooks.inference.scoring import score
from edit_hooks.modeling.fingerprint.identity import model_identity
from edit_hooks.utils.text.expressions import compiled

NUM_SAMPLED = 25  # forgeries of an edit in a plain run
ITEM, OTHER = ScoreItem((5, 6, 7), (8, 9)), GenerateItem((5, 6, 7), (), 3)


@pytest.fixture(scope="module")
def real(tmp_path_factory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("real")
    paths: dict[str, Path] = {}
    return lambda name: paths.setdefault(name, folder / name) if name in paths else _saved(name, folder, paths)


def _saved(name: str, folder: Path, paths: dict[str, Path]) -> Path:
    paths[name] = save_real(name, folder)
    return paths[name]


def use(path: Path, family: str) -> Delta:
    """Load an edit, answer under it in every way, and return it."""
    model, tokenizer = loaded(family)
    delta = read_edit(path, copy.deepcopy(model).to("meta"))
    check_base(delta, model, model_identity(model, tokenizer), str(path))
    requests_of(delta), editor_of(delta)
    if (rest := delta.without_contexts) is None:
        return delta
    score(model, [(ITEM, rest), (ITEM, None)], Limits(), lambda count: None)
    score_reference(model, [(ITEM, rest)], lambda count: None)
    generate(model, tokenizer, [(OTHER, rest)], Limits(), lambda count: None)
    return delta


def refusals(forged: Iterable[Forgery], family: str, folder: Path) -> dict[str, str]:
    """Use forgeries; the messages of those that are refused. Any other exception fails the test."""
    messages = {}
    path = folder / "forged.safetensors"
    for forgery in forged:
        forgery.save(path)
        try:
            use(path, family)
        except EditingError as error:
            messages[forgery.name] = str(error)
        except Exception as error:
            raise AssertionError(f"{forgery.name}: {type(error).__name__}: {error}") from error
    return messages


@pytest.mark.parametrize("name", EDITS)
def test_the_real_edits_are_used(name, real):
    assert use(real(name), EDITS[name][0]).writes


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", EDITS)
def test_forged_edits_are_used_or_refused(name, real, tmp_path):
    everything = [one for one in forgeries(read(real(name))) if not one.name.startswith(("meta", "diagnostics"))]
    sampled = random.Random(name).sample(everything, NUM_SAMPLED)
    assert len(refusals(sampled, EDITS[name][0], tmp_path)) > NUM_SAMPLED // 5


def test_forged_metadata_is_used_or_refused(real, tmp_path):
    """All edits have the same."""
    everything = [one for one in forgeries(read(real("context"))) if one.name.startswith(("meta", "diagnostics"))]
    assert len(refusals(random.Random(0).sample(everything, 150), "llama", tmp_path)) > 10


@pytest.mark.slow
@pytest.mark.parametrize("name", EDITS)
def test_all_forged_edits_are_used_or_refused(name, real, tmp_path):
    assert len(refusals(forgeries(read(real(name))), EDITS[name][0], tmp_path)) > 100


DOWN = "model.layers.1.mlp.down_proj"


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("low-rank", f"tensor left/{DOWN} NaN", f"tensor left/{DOWN} has entries that are not finite"),
        ("low-rank", f"tensor right/{DOWN} missing", f"tensor right/{DOWN} is missing"),
        ("dense", f"tensor dense/{DOWN}.weight float8", "is float8_e4m3fn; float32, float16"),
        ("masked", f"tensor mask/{DOWN} shorter", f"tensor mask/{DOWN} has shape"),
        ("codebook", "tensor hook/radii negative", "tensor radii has the entry -1.0; zero or a positive number"),
        ("codebook", "tensor hook/index missing", "tensor index is missing"),
        ("adapter_database", "tensor hook/point_cluster large", "point_cluster must name each of the 2 clusters"),
        ("side_memory", "tensor hook/0/values shorter", "tensor 0/values has shape"),
        ("context", "header contexts={", "contexts, column 2: not valid JSON"),
    ],
)
def test_refusals_name_file_and_field(name, change, message, real, tmp_path):
    (forgery,) = [one for one in forgeries(read(real(name))) if one.name == change]
    (found,) = refusals([forgery], EDITS[name][0], tmp_path).values()
    assert "forged.safetensors" in found and message in found


def settings_changed(real, name: str, **changes: Any) -> Forgery:
    """A hook edit with other settings; a :data:`MISSING` one is removed."""
    saved = read(real(name))
    hooked = json.loads(saved.header["hooked"])
    hooked["settings"] = {key: one for key, one in {**hooked["settings"], **changes}.items() if one is not MISSING}
    return Forgery("settings", {**saved.header, "hooked": json.dumps(hooked)}, saved.tensors)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("codebook", {"query": "sometimes"}, "settings.query is 'sometimes'; one of prefill, every_step is needed"),
        ("codebook", {"labels": [[1]]}, "settings.labels has 1 entries; 2 are needed"),
        ("codebook", {"module": "lm_head"}, "hooks lm_head, the head"),
        ("codebook", {"module": "model.norm"}, "hooks model.norm, a LlamaRMSNorm; a linear map is needed"),
        ("codebook", {"radius": 1}, "settings has the unknown field 'radius'"),
        ("gated_predictor", {"threshold": 1.5}, "settings.threshold is 1.5; a share from 0 to 1 is needed"),
        ("gated_predictor", {"threshold": MISSING}, "settings lacks 'threshold'"),
        ("adapter_database", {"targets": []}, "settings.targets is empty"),
        ("side_memory", {"activation": "exec"}, "settings.activation is 'exec'"),
        ("side_memory", {"current": [0, "far", 0.0, None]}, "settings.current.threshold is 'far'; a finite number"),
        ("side_memory", {"stored": [[9, 1.0, 0.0, None]]}, "the edit lacks tensor 9/values"),
    ],
)
def test_settings_of_hooks_are_checked(name, changes, message, real, tmp_path):
    (found,) = refusals([settings_changed(real, name, **changes)], EDITS[name][0], tmp_path).values()
    assert message in found


def test_what_is_not_finite_is_not_saved(tmp_path):
    delta = Delta(factors={"model.layers.1.mlp.down_proj": Factor(torch.full((32, 1), torch.nan), torch.ones(64, 1))})
    with pytest.raises(EditingError, match="not finite"):
        delta.save(tmp_path / "edit.safetensors")
    assert not list(tmp_path.iterdir())


def test_a_kind_of_another_package_without_a_schema_is_checked_too(monkeypatch):
    monkeypatch.setattr("edit_hooks.deltas.hook_edit._kinds_of_editors", {"add_vector": SteerHooks})
    for tensors, settings, message in (
        ({"vector": torch.full((32,), torch.inf)}, {"module": "model.layers.1.mlp.down_proj"}, "vector has entries"),
        ({"vector": torch.ones(32)}, {"module": 7}, "settings.module is 7; a text is needed"),
        ({"vector": torch.ones(32)}, {}, "settings lacks 'module'"),
    ):
        with pytest.raises(EditingError, match=message):
            HookEdit("add_vector", tensors, settings).check_content()
    lacking = HookEdit("add_vector", {"vectors": torch.ones(1, 32)}, {"module": DOWN})
    lacking.check_content()
    with pytest.raises(EditingError, match="lacks what its kind 'add_vector' needs: KeyError: 'keys'"):
        lacking.check(loaded("llama")[0])


# -- adapters -------------------------------------------------------------------------------------------------------

CONFIG_FIELDS = (
    "peft_type", "r", "lora_alpha", "bias", "target_modules", "exclude_modules", "layers_to_transform",
    "layers_pattern", "rank_pattern", "alpha_pattern", "use_rslora", "init_lora_weights", "base_model_name_or_path",
)  # fmt: skip
ENDLESS = ("(a+)+b", "(.*.*)*b", "(m|mo|mod|.)*x", r"(\w+\.?)+!", "(a)\\1+", ".*" * 12 + "x", "a?" * 60, "(a|ab)" * 60)
EXPRESSIONS = ("(", "[", "*", "a{99999999999}", "(?P<x>a)(?P<x>b)", "(" * 600, "x" * 5000, *ENDLESS)


@pytest.fixture(scope="module")
def adapter(tmp_path_factory) -> Path:
    model, _ = loaded("llama")
    delta = random_delta(model, layers=(0, 1), ranks=(2, 2))
    return export_peft(delta, tmp_path_factory.mktemp("adapter") / "adapter")


def changed_adapter(adapter: Path, folder: Path, **changes: Any) -> Path:
    """A copy with other fields in its configuration."""
    shutil.copytree(adapter, folder, dirs_exist_ok=True)
    config = json.loads((adapter / CONFIG_NAME).read_text(encoding="utf-8"))
    config = {key: value for key, value in {**config, **changes}.items() if value is not MISSING}
    (folder / CONFIG_NAME).write_text(json.dumps(config), encoding="utf-8")
    return folder


def read_or_refuse(folder: Path) -> str | None:
    try:
        read_edit(folder, loaded("llama")[0])
    except EditingError as error:
        return str(error)
    return None


@pytest.mark.parametrize("field", CONFIG_FIELDS)
def test_forged_configurations_are_read_or_refused(field, adapter, tmp_path):
    found = []
    for value in (MISSING, *ODD, *EXPRESSIONS, list(EXPRESSIONS), dict.fromkeys(EXPRESSIONS, 2), {"down_proj": "x"}):
        found.append(read_or_refuse(changed_adapter(adapter, tmp_path, **{field: value})))
    assert field.startswith("base") or sum(message is not None for message in found) > 5
    for content in ("", "[]", "null", "7", '"x"', "{", '{"a": ' * 5000):
        (tmp_path / CONFIG_NAME).write_text(content, encoding="utf-8")
        assert str(tmp_path / CONFIG_NAME) in str(read_or_refuse(tmp_path))


@pytest.mark.parametrize("expression", ENDLESS)
def test_an_expression_that_matches_for_ever_is_refused_at_once(expression, adapter, tmp_path):
    """Also where peft itself reads the configuration."""
    started = time.monotonic()
    for field, value in (
        ("target_modules", expression),
        ("exclude_modules", expression),
        ("rank_pattern", {expression: 2}),
        ("alpha_pattern", {expression: 2}),
    ):
        message = read_or_refuse(changed_adapter(adapter, tmp_path, **{field: value}))
        assert message and field in message and "could take" in message and str(tmp_path / CONFIG_NAME) in message
    names = [f"model.layers.{number}.mlp.down_proj" for number in range(80)]
    with pytest.raises(EditingError, match="could take"):
        compiled(expression, "target_modules", names)
    assert time.monotonic() - started < 5


def test_peft_is_not_given_an_expression_that_matches_for_ever(adapter, tmp_path, tiny_path):
    pytest.importorskip("peft")
    from lm_runs import build

    folder = changed_adapter(adapter, tmp_path / "adapter", target_modules="(m|mo|mod|.)*x")
    with pytest.raises(EditingError, match=r"target_modules is .*could take for ever"):
        build(str(tiny_path("llama")), peft=str(folder), mode="none").load()


@pytest.mark.parametrize(
    "expression",
    [
        r".*\.(q|v)_proj",
        r"model\.language_model\.layers\.(0|1|2|31)\..*(self_attn|mlp)\.\w+_proj",
        r"^(?!.*vision).*(?:q_proj|k_proj).*$",
        r"(?:.*?(?:language|text).*?(?:self_attn|attention|attn|mlp|ffn|dense).*?(?:k_proj|v_proj|q_proj).*?)|"
        r"(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|attention|attn|mlp|ffn|dense)\.(?:(?:k_proj|v_proj|q_proj)))",
    ],
)
def test_expressions_as_training_tools_write_them_are_accepted(expression):
    names = [f"model.language_model.layers.{number}.self_attn.q_proj" for number in range(400)]
    assert compiled(expression, "target_modules", names).fullmatch(names[0]) is not None


@pytest.mark.parametrize(
    "change", ["NaN", "whole", "flat", "narrower", "no entry", "missing", "infinity", "very large"]
)
def test_forged_tensors_of_adapters_are_refused(change, adapter, tmp_path):
    shutil.copytree(adapter, tmp_path, dirs_exist_ok=True)
    tensors = load_file(adapter / WEIGHTS_NAME)
    name = next(name for name in tensors if "lora_B" in name)
    changed = TENSOR_CHANGES[change](tensors[name].clone())
    tensors = {key: one for key, one in tensors.items() if key != name} | ({} if changed is None else {name: changed})
    save_file({key: one.contiguous() for key, one in tensors.items()}, tmp_path / WEIGHTS_NAME)
    message = read_or_refuse(tmp_path)
    assert message is None if change == "very large" else str(tmp_path) in str(message)


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"meta": 7}', '{"meta": {"parts": {}}}', '{"meta": {"editor": []}}']
)
def test_forged_origins_of_adapters_are_refused(content, adapter, tmp_path):
    shutil.copytree(adapter, tmp_path, dirs_exist_ok=True)
    (tmp_path / ORIGIN_NAME).write_text(content, encoding="utf-8")
    assert str(tmp_path / ORIGIN_NAME) in str(read_or_refuse(tmp_path))
