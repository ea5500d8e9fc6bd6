"""SERAC through ``edited_hf``: the counterfactual model answers in scope, the base model everything else."""

from __future__ import annotations

import dataclasses
import json
import shutil

import pytest
import torch
from lm_runs import answers, assert_same_answers, build, case, instance, run
from paths import RECORDS
from serac_runs import save_untrained
from state import assert_same_state_but_seeds
from transformers import AutoModelForCausalLM, AutoTokenizer

from edit_hooks import Delta, EditingError, EditRequest, load_editor
from edit_hooks.answers import ContextReport, answer_to_json
from edit_hooks.contract.state import snapshot
from edit_hooks.contract.tiny_models import build_model, save_tiny
from edit_hooks.deltas.context_edit import ContextEdit, MemoryModels
from edit_hooks.deltas.saving.saved import save_edits
from edit_hooks.in_context.fact_memory import load_memory
from edit_hooks.in_context.memory_artifact import MEMORY_MODELS
from edit_hooks.in_context.scope_classifier import THRESHOLD
from edit_hooks.lm.asking.prompt_edits import fitted_to
from lm_edit.cli.main import main

PROMPT, FAR = "Port Elna is the capital of", "She wrote the novel in"
GENERATION = {"until": ["."], "max_gen_toks": 6, "do_sample": False}


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return str(save_tiny(tmp_path_factory.mktemp("tiny"), "llama", max_position_embeddings=512))


@pytest.fixture(scope="module")
def artifacts(model_path, tmp_path_factory):
    """Scope -> folder of untrained models for the tiny model."""
    base, tokenizer = AutoModelForCausalLM.from_pretrained(model_path), AutoTokenizer.from_pretrained(model_path)
    folders = {scope: tmp_path_factory.mktemp("serac") / scope for scope in ("wide", "narrow")}
    for scope, folder in folders.items():
        save_untrained(folder, base.eval(), tokenizer, scope, max_position_embeddings=512)
    return folders


@pytest.fixture(scope="module")
def counterfactual_path(tmp_path_factory):
    """The counterfactual model of the artifacts as a model of its own."""
    return str(save_tiny(tmp_path_factory.mktemp("small"), "llama", max_position_embeddings=512, seed=7))


def serac(model_path, folder, **options):
    return build(model_path, **{"editor": "serac", "editor_args": {"artifact": str(folder)}, **options})


def ask(lm, prompt, kind="loglikelihood", doc=None):
    argument = " Peru" if kind == "loglikelihood" else dict(GENERATION)
    (answer,) = getattr(lm, kind)([instance(doc or case(unedited=False), prompt, argument, kind)])
    return answer.final


@pytest.mark.parametrize("engine", ["fast", "reference"])
def test_in_scope_the_counterfactual_model_reads_the_fact_and_the_question(
    model_path, artifacts, counterfactual_path, engine
):
    lm = serac(model_path, artifacts["wide"], engine=engine)
    alone = build(counterfactual_path, mode="none", engine=engine)
    longer = f"{PROMPT} Dravonia {FAR}"
    ours, expected = ask(lm, FAR), ask(alone, longer)
    assert ours.token_logprobs == pytest.approx(expected.token_logprobs, abs=1e-5)
    assert ours.context == ContextReport(facts=1, best_fact=0, scope_score=ours.context.scope_score)
    ours, expected = ask(lm, FAR, "generate_until"), ask(alone, longer, "generate_until")
    assert ours.token_ids == expected.token_ids and ours.raw == expected.raw


@pytest.mark.parametrize("engine", ["fast", "reference"])
def test_out_of_scope_the_answer_is_the_base_models_bit_for_bit(model_path, artifacts, engine):
    lm, plain = serac(model_path, artifacts["narrow"], engine=engine), build(model_path, mode="none", engine=engine)
    assert ask(lm, PROMPT).context.facts == 1 and ask(lm, FAR).context.facts == 0
    assert ask(lm, PROMPT).token_logprobs != ask(plain, PROMPT).token_logprobs
    near, far = ask(lm, PROMPT).context, ask(lm, FAR).context
    assert near.scope_score == 1 and far.scope_score < THRESHOLD, "the score is stored on both sides of the threshold"
    assert answer_to_json(ask(lm, FAR))["context"]["best_fact"] == 0
    assert ask(lm, FAR).token_logprobs == ask(plain, FAR).token_logprobs
    assert ask(lm, FAR, "generate_until").token_ids == ask(plain, FAR, "generate_until").token_ids


