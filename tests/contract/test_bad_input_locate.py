"""What the locate-then-edit editors do with what does not fit: a clear error, or a logged and recorded warning."""

from __future__ import annotations

import logging

import pytest
import torch

from edit_hooks import EditingError, EditRequest, load_editor
from edit_hooks.contract.tiny_models import (
    CONTEXT_TEMPLATES,
    EDIT_LAYER,
    NATURAL_TOKENIZER,
    SENTENCES,
    build_model,
    build_tokenizer,
    save_tiny,
)
from edit_hooks.lm.model import EditedHFLM
from edit_hooks.locate.moments.second_moments import MomentSettings, second_moments
from lm_edit.cli.main import main

REQUEST = EditRequest(prompt="The harbour of {} is located in", subject="Port Amelin", target_new="Rome")
OTHER_TARGET = EditRequest(**{**REQUEST.to_dict(), "target_new": "Paris"})
QUICK = {"layers": [EDIT_LAYER], "num_steps": 3, "context_templates": ["{}"]}
TEXTS = list(SENTENCES)
WIDTH = 64
FULL_RANK = torch.eye(WIDTH, dtype=torch.float64)


@pytest.fixture(scope="module")
def tiny():
    """Float64, a tokenizer with BOS."""
    return build_model("llama", dtype=torch.float64), build_tokenizer("byte_bpe_bos")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LM_EDIT_CACHE", str(tmp_path / "cache"))


def edit(tiny, name, requests=(REQUEST,), **settings):
    return load_editor(name, {**QUICK, **settings}).edit(*tiny, list(requests))


def warnings_of(delta):
    return " | ".join(delta.warnings)


def test_a_good_edit_has_no_warnings(tiny, caplog):
    moments = {EDIT_LAYER: FULL_RANK}
    free = {"num_steps": 40, "lr": 1.0, "clamp_factor": 1e3, "weight_decay": 0.0, "kl_factor": 0.0}
    settings = {**free, "context_templates": CONTEXT_TEMPLATES, "second_moments": moments, "fact_token": "last"}
    one_token = EditRequest(**{**REQUEST.to_dict(), "target_new": "is"})  # within reach of this model
    with caplog.at_level(logging.WARNING):
        (delta,) = edit(tiny, "r_rome", (one_token,), **settings)
    assert not delta.warnings and not caplog.records


# --- second moments ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("editor", "more"), [("r_rome", {}), ("memit", {}), ("alphaedit", {"nullspace_energy": 0.5}), ("emmet", {})]
)
def test_a_small_corpus_gives_a_warning_recorded_with_every_edit(tiny, editor, more, caplog):
    settings = {"second_moments": TEXTS[:2], **more}
    with caplog.at_level(logging.WARNING):
        first, second = edit(tiny, editor, (REQUEST, OTHER_TARGET), **settings)
    for delta in (first, second):
        assert "per dimension of the keys (width 64)" in warnings_of(delta)
        assert f"layer {EDIT_LAYER}: " in warnings_of(delta)
    assert "per dimension of the keys" in caplog.text


def test_a_stored_matrix_gives_the_same_warning(tiny, tmp_path):
    path = tmp_path / "texts.txt"
    path.write_text("\n\n".join(TEXTS[:2]), encoding="utf-8")
    for _ in range(2):  # collected, then read
        (delta,) = edit(tiny, "memit", second_moments=str(path))
        assert "per dimension of the keys" in warnings_of(delta)


def test_a_corpus_shorter_than_the_token_budget_gives_a_warning(tiny):
    settings = MomentSettings(TEXTS, num_tokens=100_000)
    report = second_moments(*tiny, [EDIT_LAYER], settings, quiet=True)[EDIT_LAYER].report
    (warning,) = report["warnings"]
    assert f"ended after {report['num_tokens']} of the 100000 tokens" in warning


def test_an_empty_corpus_is_an_error(tiny, tmp_path):
    (tmp_path / "empty.txt").write_text("\n\n \n")
    with pytest.raises(EditingError, match="the given source is empty"):
        edit(tiny, "memit", second_moments=str(tmp_path / "empty.txt"))


@pytest.mark.parametrize("editor", ["r_rome", "memit", "emmet"])
def test_a_singular_matrix_gets_a_ridge_that_is_recorded(tiny, editor, caplog):
    singular = FULL_RANK.clone()
    singular[0, 0] = 0.0
    with caplog.at_level(logging.WARNING):
        (delta,) = edit(tiny, editor, second_moments={EDIT_LAYER: singular})
    delta.check_finite()
    assert "singular to working precision; a ridge of" in warnings_of(delta)
    assert caplog.text.count("a ridge of") == 1


