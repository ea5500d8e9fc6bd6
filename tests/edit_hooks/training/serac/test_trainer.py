"""Training SERAC's models: the loss falls, runs resume bit-identical, artifacts are bound to their model."""

from __future__ import annotations

import json

import pytest
import torch
from damage import flip_in_the_middle
from mend_runs import DATA
from safetensors.torch import load_file
from serac_runs import save_encoder, trainer, training_config
from state import assert_same_state

from edit_hooks import EditingError, EditRequest, load_editor
from edit_hooks.contract.state import snapshot
from edit_hooks.contract.tiny_models import REQUESTS, build_model, save_tiny
from edit_hooks.in_context.memory_artifact import MEMORY_MODELS, load_models
from edit_hooks.training.edit_data import NumberedExample
from edit_hooks.training.serac.loss import EPS, mixture
from edit_hooks.training.serac.models import load_sources
from edit_hooks.training.trainer import RESUME_NAME

SEEN = DATA._replace(validation=DATA.train)  # random models learn by heart only
TOY = {"num_steps": 60, "validate_every": 20, "pooling": "unit_mean"}


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    return save_encoder(tmp_path_factory.mktemp("encoder") / "tiny")


@pytest.fixture(scope="module")
def trained(tiny_model, tiny_tokenizer, tmp_path_factory, encoder):
    """A finished run on the tiny Llama: model, tokenizer, folder, progress."""
    model, tokenizer = tiny_model("llama"), tiny_tokenizer("byte_bpe_bos")
    out = tmp_path_factory.mktemp("serac") / "run"
    before, state = snapshot(model, tokenizer), torch.get_rng_state()
    progress = trainer(model, tokenizer, out, encoder, SEEN, **TOY).run()
    assert_same_state(before, snapshot(model, tokenizer))
    assert torch.equal(torch.get_rng_state(), state)
    return model, tokenizer, out, progress


def test_training_lowers_the_loss(trained):
    _, _, _, progress = trained
    unedited, best = progress.losses[0], min(progress.losses[1:], key=lambda record: record["loss"])
    assert best["edit"] < unedited["edit"] - 5 and best["right"] > 0.9 and best["locality"] < 0.02
    assert progress.best_loss == best["loss"] and progress.best_step == best["step"] and progress.skipped == 0


def test_the_artifact_describes_its_run(trained):
    _, _, out, progress = trained
    manifest = MEMORY_MODELS.read_manifest(out)
    assert manifest == json.loads((out / "manifest.json").read_text())
    assert manifest["step"] == progress.best_step and manifest["data"] == {"made": "here"}
    assert manifest["editor"]["pooling"] == "unit_mean" and manifest["training"]["c_edit"] == 1.0
    assert manifest["sources"]["counterfactual"] is None and len(manifest["sources"]["classifier"]) == 64


def test_training_edits_carry_a_warning(trained):
    model, tokenizer, out, _ = trained
    (trained_on, *_), (new, *_) = DATA.train, DATA.validation
    requests = [EditRequest(prompt=example.prompt, target_new=example.target) for example in (trained_on, new)]
    seen, unseen = load_editor("serac", {"artifact": str(out)}).edit(model, tokenizer, requests)
    assert any("trained on this very edit" in text for text in seen.warnings)
    assert not unseen.warnings


def test_a_killed_run_resumes_bit_identical(tiny_model, tiny_tokenizer, encoder, tmp_path, monkeypatch):
    model, tokenizer = tiny_model("gpt2"), tiny_tokenizer("byte_bpe")
    settings = {"num_steps": 6, "validate_every": 2, "train_embeddings": False}
    whole = trainer(model, tokenizer, tmp_path / "whole", encoder, **settings).run()
    killed = trainer(model, tokenizer, tmp_path / "killed", encoder, **settings)
    step = killed._step

    def interrupted_step(number):
        if number == 3:
            raise KeyboardInterrupt
        return step(number)

    monkeypatch.setattr(killed, "_step", interrupted_step)
    with pytest.raises(KeyboardInterrupt):
        killed.run()
    assert trainer(model, tokenizer, tmp_path / "killed", encoder, **settings).run() == whole
    ours, theirs = (load_file(tmp_path / name / RESUME_NAME) for name in ("killed", "whole"))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert not any("wte" in name for name in ours)  # frozen
    ours, theirs = (load_file(MEMORY_MODELS.file(tmp_path / name)) for name in ("killed", "whole"))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    with pytest.raises(EditingError, match="other settings"):
        trainer(model, tokenizer, tmp_path / "killed", encoder, **settings, lr=1e-5).run()