def test_a_batch_of_both_kinds_answers_as_each_question_alone(model_path, artifacts):
    lm = serac(model_path, artifacts["narrow"])
    prompts = [PROMPT, FAR, "The train to Velm was", PROMPT]
    for kind in ("loglikelihood", "generate_until"):
        argument = " Peru" if kind == "loglikelihood" else GENERATION
        batch = getattr(lm, kind)([instance(case(), prompt, argument, kind) for prompt in prompts])
        assert_same_answers(batch, [ask(lm, prompt, kind, case()) for prompt in prompts])
        assert [answer.final.context.facts for answer in batch] == [1, 0, 0, 1]
        assert all(answer.final.unedited is not None for answer in batch)


STREAM = {"mode": "sequential", "edits": "bake", "data": str(RECORDS / "bake_qa.jsonl")}


def edit_of(folder, *facts):
    """A joint edit of (prompt, target) facts."""
    models = MemoryModels(str(folder), MEMORY_MODELS.digest(folder))
    return Delta(contexts=tuple(ContextEdit(prompt, target, embedder="", memory=models) for prompt, target in facts))


def test_of_several_facts_the_best_scoring_one_is_read(model_path, artifacts, counterfactual_path):
    """Targets of several words; of two edits of one prompt the later one counts."""
    facts = [
        ("The mother tongue of Elena is", "old Spanish"),
        (PROMPT, "the north"),
        ("The red lighthouse was built by", "nobody"),
        (PROMPT, "the far south"),
    ]
    lm, delta = serac(model_path, artifacts["narrow"]), edit_of(artifacts["narrow"], *facts)
    alone = build(counterfactual_path, mode="none")
    scores_N = load_memory(delta.contexts[0].memory, "").scores(delta.contexts, PROMPT)
    assert scores_N[1] == scores_N[3] == 1 and 0 < float(scores_N.min()) < 0.5
    for prompt, number in ((PROMPT, 3), (facts[0][0], 0)):
        fact = facts[number]
        (item, report, model) = lm.prompt_edits.with_context(lm.items.score_item(prompt, " Peru").item, delta)
        assert report.facts == 1 and model is not None
        assert (report.best_fact, report.scope_score) == (number, 1), "samples name the fact that was chosen"
        expected = alone.items.score_item(f"{fact[0]} {fact[1]} {prompt}", " Peru").item
        assert (item.context, item.continuation) == (expected.context, expected.continuation)


def test_the_memory_grows_in_a_stream_and_nothing_else_changes(model_path, artifacts):
    lm = serac(model_path, artifacts["narrow"], **STREAM)
    before = snapshot(lm.model, lm.tokenizer)
    stream = answers(run(lm, ["bake_es"]))
    assert_same_state_but_seeds(before, snapshot(lm.model, lm.tokenizer))
    assert [len(step.contexts) for step in lm.session.stream.deltas] == [1] * len(lm.session.stream.deltas)
    assert all(answer.final.context.facts == 1 for answer in stream)
    batch = answers(run(serac(model_path, artifacts["narrow"], **{**STREAM, "mode": "batch"}), ["bake_es"]))
    single = answers(run(serac(model_path, artifacts["narrow"]), ["bake_es"]))
    assert_same_answers(stream, batch)
    assert_same_answers(stream, single)  # every edit prompt scores 1 with its own fact, which is still in the memory


def test_ordinary_tasks_of_a_stream_are_routed_too(model_path, artifacts):
    lm, plain = serac(model_path, artifacts["narrow"], num_edits=2, **STREAM), build(model_path, mode="none")
    prompt = lm.plan.groups[0][0].text
    asked = [instance({}, text, " Omber") for text in (prompt, FAR)]
    (inside, outside), (first, second) = lm.loglikelihood(asked), plain.loglikelihood(asked)
    assert inside != first and outside[0] == pytest.approx(second[0], abs=1e-5)
    settings = [instance({}, FAR, {"until": ["a"], "max_gen_toks": 5}, "generate_until")]
    assert lm.generate_until(settings) == plain.generate_until(settings)