@pytest.mark.parametrize(
    ("matrix", "message"),
    [
        (torch.zeros(WIDTH, WIDTH), "not positive definite"),
        (-FULL_RANK, "not positive definite"),
        (torch.triu(torch.ones(WIDTH, WIDTH)), "not symmetric"),
        (FULL_RANK * float("nan"), "not finite"),
        (torch.eye(WIDTH - 1), r"\[64, 64\] is needed"),
    ],
)
def test_matrices_that_are_no_second_moments_are_refused(tiny, matrix, message):
    with pytest.raises(EditingError, match=message):
        edit(tiny, "memit", second_moments={EDIT_LAYER: matrix})


def test_the_plain_inverse_of_the_release_refuses_a_singular_matrix(tiny):
    singular = FULL_RANK.clone()
    singular[0, 0] = 0.0
    with pytest.raises(EditingError, match=r"no inverse in float32.*inverse_dtype=float64"):
        edit(tiny, "rome", second_moments={EDIT_LAYER: singular}, inverse_dtype="float32")


def test_a_missing_layer_is_named(tiny):
    with pytest.raises(EditingError, match=r"no matrix for layer 1; it has \[0\]"):
        edit(tiny, "memit", second_moments={0: FULL_RANK})


# --- projectors --------------------------------------------------------------------------------------------------


def test_a_projector_that_keeps_nothing_is_an_error(tiny):
    with pytest.raises(EditingError, match=r"layer 1: no eigenvalue.*nothing can be written.*nullspace_energy"):
        edit(tiny, "alphaedit", second_moments=TEXTS, nullspace_threshold=1e-12)
    with pytest.raises(EditingError, match="the given projector is zero"):
        edit(tiny, "alphaedit", projectors={EDIT_LAYER: torch.zeros(WIDTH, WIDTH)})


def test_a_projector_that_keeps_everything_is_recorded(tiny, caplog):
    with caplog.at_level(logging.WARNING):
        (collected,) = edit(tiny, "alphaedit", second_moments=TEXTS, nullspace_threshold=1e6)
    (given,) = edit(tiny, "alphaedit", projectors={EDIT_LAYER: FULL_RANK})
    for delta in (collected, given):
        assert "protects almost nothing" in warnings_of(delta)
        assert delta.diagnostics["layers"][0]["null_space_share"] == 1.0
    assert "protects almost nothing" in caplog.text


def test_a_projector_of_low_rank_is_recorded(tiny):
    matrix = torch.zeros(WIDTH, WIDTH)
    matrix[0, 0] = 0.5  # half a direction, and no projector either
    (delta,) = edit(tiny, "alphaedit", projectors={EDIT_LAYER: matrix})
    assert "hardly anything is written" in warnings_of(delta) and "is no projector" in warnings_of(delta)


# --- requests ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("editor", ["rome", "r_rome", "memit"])
def test_a_subject_as_first_token_is_edited_and_recorded(editor, caplog):
    """Without BOS the fact token of a one-token subject at the start is the very first of the sequence."""
    tiny = build_model("gpt2", dtype=torch.float64), build_tokenizer("byte_bpe")
    first = EditRequest(prompt="{} is located in", subject="The", target_new="Rome")
    with caplog.at_level(logging.WARNING):
        templates = {"context_templates": CONTEXT_TEMPLATES}
        at_start, inside = edit(tiny, editor, (first, REQUEST), second_moments=None, **templates)
    for delta in (at_start, inside):
        delta.check_finite()
        assert max(float(update.norm()) for update in delta.weights().values()) > 0
    assert "the fact token is the first token of the prompt" in warnings_of(at_start)
    assert "first token" not in warnings_of(inside)
    assert "the fact token is the first token of the prompt" in caplog.text


def test_a_small_divisor_of_rome_is_recorded(tiny):
    """Against r_rome, whose divisor cannot be small. A C^-1 that is tiny along the bare key makes one."""
    plain = edit(tiny, "rome", context_templates=CONTEXT_TEMPLATES, keep_intermediates=True, second_moments=None)[0]
    bare = plain.intermediates["cur_input"].double()
    bare = bare / bare.norm()
    mean = plain.intermediates["k_star"].double()
    across = mean - (mean @ bare) * bare
    assert across.norm() > 1e-3 * mean.norm()
    matrix = FULL_RANK + 1e6 * torch.outer(bare, bare)
    small = edit(tiny, "rome", context_templates=CONTEXT_TEMPLATES, second_moments={EDIT_LAYER: matrix})[0]
    assert abs(small.diagnostics["divisor_ratio"]) < 0.1 and "nearly orthogonal" in warnings_of(small)
    consistent = edit(tiny, "r_rome", context_templates=CONTEXT_TEMPLATES, second_moments={EDIT_LAYER: matrix})[0]
    assert consistent.diagnostics["divisor_ratio"] == pytest.approx(1) and "orthogonal" not in warnings_of(consistent)
    assert "orthogonal" not in warnings_of(plain)