def test_another_model_other_settings_and_damage_are_refused(trained, tmp_path):
    model, tokenizer, out, _ = trained
    request = [EditRequest(**REQUESTS[0])]
    for other in (build_model("llama", seed=1), build_model("llama", dtype=torch.bfloat16)):
        with pytest.raises(EditingError, match="made for another model"):
            load_editor("serac", {"artifact": str(out)}).edit(other, tokenizer, request)
    for setting in ({"pooling": "cls"}, {"scope_texts": "released"}, {"counterfactual": "gpt2"}):
        with pytest.raises(EditingError, match="was trained with"):
            load_editor("serac", {"artifact": str(out), **setting}).edit(model, tokenizer, request)
    with pytest.raises(EditingError, match="lm-edit train serac"):
        load_editor("serac").edit(model, tokenizer, request)
    with pytest.raises(EditingError, match="give a folder written by lm-edit train serac"):
        load_editor("serac", {"artifact": str(tmp_path)}).edit(model, tokenizer, request)
    file = tmp_path / "serac.safetensors"
    file.write_bytes(MEMORY_MODELS.file(out).read_bytes())
    flip_in_the_middle(file)
    with pytest.raises(EditingError, match="is damaged"):
        load_editor("serac", {"artifact": str(tmp_path)}).check_settings(model)
    file.write_bytes(b"{}")
    with pytest.raises(EditingError, match="cannot read"):
        load_editor("serac", {"artifact": str(tmp_path)}).check_settings(model)


def test_models_survive_the_round_trip(trained, encoder):
    model, tokenizer, out, _ = trained
    state = torch.get_rng_state()
    (classifier, counterfactual), _ = load_models(out)
    assert torch.equal(torch.get_rng_state(), state)
    again = load_models(out)[0]
    texts = ["The capital of Velm is", "Elena"]
    assert torch.equal(classifier.one_by_one(texts), again.classifier.one_by_one(texts))
    ids = torch.tensor([tokenizer("The capital of Velm")["input_ids"]])
    with torch.no_grad():
        assert torch.equal(counterfactual(ids).logits, again.counterfactual(ids).logits)
        assert not torch.equal(counterfactual(ids).logits, model(ids).logits)


# -- the loss ----------------------------------------------------------------------------------------------------------


def test_the_loss_is_that_of_a_plain_computation(tiny_model, tiny_tokenizer, encoder, tmp_path):
    """Question by question, whole sequences, all logits; the batch as one memory."""
    model, tokenizer = tiny_model("llama"), tiny_tokenizer("byte_bpe_bos")
    run = trainer(model, tokenizer, tmp_path, encoder, pooling="unit_mean", c_edit=0.3, c_loc=2.0)
    batch = [NumberedExample(example, number) for number, example in enumerate(DATA.train[:3])]
    classifier, counterfactual = run.models
    nll, kl = [], []
    with torch.no_grad():
        facts_NE = classifier.one_by_one([example.prompt for example, _ in batch])
        for example, number in batch:
            asked = (prompt := run.loss.questions.edit_prompt(example, number), example.continuation(prompt))
            for prompt, answer in (asked, run.loss.questions.locality(example, number)):
                scores_N = (-(classifier.one_by_one([prompt]) - facts_NE).pow(2).sum(1)).exp()
                best = batch[int(scores_N.argmax())].example
                ids = tokenizer(f"{prompt}{answer}")["input_ids"]
                longer = tokenizer(f"{best.prompt} {best.target} {prompt}{answer}")["input_ids"]
                count = len(ids) - len(tokenizer(prompt)["input_ids"])
                base = model(torch.tensor([ids])).logits[0, -count - 1 : -1].softmax(1)
                other = counterfactual(torch.tensor([longer])).logits[0, -count - 1 : -1].softmax(1)
                s = scores_N.max()
                mixed = (1 - s) * base + s * other + EPS
                if prompt == asked[0]:
                    nll += (-mixed[range(count), ids[-count:]].log()).tolist()
                else:
                    kl += (base * (base.log() - mixed.log())).sum(1).tolist()
        (terms,) = run.loss([batch])
    assert terms.metrics["edit"] == pytest.approx(sum(nll) / len(nll), abs=1e-4)
    assert terms.metrics["locality"] == pytest.approx(sum(kl) / len(kl), abs=1e-4)
    assert float(terms.loss) == pytest.approx(0.3 * sum(nll) / len(nll) + 2 * sum(kl) / len(kl), abs=1e-4)


