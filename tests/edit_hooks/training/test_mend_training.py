"""Training MEND: the loss falls, runs resume to the same bits, artifacts know their model, data comes from anywhere."""

from __future__ import annotations

import json

import pytest
import torch
from paths import ROOT
from safetensors.torch import load_file
from state import assert_same_state, snapshot
from tiny import EDIT_LAYER, REQUESTS, build_model, save_tiny

from edit_hooks import Delta, EditingError, EditRequest, edited, load_editor
from edit_hooks.gradient.hypernetwork import WEIGHTS_NAME, load_network, read_manifest
from edit_hooks.modeling.architectures import ARCHITECTURES
from edit_hooks.modeling.tokens import split_continuation
from edit_hooks.training.mend_trainer import (
    RESUME_NAME,
    EditData,
    EditExample,
    Trainer,
    TrainingConfig,
    training_config,
)
from edit_hooks.utils.yaml_io import read_yaml
from lm_edit.cli.main import main
from lm_edit.mend_data import load_edit_data

SETTINGS = {
    "layers": [EDIT_LAYER],
    "rank": 16,
    "edit_lr": 1e-2,
    "num_steps": 30,
    "accumulate": 2,
    "lr": 1e-3,
    "c_edit": 1.0,
    "lr_step_sizes": 3e-3,
    "validate_every": 10,
}
PLACES = (
    "Velm",
    "Karsk",
    "Rome",
    "Paris",
    "London",
    "Berlin",
    "Vienna",
    "Hamburg",
    "Canada",
    "Lisbon",
    "Kyoto",
    "Toronto",
)


def examples(first, last):
    return [
        EditExample(
            prompt=f"The capital of {place} is",
            target=PLACES[(index + 5) % len(PLACES)],
            paraphrases=(f"You can see that the capital of {place} is", f"The largest city of {place} is"),
            locality=((f"The train to {place} was two hours", "late"),),
        )
        for index, place in list(enumerate(PLACES))[first:last]
    ]


DATA = EditData(examples(0, 9), examples(9, 12), {"made": "here"})


def trainer(model, tokenizer, out, data=DATA, **changes):
    config = training_config(model, {**SETTINGS, **changes})
    return Trainer(model, tokenizer, config, data, out, {"model_name": "tiny"}, quiet=True)


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


def test_the_artifact_says_what_it_is_and_edits(trained):
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


def test_edits_that_were_trained_on_carry_a_warning(trained):
    model, tokenizer, out, _ = trained
    (known, *_), (new, *_) = DATA.train, DATA.validation
    requests = [EditRequest(prompt=example.prompt, target_new=example.target) for example in (known, new)]
    seen, unseen = load_editor("mend", {"artifact": str(out)}).edit(model, tokenizer, requests)
    assert any("trained on this very edit" in text for text in seen.diagnostics["warnings"])
    assert "warnings" not in unseen.diagnostics
    other = EditRequest(prompt=known.prompt, target_new=new.target)  # the same prompt with another target is new
    assert "warnings" not in load_editor("mend", {"artifact": str(out)}).edit(model, tokenizer, [other])[0].diagnostics


def test_the_loss_is_that_of_the_edited_weights(trained):
    """The hooks of training and the delta of editing are the same update: NLL and KL from plain forwards."""
    model, tokenizer, out, _ = trained
    run = trainer(model, tokenizer, out / "unused")
    run.network, _ = load_network(out)
    example = DATA.validation[0]
    with torch.no_grad():
        _, parts = run._loss([(example, 3)], training=False)
    request = EditRequest(prompt=example.prompt, target_new=example.target)
    (delta,) = load_editor("mend", {"artifact": str(out)}).edit(model, tokenizer, [request])

    def logprobs(prompt, target):
        context, wanted = split_continuation(tokenizer, prompt, f" {target}")
        with torch.no_grad():
            return len(context), wanted, model(torch.tensor([context + wanted])).logits[0, :-1].log_softmax(-1)

    _, _, before = logprobs(*example.locality[0])
    with edited(model, delta):
        start, wanted, reworded = logprobs(run._reworded(example, 3), example.target)
        _, _, after = logprobs(*example.locality[0])
    nll = -reworded[start - 1 :][torch.arange(len(wanted)), torch.tensor(wanted)].mean()
    assert parts["edit"] == pytest.approx(float(nll), abs=1e-3)
    kl = (before.exp() * (before - after)).sum(-1).mean()
    assert parts["locality"] == pytest.approx(float(kl), abs=1e-3)