BARE = {"context_templates": ["{}"], "second_moments": None}


@pytest.mark.parametrize(("editor", "more"), [("r_rome", BARE), ("memit", BARE), ("ft_m", {})])
@pytest.mark.parametrize("model_type", ["gpt2", "llama"])
def test_targets_of_one_and_of_forty_tokens(editor, more, model_type):
    """Together in one batch they are what they are alone."""
    tiny = build_model(model_type, dtype=torch.float64), build_tokenizer(NATURAL_TOKENIZER[model_type])
    specials = len(tiny[1]("")["input_ids"])
    long_ids = tiny[1](" " + " ".join(TEXTS))["input_ids"][specials : specials + 40]
    requests = []
    for target in (" Rome", tiny[1].decode(long_ids)):
        requests.append(EditRequest(prompt="The harbour of {} lies in", subject="Port Amelin", target_new=target))
    lengths = [len(tiny[1](" " + request.target_new)["input_ids"]) - specials for request in requests]
    assert lengths[0] <= 3 and lengths[1] == 40
    one = EditRequest(prompt="The harbour of {} lies in", subject="Port Amelin", target_new="is")
    assert len(tiny[1](" is")["input_ids"]) - specials == 1
    requests.append(one)
    settings = {"layers": [EDIT_LAYER], "num_steps": 4, **more}
    together = load_editor(editor, settings).edit(*tiny, requests)
    for request, delta in zip(requests, together, strict=True):
        (alone,) = load_editor(editor, settings).edit(*tiny, [request])
        for name, update in delta.weights().items():
            torch.testing.assert_close(update, alone.weights()[name], rtol=1e-6, atol=1e-8)


def test_a_target_that_stays_unlikely_is_recorded(tiny):
    (delta,) = edit(tiny, "r_rome", num_steps=1)
    assert delta.diagnostics["final_nll"] > 1 and "may not take" in warnings_of(delta)


TEMPLATES = {"context_templates": CONTEXT_TEMPLATES}


@pytest.mark.parametrize(("editor", "more"), [("r_rome", TEMPLATES), ("memit", TEMPLATES), ("ft_m", {})])
def test_rows_longer_than_the_context_are_refused_before_any_forward_pass(editor, more, monkeypatch):
    tiny = build_model("gpt2"), build_tokenizer("byte_bpe")
    monkeypatch.setattr(type(tiny[0]), "forward", lambda *_args, **_kwargs: pytest.fail("the model ran"))
    request = EditRequest(prompt="{} lies in", subject="Port Amelin", target_new=" ".join(TEXTS), case_id="17")
    settings = {"layers": [EDIT_LAYER], **more}
    with pytest.raises(EditingError, match=r"case 17: prompt and target_new take \d+ tokens.*128 positions"):
        load_editor(editor, settings).edit(*tiny, [request])


# --- modes -------------------------------------------------------------------------------------------------------


def test_an_unsupported_mode_is_refused_before_weights_are_read(tmp_path, capsys):
    edits = tmp_path / "edits.jsonl"
    edits.write_text(
        '{"prompt": "{} is in", "subject": "Velm", "target_new": "Rome"}\n'
        '{"prompt": "{} is in", "subject": "Karsk", "target_new": "Rome"}\n'
    )
    path = str(save_tiny(tmp_path, "llama"))
    (tmp_path / "llama-byte_bpe_bos-float32" / "model.safetensors").write_bytes(b"")  # reading it would fail
    for options in ({"mode": "batch"}, {"mode": "sequential", "edit_batch_size": 2}):
        with pytest.raises(EditingError, match=r"'rome' writes one request at a time.*edit_batch_size=1"):
            EditedHFLM(pretrained=path, device="cpu", editor="rome", edits=str(edits), **options)
    arguments = ["--pretrained", path, "--device", "cpu", "--edits", str(edits), "--out", str(tmp_path / "out")]
    assert main(["edit", "--editor", "rome", "--joint", *arguments]) == 2
    assert "one request at a time" in capsys.readouterr().err


def test_an_unsupported_joint_edit_is_refused(tiny):
    with pytest.raises(EditingError, match="one request at a time"):
        load_editor("rome", QUICK).edit(*tiny, [REQUEST, REQUEST], joint=True)


def test_a_request_without_subject_is_refused_where_one_is_needed(tiny):
    plain = EditRequest(prompt="The harbour lies in", target_new="Rome", case_id="3")
    with pytest.raises(EditingError, match=r"needs the field 'subject'.*case 3"):
        edit(tiny, "memit", (plain,))
    (delta,) = load_editor("ft_m", {"layers": [EDIT_LAYER], "num_steps": 1}).edit(*tiny, [plain])
    assert delta.dense