def test_batches_that_share_passes_have_memories_of_their_own(tiny_model, tiny_tokenizer, encoder, tmp_path):
    run = trainer(tiny_model("llama"), tiny_tokenizer("byte_bpe_bos"), tmp_path, encoder, pooling="unit_mean")
    batches = [[NumberedExample(example, -1)] for example in DATA.train[:3]]
    with torch.no_grad():
        together = run.loss(batches)
        alone = [run.loss([batch])[0] for batch in batches]
    for ours, theirs in zip(together, alone, strict=True):
        assert float(ours.loss) == pytest.approx(float(theirs.loss), abs=1e-5)


@pytest.mark.parametrize(("setting", "sizes"), [({}, [1, 1, 1]), ({"edits_per_validation": 2}, [2, 1])])
def test_validation_memories_have_one_fact_unless_set(
    setting, sizes, tiny_model, tiny_tokenizer, encoder, tmp_path, monkeypatch
):
    """As in EasyEdit, whose batches of training have ten."""
    settings = {"num_steps": 1, "validate_every": 1, **setting}
    run = trainer(tiny_model("llama"), tiny_tokenizer("byte_bpe_bos"), tmp_path, encoder, **settings)
    loss, found = run.loss, []

    def recorded(batches, observe):
        found.extend([] if observe else map(len, batches))
        return loss(batches, observe)

    recorded.unedited = loss.unedited
    monkeypatch.setattr(run, "loss", recorded)
    run.run()
    assert found == sizes


def test_a_score_of_one_has_finite_gradients_and_fewer_tokens_have_no_probability():
    score, base = torch.ones(1, 1, requires_grad=True), torch.randn(1, 5).log_softmax(1)
    other = torch.randn(1, 4, requires_grad=True)
    mixed = mixture(score, base, other)
    assert float(mixed.exp()[0, 4].detach()) < 1e-6
    mixed.sum().backward()
    assert torch.isfinite(score.grad).all() and torch.isfinite(other.grad).all()


# -- what training starts from -------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", ["gpt2", "gemma3_text"])
def test_the_first_blocks_of_the_base_model(model_type, tiny_model, tiny_tokenizer, encoder):
    model, tokenizer = tiny_model(model_type), tiny_tokenizer("byte_bpe" if model_type == "gpt2" else "unigram_bos")
    config = training_config(model, {"classifier": encoder, "counterfactual_blocks": 2})
    short = load_sources(model, tokenizer, config).counterfactual
    weights = model.state_dict()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in short.state_dict().items())
    assert sum(p.numel() for p in short.parameters()) < sum(p.numel() for p in model.parameters())
    with pytest.raises(EditingError, match="has 3 blocks"):
        load_sources(model, tokenizer, training_config(model, {"classifier": encoder, "counterfactual_blocks": 4}))


def test_a_counterfactual_model_must_have_the_tokenizer_of_the_base(tiny_model, tiny_tokenizer, encoder, tmp_path):
    model, tokenizer = tiny_model("llama"), tiny_tokenizer("byte_bpe_bos")
    same = str(save_tiny(tmp_path, "qwen2", "byte_bpe_bos", vocab_size=600))  # rows behind the tokenizer's are cut
    run = trainer(model, tokenizer, tmp_path / "out", encoder, counterfactual=same, num_steps=1, validate_every=1)
    assert run.models.counterfactual.get_input_embeddings().weight.shape[0] == 512
    assert run.run().step == 1
    foreign = str(save_tiny(tmp_path, "qwen2", "metaspace_bos"))
    with pytest.raises(EditingError, match="another tokenizer than the base model"):
        trainer(model, tokenizer, tmp_path / "other", encoder, counterfactual=foreign)
    with pytest.raises(EditingError, match="tokenizer cannot be loaded"):
        trainer(model, tokenizer, tmp_path / "other", encoder, counterfactual=str(tmp_path / "nowhere"))
    with pytest.raises(EditingError, match=r"classifier .* cannot be loaded"):
        trainer(model, tokenizer, tmp_path / "other", str(tmp_path / "nowhere"))
