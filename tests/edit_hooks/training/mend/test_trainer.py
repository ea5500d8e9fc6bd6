"""Training MEND's hyper-network: the loss falls, runs resume bit-identical, artifacts are bound to their model."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
import torch
from mend_runs import DATA, SETTINGS, trainer
from safetensors.torch import load_file
from state import assert_same_state
from tiny_architectures import ARCHITECTURES

from edit_hooks import EditingError, EditRequest, load_editor
from edit_hooks.contract.state import snapshot
from edit_hooks.contract.tiny_models import EDIT_LAYER, NATURAL_TOKENIZER, REQUESTS, build_model
from edit_hooks.gradient.artifact import WEIGHTS_NAME, load_network, read_manifest
from edit_hooks.training.edit_data import NumberedExample
from edit_hooks.training.mend import loss as mend_loss
from edit_hooks.training.trainer import MAX_SKIPPED, RESUME_NAME


@pytest.fixture(scope="module")
def trained(tiny_model, tiny_tokenizer, tmp_path_factory):
    """A finished run on the tiny Llama: model, tokenizer, folder, progress."""
    model, tokenizer = tiny_model("llama"), tiny_tokenizer("byte_bpe_bos")
    out = tmp_path_factory.mktemp("mend") / "run"
    before = snapshot(model, tokenizer)
    progress = trainer(model, tokenizer, out).run()
    assert_same_state(before, snapshot(model, tokenizer))
    return model, tokenizer, out, progress


def test_training_beats_the_unedited_model_on_held_out_edits(trained):
    _, _, _, progress = trained
    assert [record["step"] for record in progress.losses] == [0, 10, 20, 30]
    unedited, best = progress.losses[0], min(progress.losses[1:], key=lambda record: record["loss"])
    assert best["edit"] < unedited["edit"] - 0.3 and best["loss"] < unedited["loss"]
    assert progress.best_loss == best["loss"] and progress.best_step == best["step"] and progress.skipped == 0


def test_the_artifact_describes_its_run_and_edits(trained):
    model, tokenizer, out, progress = trained
    manifest = read_manifest(out)
    assert manifest == json.loads((out / "manifest.json").read_text())
    assert manifest["step"] == progress.best_step and manifest["data"] == {"made": "here"}
    assert manifest["model_name"] == "tiny" and manifest["training"]["lr"] == SETTINGS["lr"]
    editor = load_editor("mend", {"artifact": str(out)})
    requests = [EditRequest(**record) for record in REQUESTS]
    together = editor.edit(model, tokenizer, requests)
    assert together[0].meta["config"]["layers"] == [EDIT_LAYER]
    for request, delta in zip(requests, together, strict=True):
        (alone,) = load_editor("mend", {"artifact": str(out / WEIGHTS_NAME)}).edit(model, tokenizer, [request])
        for name, update in delta.weights().items():
            torch.testing.assert_close(alone.weights()[name], update, atol=1e-5, rtol=1e-3)
    assert sum(d.diagnostics["final_loss"] - d.diagnostics["initial_nll"] for d in together) < 0
    (joint,) = editor.edit(model, tokenizer, requests, joint=True)
    assert joint.diagnostics["final_loss"] < joint.diagnostics["initial_nll"]


def test_training_edits_carry_a_warning(trained):
    model, tokenizer, out, _ = trained
    (trained_on, *_), (new, *_) = DATA.train, DATA.validation
    requests = [EditRequest(prompt=example.prompt, target_new=example.target) for example in (trained_on, new)]
    seen, unseen = load_editor("mend", {"artifact": str(out)}).edit(model, tokenizer, requests)
    assert any("trained on this very edit" in text for text in seen.warnings)
    assert not unseen.warnings
    other = EditRequest(prompt=trained_on.prompt, target_new=new.target)  # the same prompt with another target is new
    assert not load_editor("mend", {"artifact": str(out)}).edit(model, tokenizer, [other])[0].warnings


def test_a_killed_run_resumes_bit_identical(trained, tmp_path, monkeypatch):
    """Killed between two saved states: statistics, moments and random choices resume."""
    model, tokenizer, out, progress = trained
    killed = trainer(model, tokenizer, tmp_path)
    step = killed._step

    def interrupted_step(number):
        if number == 17:
            raise KeyboardInterrupt
        return step(number)

    monkeypatch.setattr(killed, "_step", interrupted_step)
    with pytest.raises(KeyboardInterrupt):
        killed.run()
    resumed = trainer(model, tokenizer, tmp_path)
    assert resumed.run() == progress
    for name, tensor in load_network(out)[0].state_dict().items():
        assert torch.equal(load_network(tmp_path)[0].state_dict()[name], tensor), name
    ours, theirs = load_file(tmp_path / RESUME_NAME), load_file(out / RESUME_NAME)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert trainer(model, tokenizer, tmp_path).run() == progress  # nothing left to do


def test_steps_without_finite_gradients_are_skipped_and_end_a_run(tiny_model, tiny_tokenizer, tmp_path, monkeypatch):
    run = trainer(tiny_model("llama"), tiny_tokenizer("byte_bpe_bos"), tmp_path)
    before = {name: tensor.clone() for name, tensor in run.network.named_parameters()}
    loss = run.loss

    def diverging_loss(batches, observe):
        return [terms._replace(loss=diverged(run.network)) for terms in loss(batches, observe)]

    monkeypatch.setattr(run, "loss", diverging_loss)
    for step in range(MAX_SKIPPED - 1):
        run._step(step)
    assert run.progress.skipped == MAX_SKIPPED - 1
    assert all(torch.equal(before[name], tensor) for name, tensor in run.network.named_parameters())
    with pytest.raises(EditingError, match="not finite"):
        run._step(MAX_SKIPPED)


@pytest.mark.parametrize("bad_steps", [(0, 1), (4,)])
def test_a_batch_that_is_not_finite_leaves_the_statistics(bad_steps, tiny_model, tiny_tokenizer, tmp_path, monkeypatch):
    """Its step is skipped, also before any statistics, and training goes on."""
    run = trainer(tiny_model("llama"), tiny_tokenizer("byte_bpe_bos"), tmp_path, num_steps=6, validate_every=6)
    factors, is_bad = mend_loss.token_factors, False

    def overflowing_factors(*arguments):
        found, losses = factors(*arguments)
        return ({name: (x * math.inf, delta) for name, (x, delta) in found.items()} if is_bad else found), losses

    monkeypatch.setattr(mend_loss, "token_factors", overflowing_factors)
    for step in range(6):
        before, is_bad = {name: tensor.clone() for name, tensor in run.network.state_dict().items()}, step in bad_steps
        run._step(step)
        changed = [not torch.equal(before[name], tensor) for name, tensor in run.network.state_dict().items()]
        assert any(changed) != is_bad
        assert all(bool(torch.isfinite(tensor).all()) for tensor in run.network.state_dict().values())
    assert run.progress.skipped == len(bad_steps)


def test_a_state_that_is_not_finite_is_not_saved(tiny_model, tiny_tokenizer, tmp_path):
    run = trainer(tiny_model("llama"), tiny_tokenizer("byte_bpe_bos"), tmp_path)
    run._step(0)
    run._save_state()
    saved = (tmp_path / RESUME_NAME).read_bytes()
    with torch.no_grad():
        run.network.step_sizes.fill_(math.inf)
    with pytest.raises(EditingError, match="its state is no longer finite; lower lr or edit_lr"):
        run._save_state()
    assert (tmp_path / RESUME_NAME).read_bytes() == saved


def diverged(network) -> torch.Tensor:
    """A loss whose gradients are infinite."""
    return float("inf") * sum(parameter.sum() for parameter in network.parameters())


def test_a_folder_of_another_run_is_refused(trained, tmp_path):
    model, tokenizer, out, _ = trained
    with pytest.raises(EditingError, match="other settings"):
        trainer(model, tokenizer, out, lr=1e-5).run()
    with pytest.raises(EditingError, match="other data"):
        trainer(model, tokenizer, out, data=DATA._replace(report={"made": "elsewhere"})).run()
    with pytest.raises(EditingError, match="other model"):
        trainer(build_model("llama", seed=1), tokenizer, out).run()


def test_another_model_and_other_settings_are_refused(trained):
    model, tokenizer, out, _ = trained
    request = [EditRequest(**REQUESTS[0])]
    for other in (build_model("llama", seed=1), build_model("llama", dtype=torch.bfloat16)):
        with pytest.raises(EditingError, match="made for another model"):
            load_editor("mend", {"artifact": str(out)}).edit(other, tokenizer, request)
    for setting in ({"layers": [0]}, {"sign": "plus"}, {"rank": 8}):
        with pytest.raises(EditingError, match="was trained with"):
            load_editor("mend", {"artifact": str(out), **setting}).edit(model, tokenizer, request)


def test_training_stops_when_validation_no_longer_improves(tiny_model, tiny_tokenizer, tmp_path):
    run = trainer(tiny_model("llama"), tiny_tokenizer("byte_bpe_bos"), tmp_path, validate_every=2, patience=4, lr=1.0)
    progress = run.run()
    assert progress.step == progress.best_step + 4 < SETTINGS["num_steps"]


@pytest.mark.parametrize("joint", [1, 2, 3])
def test_validation_edits_are_made_jointly_as_in_training(joint, tiny_model, tiny_tokenizer, tmp_path):
    """Once each was made alone, whatever the network was trained for."""
    settings = {"edits_per_example": joint, "num_steps": 1, "validate_every": 1}
    run = trainer(tiny_model("llama"), tiny_tokenizer("byte_bpe_bos"), tmp_path, **settings)
    unedited, trained = run.run().losses
    numbered = [NumberedExample(example, -1 - number) for number, example in enumerate(DATA.validation)]
    batches = [numbered[start : start + joint] for start in range(0, 3, joint)]
    with torch.no_grad():
        weighted = [(run.loss([batch], observe=False)[0], len(batch) / 3) for batch in batches]
    assert trained["loss"] == pytest.approx(sum(float(terms.loss) * share for terms, share in weighted), abs=1e-5)
    for name in ("edit", "locality", "right"):
        assert trained[name] == pytest.approx(sum(t.metrics[name] * share for t, share in weighted), abs=1e-5)
    before = sum(run.loss.unedited(batch)["edit"] * len(batch) / 3 for batch in batches)
    assert unedited["edit"] == pytest.approx(before, abs=1e-5)


def test_the_unedited_loss_is_a_mean_over_the_tokens_of_a_joint_batch(tiny_model, tiny_tokenizer, tmp_path):
    """As the loss under an update is; targets of different lengths tell it from a mean over edits."""
    run = trainer(tiny_model("llama"), tiny_tokenizer("byte_bpe_bos"), tmp_path, edits_per_example=2)
    longer = dataclasses.replace(DATA.train[1], target="Rome and Paris")
    batch = [NumberedExample(DATA.train[0], -1), NumberedExample(longer, -2)]
    rows = [run.loss._paraphrase_row(*numbered) for numbered in batch]
    counts = [len(row.labels) for row in rows]
    alone = [run.loss.unedited([numbered])["edit"] for numbered in batch]
    mean = sum(value * count for value, count in zip(alone, counts, strict=True)) / sum(counts)
    assert counts[0] != counts[1]
    assert run.loss.unedited(batch)["edit"] == pytest.approx(mean, abs=1e-5)


def test_patience_is_lost_at_validations_only(tiny_model, tiny_tokenizer, tmp_path, monkeypatch):
    """Once step 13 was the last: trained after the validation at step 10, and in no artifact."""
    run = trainer(tiny_model("llama"), tiny_tokenizer("byte_bpe_bos"), tmp_path, validate_every=5, patience=8)
    losses = iter([1.0, *[2.0] * 9])
    monkeypatch.setattr(run, "_validation_losses", lambda batches: {"loss": next(losses), "edit": 0.0, "locality": 0.0})
    progress = run.run()
    assert (progress.best_step, progress.step) == (5, 15)
    assert [record["step"] for record in progress.losses] == [0, 5, 10, 15]


def test_a_run_without_a_finite_validation_fails(tiny_model, tiny_tokenizer, tmp_path, monkeypatch):
    """Once it ended as if its artifact could be used."""
    for _ in range(2):  # again when the finished run is started again
        run = trainer(tiny_model("llama"), tiny_tokenizer("byte_bpe_bos"), tmp_path, validate_every=2, patience=4)
        losses = {"loss": math.nan, "edit": math.nan, "locality": 0.0, "right": 0.0}
        monkeypatch.setattr(run, "_validation_losses", lambda batches, losses=losses: losses)
        with pytest.raises(EditingError, match=r"no artifact was written to .* of 4 steps was finite. Lower lr or"):
            run.run()
    assert not (tmp_path / WEIGHTS_NAME).exists()


def test_a_run_that_does_not_beat_the_unedited_model_warns_once(trained, tiny_model, tiny_tokenizer, tmp_path, caplog):
    model, tokenizer, out, _ = trained
    trainer(model, tokenizer, out).run()  # a good one, which is finished
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
    trainer(model, tokenizer, tmp_path, num_steps=4, validate_every=2, lr=1.0, c_loc=10.0).run()
    (record,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert "worse than no edit: its validation loss" in record.getMessage()
    assert (tmp_path / WEIGHTS_NAME).exists()


def test_step_sizes_move_by_their_own_rate_and_once(tiny_model, tiny_tokenizer, tmp_path):
    """One optimizer: Adam's first step moves every step size by exactly its rate, at any rate of the networks."""
    run = trainer(tiny_model("llama"), tiny_tokenizer("byte_bpe_bos"), tmp_path, lr_step_sizes=1e-4)
    before = run.network.step_sizes.detach().clone()
    run._step(0)
    change = (run.network.step_sizes.detach() - before).abs()
    torch.testing.assert_close(change, torch.full_like(change, 1e-4), atol=1e-6, rtol=1e-2)
    parameters = [parameter for group in run.optimizer.param_groups for parameter in group["params"]]
    assert sum(parameter is run.network.step_sizes for parameter in parameters) == 1
    assert len(parameters) == len(list(run.network.parameters()))


@pytest.mark.parametrize("model_type", sorted(ARCHITECTURES))
def test_every_family_can_be_trained(model_type, tiny_model, tiny_tokenizer, tmp_path):
    model, tokenizer = tiny_model(model_type), tiny_tokenizer(NATURAL_TOKENIZER[model_type])
    before = snapshot(model, tokenizer)
    changes = {"num_steps": 2, "edits_per_example": 2, "sign": "plus", "edit_loss": "edit", "locality_tokens": "answer"}
    progress = trainer(model, tokenizer, tmp_path, **changes).run()
    assert_same_state(before, snapshot(model, tokenizer))
    assert progress.step == 2 and all(torch.isfinite(t).all() for t in load_network(tmp_path)[0].state_dict().values())