def test_a_killed_run_ends_in_the_same_bits(trained, tmp_path, monkeypatch):
    """Killed in the middle between two saved states; statistics, moments and draws all go on."""
    model, tokenizer, out, progress = trained
    killed = trainer(model, tokenizer, tmp_path)
    step = killed._step

    def until(number):
        if number == 17:
            raise KeyboardInterrupt
        return step(number)

    monkeypatch.setattr(killed, "_step", until)
    with pytest.raises(KeyboardInterrupt):
        killed.run()
    resumed = trainer(model, tokenizer, tmp_path)
    assert resumed.run() == progress
    for name, tensor in load_network(out)[0].state_dict().items():
        assert torch.equal(load_network(tmp_path)[0].state_dict()[name], tensor), name
    ours, theirs = load_file(tmp_path / RESUME_NAME), load_file(out / RESUME_NAME)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert trainer(model, tokenizer, tmp_path).run() == progress  # nothing left to do


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
        with pytest.raises(EditingError, match="trained for another model"):
            load_editor("mend", {"artifact": str(out)}).edit(other, tokenizer, request)
    for setting in ({"layers": [0]}, {"sign": "plus"}, {"rank": 8}):
        with pytest.raises(EditingError, match="was trained with"):
            load_editor("mend", {"artifact": str(out), **setting}).edit(model, tokenizer, request)


def test_training_stops_when_validation_no_longer_improves(tiny_model, tiny_tokenizer, tmp_path):
    run = trainer(tiny_model("llama"), tiny_tokenizer("byte_bpe_bos"), tmp_path, validate_every=2, patience=4, lr=1.0)
    progress = run.run()
    assert progress.step == progress.best_step + 4 < SETTINGS["num_steps"]


def test_step_sizes_move_by_their_own_rate_and_once(tiny_model, tiny_tokenizer, tmp_path):
    """One optimizer: Adam's first step moves every step size by exactly its rate, whatever the networks' rate."""
    run = trainer(tiny_model("llama"), tiny_tokenizer("byte_bpe_bos"), tmp_path, lr_step_sizes=1e-4)
    before = run.network.step_sizes.detach().clone()
    run._step(0)
    moved = (run.network.step_sizes.detach() - before).abs()
    torch.testing.assert_close(moved, torch.full_like(moved, 1e-4), atol=1e-6, rtol=1e-2)
    owners = [parameter for group in run.optimizer.param_groups for parameter in group["params"]]
    assert sum(parameter is run.network.step_sizes for parameter in owners) == 1
    assert len(owners) == len(list(run.network.parameters()))


@pytest.mark.parametrize("model_type", sorted(ARCHITECTURES))
def test_every_family_can_be_trained(model_type, tiny_model, tiny_tokenizer, tmp_path):
    from tiny import NATURAL_TOKENIZER

    model, tokenizer = tiny_model(model_type), tiny_tokenizer(NATURAL_TOKENIZER[model_type])
    before = snapshot(model, tokenizer)
    changes = {"num_steps": 2, "edits_per_example": 2, "sign": "plus", "edit_loss": "edit", "locality_tokens": "answer"}
    progress = trainer(model, tokenizer, tmp_path, **changes).run()
    assert_same_state(before, snapshot(model, tokenizer))
    assert progress.step == 2 and all(torch.isfinite(t).all() for t in load_network(tmp_path)[0].state_dict().values())


# -------------------------------------------------------------------------------------------------------- data


