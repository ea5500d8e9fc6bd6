"""Candidate settings of a search."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from mend_runs import trainer
from model_shapes import MODELS, model_like

from edit_hooks import EditingError, load_editor
from edit_hooks.base.shipped import FOLDER
from edit_hooks.contract.tiny_models import EDIT_LAYER, build_model, build_tokenizer
from edit_hooks.utils.storage.yaml_io import read_yaml
from lm_edit.tuning.candidates import make_candidates, sample_candidates, step_of


@pytest.fixture(scope="module")
def model():
    return build_model("llama", num_hidden_layers=12)


def test_candidates_cover_depths_and_combinations(model):
    candidates = make_candidates("r_rome", model, {}, {"clamp_factor": [1.0, 4.0]})
    config = load_editor("r_rome").default_config(model)
    assert (config.layers, config.lr) == ([3], 0.5) and candidates[0] == {"layers": config.layers}
    product = {(layer, lr, clamp) for layer in (1, 2, 3, 5, 7) for lr in (0.15, 0.5, 1.5) for clamp in (1.0, 4.0)}
    rest = {(*c["layers"], round(c["lr"], 6), c["clamp_factor"]) for c in candidates[1:]}
    assert rest == product - {(3, 0.5, 4.0)}  # that one is the first
    assert len({json.dumps(c, sort_keys=True) for c in candidates}) == len(candidates)


def test_candidates_have_as_many_layers_as_the_shipped_configuration(model):
    candidates = make_candidates("memit", model, {}, {"lr": [0.1]})
    assert all(len(c["layers"]) == len(candidates[0]["layers"]) and c["layers"][0] >= 0 for c in candidates)


def test_settings_of_the_base_editor_are_varied_in_base_settings(model):
    (_, other) = make_candidates("rect", model, {"base": "r_rome", "layers": [3]}, {"layers": [[3]], "lr": [0.123]})
    assert other["base_settings"] == {"lr": 0.123}


def test_a_relative_step_is_varied_where_no_lr_is_known(model):
    candidates = make_candidates("ultraedit", model, {}, {"layers": [[1]]})
    sizes = {candidate["relative_update"] for candidate in candidates if "relative_update" in candidate}
    assert len(sizes) == 3 and max(sizes) / min(sizes) == pytest.approx(10)


@pytest.mark.parametrize(
    ("editor", "step", "layers", "both"),
    [
        ("ft_m", {"lr": 0.4}, {"layers": [4]}, {"lr": 0.4, "layers": [4]}),
        ("ultraedit", {"relative_update": 0.4}, {"layers": [4]}, {"relative_update": 0.4, "layers": [4]}),
        (
            "rect",
            {"base": "r_rome", "base_settings": {"lr": 0.4}},
            {"base": "r_rome", "base_settings": {"layers": [4]}},
            {"base": "r_rome", "base_settings": {"lr": 0.4, "layers": [4]}},
        ),
    ],
)
def test_shared_layers_and_steps_are_those_of_every_candidate(
    model: Any, editor: str, step: dict[str, Any], layers: dict[str, Any], both: dict[str, Any]
) -> None:
    """Other depths replaced the layers, and the search for a step the step, in all candidates but the first."""

    def tried(shared: dict[str, Any], vary: dict[str, Any]) -> tuple[set[int], set[float]]:
        (name,) = step.get("base_settings", step)
        configs = [
            load_editor(editor, one).default_config(model) for one in make_candidates(editor, model, shared, vary)
        ]
        parts = [getattr(config, "base_settings", None) or vars(config) for config in configs]
        return {block for config in configs for block in config.layers}, {part[name] for part in parts}

    assert step_of(editor, model, step, {}) is None and step_of(editor, model, layers, {}) is not None
    depths, sizes = tried(step, {})
    assert len(depths) > 1 and sizes == {0.4}
    depths, sizes = tried(layers, {})
    assert depths == {4} and len(sizes) == 3
    assert tried(both, {}) == ({4}, {0.4})
    (name,) = step.get("base_settings", step)
    assert tried(both, {"layers": [[5]], name: [0.1]}) == ({4, 5}, {0.4, 0.1})  # named in both: the values to try count


def test_an_editor_of_all_blocks_is_tried_with_other_steps():
    """No depth fits as many blocks as the model has, and the search ended with the first candidate."""
    candidates = make_candidates("lora", build_model("llama", num_hidden_layers=16), {}, {})
    lr = load_editor("lora").default_config(build_model("llama")).lr
    assert candidates[0] == {"layers": list(range(16))}
    assert [one["lr"] for one in candidates[1:]] == pytest.approx([0.3 * lr, 3 * lr])
    assert all(one["layers"] == list(range(16)) for one in candidates)
    around = make_candidates("lora", build_model("llama", num_hidden_layers=16), {}, {}, step_size=0.2)
    assert [one.get("lr") for one in around] == [None, 0.2, 0.06, 0.6]


@pytest.mark.parametrize("base", [None, "rect"])
def test_shipped_modules_are_the_first_candidate_and_layers_take_their_place(base: str | None):
    """`--layers 5 6` was refused on these models, and without it there was a single candidate."""
    editor, shared = ("ultraedit", {}) if base is None else (base, {"base": "ultraedit"})
    llama = model_like(MODELS["llama-3-8b"])
    modules = read_yaml(FOLDER / "ultraedit/llama-3-8b.yaml")["config"]["modules"]

    def settings_of(candidate: dict[str, Any]) -> tuple[Any, Any, Any]:
        config = load_editor(editor, candidate).default_config(llama)
        of_base = config.base_settings if base else vars(config)
        return of_base["modules"], config.layers, of_base["lr"]

    first, *rest = [settings_of(one) for one in make_candidates(editor, llama, shared, {"layers": [[5], [6]]})]
    assert first[0] == modules and first[2] == 1e-6
    assert rest == [(None, [layer], lr) for layer in (5, 6) for lr in (3e-7, 1e-6, 3e-6)]
    depths = make_candidates(editor, llama, shared, {})
    assert settings_of(depths[0]) == first and len(depths) == 1 + 2 * 3  # two depths fit as many blocks, three steps
    found = make_candidates(editor, llama, shared, {}, step_size=1e-3)
    assert settings_of(found[1]) == (modules, first[1], 1e-3)  # where the step was searched


def test_modules_that_the_user_gives_stay():
    llama = model_like(MODELS["llama-3-8b"])
    candidates = make_candidates("ultraedit", llama, {"modules": {"up": [3]}}, {})
    assert [(one["modules"], one.get("lr")) for one in candidates] == [
        ({"up": [3]}, lr) for lr in (None, 3e-7, 3e-6)
    ]  # the shipped step is the first candidate's


def test_a_trained_hyper_network_leaves_no_step_to_vary(tmp_path: Path):
    model, tokenizer = build_model("llama"), build_tokenizer("byte_bpe_bos")
    trainer(model, tokenizer, tmp_path / "run", num_steps=1, validate_every=1, rank=2).run()
    shared = {"artifact": str(tmp_path / "run")}
    assert step_of("mend", model, shared, {}) is None
    assert make_candidates("mend", model, shared, {}) == [{**shared, "layers": [EDIT_LAYER]}]
    assert step_of("mend", model, {"artifact": "identity"}, {}) is not None


def test_default_depths_that_an_editor_refuses_are_left_out():
    candidates = make_candidates("melo", build_model("llama"), {}, {"lr": [1e-3]})
    assert {tuple(candidate["layers"]) for candidate in candidates} == {
        (1,),
        (2,),
    }  # melo looks prompts up a block below
    with pytest.raises(EditingError, match="a block before"):
        make_candidates("melo", build_model("llama"), {}, {"lr": [1e-3], "layers": [[0]]})


def test_unknown_settings_and_layers_are_refused(model):
    with pytest.raises(EditingError, match=r"clamp_factorr.*Did you mean 'clamp_factor'"):
        make_candidates("r_rome", model, {}, {"clamp_factorr": [1]})
    with pytest.raises(EditingError, match="blocks 0 to 11"):
        make_candidates("r_rome", model, {}, {"layers": [[12]]})


def test_a_sample_starts_with_the_first_candidate_and_depends_on_the_seed():
    candidates = [{"lr": lr} for lr in range(20)]
    sample = sample_candidates(candidates, 5, seed=0)
    assert len(sample) == 5 and sample[0] == candidates[0] and all(c in candidates for c in sample)
    assert sample == sample_candidates(candidates, 5, seed=0) != sample_candidates(candidates, 5, seed=1)
    assert sample_candidates(candidates, None, seed=0) == sample_candidates(candidates, 20, seed=0) == candidates


def test_candidates_around_a_step_found_begin_with_it(model):
    around = make_candidates("r_rome", model, {}, {"layers": [[1], [2]]}, step_size=5.0)
    assert around[0]["layers"] == [3] and "lr" not in around[0] and around[1] == {"layers": [1], "lr": 5.0}
    assert {candidate["lr"] for candidate in around[1:]} == {1.5, 5.0, 15.0}
    assert sample_candidates(around, 2, seed=0, keep=2) == around[:2]
    assert len(sample_candidates(around, 4, seed=0, keep=2)) == 4