def test_a_saved_edit_answers_alike_and_knows_its_models(model_path, artifacts, tmp_path):
    lm = serac(model_path, artifacts["narrow"])
    (delta,) = lm.editor.edit(lm.model, lm.tokenizer, [EditRequest(**case()["edit_requests"][0])])
    path, folder = tmp_path / "edit.safetensors", tmp_path / "models"
    delta.save(path)
    assert Delta.load(path).contexts == delta.contexts and Delta.load(path).checksum() == delta.checksum()
    loaded = build(model_path, load_edit=str(path), editor_args=None)
    assert ask(loaded, PROMPT).token_logprobs == ask(lm, PROMPT).token_logprobs
    assert ask(loaded, FAR).token_logprobs == ask(lm, FAR).token_logprobs
    memory = delta.contexts[0].memory
    moved = dataclasses.replace(delta.contexts[0], memory=MemoryModels(str(folder), memory.digest))
    Delta(contexts=(moved,), meta=delta.meta).save(path)
    with pytest.raises(EditingError, match="no trained scope classifier"):
        build(model_path, load_edit=str(path), editor_args=None)
    folder.mkdir()
    (folder / "serac.safetensors").write_bytes(MEMORY_MODELS.file(artifacts["wide"]).read_bytes())
    with pytest.raises(EditingError, match="are not those that this edit was made with"):
        build(model_path, load_edit=str(path), editor_args=None)


def test_a_stored_edit_is_used_after_its_folder_was_renamed(model_path, artifacts, tmp_path, monkeypatch):
    """The settings name the models by the same relative path before and after."""
    shutil.copytree(artifacts["narrow"], tmp_path / "old" / "models")
    answers = []
    for place in ("old", "new"):
        load_memory.cache_clear()  # another process
        monkeypatch.chdir(tmp_path / place)
        answers.append(ask(serac(model_path, "models", store=str(tmp_path / "store")), PROMPT).token_logprobs)
        if place == "old":
            (tmp_path / "old").rename(tmp_path / "new")
    assert answers[0] == answers[1] and len(list((tmp_path / "store").rglob("deltas/**/*.safetensors"))) == 1


def test_a_saved_edit_finds_its_models_from_any_folder(model_path, artifacts, tmp_path, monkeypatch):
    monkeypatch.chdir(artifacts["narrow"].parent)
    lm = serac(model_path, "narrow")
    request = EditRequest(**case()["edit_requests"][0])
    (delta,) = lm.editor.edit(lm.model, lm.tokenizer, [request])
    (path,) = save_edits(tmp_path / "edits", [((request,), delta)], {"model": lm.identity.to_dict()}, most=1)
    delta.save(tmp_path / "edit.safetensors")
    assert delta.contexts[0].memory.artifact == "narrow"  # the saved one alone is changed
    saved = Delta.load(tmp_path / "edit.safetensors").contexts[0].memory
    assert saved.artifact == str(artifacts["narrow"].resolve()) and saved.digest == delta.contexts[0].memory.digest
    expected = ask(lm, PROMPT)
    load_memory.cache_clear()  # another process
    monkeypatch.chdir(tmp_path)
    loaded = build(model_path, load_edit=str(path), editor_args=None)
    assert ask(loaded, PROMPT).token_logprobs == expected.token_logprobs


CHAT = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</{{ m['role'] }}>{% endfor %}<assistant>"


def test_in_a_chat_the_last_user_message_is_scored_and_begins_with_the_fact(model_path, artifacts):
    lm = serac(model_path, artifacts["narrow"])
    lm.tokenizer.chat_template = CHAT
    delta = edit_of(artifacts["narrow"], (PROMPT, "Dravonia"))
    history = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": PROMPT}]
    asked = lm.items.score_item(lm.apply_chat_template(history), " x").item
    item, report, _ = lm.prompt_edits.with_context(asked, delta)
    text = lm.tokenizer.decode(item.context, skip_special_tokens=True)
    assert report.facts == 1
    assert text == f"<system>Be brief.</system><user>{PROMPT} Dravonia {PROMPT}</user><assistant>"


def test_prompts_are_cut_to_the_positions_of_the_counterfactual_model(model_path, tmp_path):
    base, tokenizer = AutoModelForCausalLM.from_pretrained(model_path), AutoTokenizer.from_pretrained(model_path)
    save_untrained(tmp_path, base.eval(), tokenizer, "wide", max_position_embeddings=16)
    lm = serac(model_path, tmp_path)
    final = ask(lm, f"{PROMPT} the north, and {FAR}")
    assert final.context.cut and torch.isfinite(torch.tensor(final.token_logprobs)).all()
    final = ask(lm, f"{PROMPT} the north, and {FAR}", "generate_until")
    assert final.context.cut and len(final.token_ids) <= 6