def test_data_from_files_of_both_layouts_and_from_benchmarks(tmp_path):
    ours = tmp_path / "ours.jsonl"
    lines = [
        {"prompt": "{} lies in", "subject": "Velm", "target_new": "Rome", "paraphrases": ["Velm is in"]},
        {"prompt": "a b", "target_new": "c", "locality": [{"prompt": "d", "answer": "e"}]},
        {"prompt": "x y", "target_new": "z"},
    ]
    ours.write_text("\n".join(map(json.dumps, lines)))
    data = load_edit_data(str(ours), {}, validation_share=0.34)
    assert data.train[0] == EditExample(prompt="Velm lies in", target="Rome", paraphrases=("Velm is in",))
    assert data.train[1].locality == (("d", "e"),) and [e.prompt for e in data.validation] == ["x y"]
    assert data.report["num_edits"] == 2 and data.report["without_paraphrase"] == 1 and len(data.report["sha256"]) == 64
    zsre = tmp_path / "zsre.json"
    record = {"src": "Who?", "alt": "Ada", "rephrase": "Which one?", "loc": "nq question: when", "loc_ans": "then"}
    zsre.write_text(json.dumps([record, record]))
    (example,) = load_edit_data(str(zsre), {}, validation=str(ours)).train[:1]
    assert example == EditExample(
        prompt="Who?", target="Ada", paraphrases=("Which one?",), locality=(("when", "then"),)
    )
    for benchmark in ("bake", "qaedit"):
        data = load_edit_data(benchmark, {"data": "mini"}, num_edits=20)
        assert len(data.train) == 18 and len(data.validation) == 2 and data.report["without_locality"] == 0


def test_bad_data_is_named(tmp_path):
    with pytest.raises(EditingError, match="Did you mean 'bake'"):
        load_edit_data("bakee", {})
    bad = tmp_path / "bad.jsonl"
    for record, message in (
        ({"prompt": "a"}, "target_new"),
        ({"prompt": "a", "target_new": "b", "locallity": []}, "locallity"),
    ):
        bad.write_text("\n".join([json.dumps({"prompt": "a", "target_new": "b"}), json.dumps(record)]))
        with pytest.raises(EditingError, match=message):
            load_edit_data(str(bad), {})
    bad.write_text(json.dumps({"prompt": "a", "target_new": "b"}))
    with pytest.raises(EditingError, match="validation edits"):
        load_edit_data(str(bad), {})


def test_unknown_training_settings_are_named(tiny_model):
    with pytest.raises(EditingError, match=r"acumulate.*Did you mean 'accumulate'"):
        training_config(tiny_model("llama"), {"acumulate": 2})
    with pytest.raises(EditingError, match="num_steps"):
        TrainingConfig(num_steps=0)


def test_the_command_trains_and_the_editor_uses_what_it_made(tmp_path, capsys):
    path, out = str(save_tiny(tmp_path, "llama")), tmp_path / "mend"
    arguments = ["--pretrained", path, "--device", "cpu", "--edits", "bake", "--data", "mini", "--num-edits", "12"]
    settings = "layers:[1];rank:8;num_steps:2;accumulate:2;validate_every:1;edit_lr:0.001"
    assert main(["train-mend", *arguments, "--settings", settings, "--out", str(out)]) == 0
    assert "validation edit loss" in capsys.readouterr().out
    edits = tmp_path / "edits.jsonl"
    edits.write_text(json.dumps(REQUESTS[0]))
    editor = ["--editor", "mend", "--editor-args", f"artifact:{out}", "--store", "off"]
    make = [
        "edit",
        "--pretrained",
        path,
        "--device",
        "cpu",
        *editor,
        "--edits",
        str(edits),
        "--out",
        str(tmp_path / "e"),
    ]
    assert main(make) == 0
    (file,) = (tmp_path / "e").glob("*.safetensors")
    assert Delta.load(file).is_low_rank


def test_the_recipe_for_the_demo_model_is_valid():
    settings = read_yaml(ROOT / "scripts" / "mend-demo.yaml")
    config = TrainingConfig.from_mapping(settings)
    assert config.layers == [15, 16, 17] and config.num_steps * config.accumulate <= 1000  # minutes on a CPU