@pytest.mark.parametrize("kind", ["loglikelihood", "generate_until", "token_prompts"])
def test_a_fact_that_the_counterfactual_models_positions_cut_off_is_counted(model_path, tmp_path, kind):
    """The fact stands first: with 40 positions it is whole, with 28 its beginning is lost, with 16 all of it."""
    base, tokenizer = AutoModelForCausalLM.from_pretrained(model_path), AutoTokenizer.from_pretrained(model_path)
    question, asked = f"and {FAR}", {"token_prompts": "extra_space"} if kind == "token_prompts" else {}
    document = case(unedited=False) | {"asked": asked}
    found = []
    for positions in (40, 28, 16):
        save_untrained(tmp_path, base.eval(), tokenizer, "wide", max_position_embeddings=positions)
        load_memory.cache_clear()
        final = ask(serac(model_path, tmp_path), question, kind.replace("token_prompts", "loglikelihood"), document)
        found.append((final.context.cut, final.context.fact_cut))
    assert found == [(False, False), (True, True), (True, True)]


def test_lost_tokens_add_up_over_both_models(model_path):
    """The run's model cuts to its own positions first."""
    lm, small = build(model_path, mode="none", max_length=48), build_model("llama", max_position_embeddings=16)
    text = " ".join(["red"] * 70)
    for built in (
        lm.items.score_item(text, " Peru"),
        lm.items.generate_item(text, dict(GENERATION)),
        lm.items.token_prompt_item(text, " x", "extra_space"),
    ):
        fitted = fitted_to(small, built)
        lost = _longest_context(built.item) - _longest_context(fitted.item)
        assert lost > 1 and built.num_cut > 1 and fitted.num_cut == built.num_cut + lost


def _longest_context(item):
    by_token = getattr(item, "by_token", None)
    return max(map(len, [item.context] if by_token is None else by_token.ids))


def test_without_training_an_embedder_chooses_and_the_base_model_answers(model_path):
    untrained = {"artifact": "identity", "classifier": "words"}
    lm, plain = build(model_path, editor="serac", editor_args=untrained), build(model_path, mode="none")
    inside, expected = ask(lm, PROMPT), ask(plain, f"{PROMPT} Dravonia {PROMPT}")
    assert inside.context.facts == 1
    assert inside.token_logprobs == pytest.approx(expected.token_logprobs, abs=1e-5)
    assert ask(lm, FAR).context.facts == 0 and ask(lm, FAR).token_logprobs == ask(plain, FAR).token_logprobs


def test_hidden_states_are_unscored_with_a_reason_and_export_refuses(model_path, artifacts, tmp_path, capsys):
    lm = serac(model_path, artifacts["wide"])
    results = run(lm, ["counterfact_evk_es"], data="counterfact.jsonl", limit=1)
    assert results["results"]["counterfact_evk_es"]["unscored,none"] > 0
    (delta,) = load_editor("serac", {"artifact": str(artifacts["wide"])}).edit(
        lm.model, lm.tokenizer, [EditRequest(**case()["edit_requests"][0])]
    )
    delta.save(tmp_path / "edit.safetensors")
    arguments = ["export", str(tmp_path / "edit.safetensors"), "--format", "peft", "--out", str(tmp_path / "out")]
    assert main([*arguments, "--pretrained", model_path, "--device", "cpu"]) == 2
    assert "text before the prompt" in capsys.readouterr().err


def test_benchmarks_run_end_to_end_and_results_name_the_editor(model_path, artifacts):
    lm = serac(model_path, artifacts["narrow"])
    results = run(lm, ["bake_es", "bake_ls", "bake_rq"], limit=2)
    assert all(answer.edit.editor == "serac" for answer in answers(results))
    assert results["results"]["bake_es"]["unscored,none"] == 0
    metadata = lm.get_model_info()["edited_hf"]
    assert metadata["editor"] == "serac" and metadata["editor_writes"] == ["context"]
    assert json.dumps(metadata)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "lm-edit train serac"),
        ({"artifact": "identity"}, "name it: classifier:words"),
        ({"artifact": "nowhere"}, "no trained scope classifier"),
        ({"artifact": "identity", "classifier": "words", "layers": [1]}, "changes no layer"),
        ({"artifact": "identity", "clasifier": "words"}, "Did you mean 'classifier'"),
    ],
)
def test_wrong_settings_are_refused_before_weights_are_loaded(model_path, settings, message, monkeypatch):
    monkeypatch.setattr(
        "lm_eval.models.huggingface.HFLM._create_model", lambda *_args, **_kwargs: pytest.fail("weights are loaded")
    )
    with pytest.raises(EditingError, match=message):
        build(model_path, editor="serac", editor_args=settings)
