"""In-context editing: what is put before a prompt, where, and how much of it; alone and on top of another editor."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path

import pytest
import torch
from lm_runs import BAKE, answers, assert_same_answers, build, case, instance, run
from paths import RECORDS
from state import assert_same_state, snapshot
from tiny import save_tiny

from edit_hooks import Delta, EditingError, EditRequest, edited, load_editor
from edit_hooks.answers import ContextReport
from edit_hooks.deltas.context_edit import ContextEdit
from edit_hooks.deltas.export import export_merged
from edit_hooks.in_context import embeddings
from edit_hooks.in_context.demonstrations import load_pool
from edit_hooks.in_context.embeddings import embed_words, most_similar
from edit_hooks.in_context.selection import select_facts

ICE = ContextEdit("Port Elna is the capital of", "Dravonia")
WORDS = {"embedder": "words"}
FACT = "New Fact: Port Elna is the capital of Dravonia\n"
REQUEST = EditRequest(prompt="{} is the capital of", subject="Port Elna", target_new="Dravonia", case_id="7")


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    """Positions enough for two dozen demonstrations in small pieces."""
    return str(save_tiny(tmp_path_factory.mktemp("tiny"), "llama", max_position_embeddings=2048))


def made(editor: str, *requests: EditRequest, **config) -> list[Delta]:
    return load_editor(editor, config).edit(_NoModel(), _NoTokenizer(), list(requests or [REQUEST]))


class _NoModel(torch.nn.Module):
    """Contexts are made without looking at the model."""

    class config:
        model_type = "anything"


class _NoTokenizer:
    is_fast = True


def ids_of(lm, item):
    return lm.tokenizer.decode(item.context)


# -- the text --------------------------------------------------------------------------------------------------------


def test_the_line_of_the_fact_comes_before_the_question_and_nothing_else():
    (delta,) = made("ice")
    assert delta.contexts[0].before() == FACT + "Prompt: "
    assert delta.writes == ["context"] and not delta.parameter_names and delta.without_contexts is None


def test_ike_shows_four_copies_twelve_updates_sixteen_retains_and_the_edit_itself_last():
    (delta,) = made("ike", **WORDS)
    (told,) = delta.contexts
    counts = {kind: delta.diagnostics[kind] for kind in ("copy", "update", "retain")}
    assert counts == {"copy": 4, "update": 12, "retain": 16} and len(told.demonstrations) == 33
    assert told.demonstrations[-1] == f"{FACT}Prompt: Port Elna is the capital of Dravonia"
    pool = load_pool("builtin")
    seen = {"copy": 0, "update": 0, "retain": 0}
    for text, index in zip(told.demonstrations, delta.diagnostics["records"], strict=False):
        record = pool.records[index]
        fact, question = text.split("\nPrompt: ")
        assert fact == f"New Fact: {record.edit.text} {record.edit.target_new}"
        if question == f"{record.edit.text} {record.edit.target_new}":
            seen["copy"] += 1
        elif any(question == f"{prompt} {record.edit.target_new}" for prompt in record.paraphrases):
            seen["update"] += 1
        else:
            seen["retain"] += 1
            assert any(question == f"{prompt} {answer}" for prompt, answer in record.neighbors)
    assert seen == counts
    assert told.before().endswith(f"{FACT}Prompt: ")


def test_the_nearest_record_comes_last_and_the_kinds_are_drawn_from_seed_and_request():
    (delta,) = made("ike", **WORDS)
    pool = load_pool("builtin")
    query = f"{FACT}Prompt: Port Elna is the capital of"
    order = most_similar("words", query, [record.copy_demonstration() for record in pool.records], 32)
    assert delta.diagnostics["records"] == order[::-1]
    again, other_seed = made("ike", **WORDS)[0], made("ike", **WORDS, seed=1)[0]
    assert again.checksum() == delta.checksum() != other_seed.checksum()


def test_an_embedder_of_ones_own_decides(monkeypatch):
    """Any function from texts to unit rows; here: likeness is the share of the letter e."""

    def share_of_e(texts):
        part = torch.tensor([text.count("e") / len(text) for text in texts])
        return torch.stack([part, (1 - part**2).sqrt()], 1)

    monkeypatch.setitem(embeddings.EMBEDDERS, "letters", lambda: share_of_e)
    (delta,) = made("ike", embedder="letters", num_demonstrations=8)
    pool = load_pool("builtin")
    texts = [record.copy_demonstration() for record in pool.records]
    own = share_of_e([f"{FACT}Prompt: Port Elna is the capital of"])[0]
    distances = [float(abs(share_of_e([texts[i]])[0, 0] - own[0])) for i in delta.diagnostics["records"]]
    assert distances == sorted(distances, reverse=True)


def test_the_sentences_variant_is_nearest_first_without_a_block_of_its_own():
    (delta,) = made("ike", **WORDS, selection="sentences")
    (told,) = delta.contexts
    assert len(told.demonstrations) == 16 and FACT not in "".join(told.demonstrations)
    scores = embed_words(told.demonstrations) @ embed_words([f"{FACT}Prompt: Port Elna is the capital of"])[0]
    assert scores.tolist() == sorted(scores.tolist(), reverse=True)


def test_without_the_fact_neither_its_line_nor_its_own_demonstration_is_shown():
    (delta,) = made("ike", **WORDS, include_fact=False)
    text = delta.contexts[0].before()
    assert "Port Elna" not in text and text.count("New Fact:") == 32 and text.endswith("\n\nPrompt: ")


def test_a_tested_edit_in_the_pool_is_refused_except_under_the_name_that_says_so(tmp_path):
    pool = tmp_path / "pool.jsonl"
    pool.write_text((RECORDS / "bake_qa.jsonl").read_text())
    rewrite = json.loads(pool.read_text().splitlines()[0])["requested_rewrite"]
    tested = EditRequest(prompt=rewrite["prompt"], subject=rewrite["subject"], target_new="anything", case_id="0")
    settings = {**WORDS, "pool": str(pool), "num_demonstrations": 1}
    with pytest.raises(EditingError, match=r"case 0.*pool_start"):
        made("ike", tested, **settings)
    (leaky,) = made("ike_leaky_pool", tested, **settings)
    assert tested.text in leaky.contexts[0].before()
    (clean,) = made("ike", tested, **settings, pool_start=1)
    assert tested.text not in "".join(clean.contexts[0].demonstrations[:-1])


def test_pools_that_cannot_serve_are_named(tmp_path):
    with pytest.raises(EditingError, match="cannot be read"):
        made("ike", **WORDS, pool="nowhere.jsonl")
    broken = tmp_path / "broken.jsonl"
    broken.write_text("{not json")
    with pytest.raises(EditingError, match="not valid JSON"):
        made("ike", **WORDS, pool=str(broken))
    with pytest.raises(EditingError, match="42 usable records"):
        made("ike", **WORDS, num_demonstrations=100)
    with pytest.raises(EditingError, match="layers"):
        load_editor("ice", {"layers": [1]})


def test_a_missing_sentence_embedder_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with pytest.raises(EditingError, match=r"lm-eval-editing\[ike\]"):
        made("ike", embedder="a/folder")


def test_sentence_transformers_are_asked_for_unit_vectors_once_per_text(monkeypatch):
    """The extra is not needed here: a stand-in shows what is asked of it."""
    seen: list[str] = []

    class SentenceTransformer:
        def __init__(self, name, device):
            assert (name, device) == ("a/folder", "cpu")

        def encode(self, texts, normalize_embeddings, show_progress_bar):
            assert normalize_embeddings and not show_progress_bar
            seen.extend(texts)
            return embed_words(texts).numpy()

    module = types.ModuleType("sentence_transformers")
    module.SentenceTransformer = SentenceTransformer
    monkeypatch.setitem(sys.modules, "sentence_transformers", module)
    by_model, by_words = made("ike", embedder="a/folder")[0], made("ike", **WORDS)[0]
    assert by_model.diagnostics["records"] == by_words.diagnostics["records"]
    made("ike", embedder="a/folder")
    assert len(seen) == len(set(seen)) == len(load_pool("builtin").records) + 1


def test_of_several_facts_the_one_like_the_question_is_told():
    facts = [ICE, ContextEdit("Lake Omber lies in", "Peru"), ContextEdit("Mina Okabe plays the", "harp")]
    assert select_facts(facts, "In which country is Lake Omber?").facts == (facts[1],)
    assert select_facts(facts, "Which instrument does Mina Okabe play?").facts == (facts[2],)
    several = [ContextEdit(fact.prompt, fact.target_new, num_facts=2) for fact in facts]
    told = select_facts(several, "Mina Okabe plays in Port Elna.")
    assert {fact.target_new for fact in told.facts} == {"harp", "Dravonia"} and told.facts[-1].target_new == "harp"


def test_a_question_that_is_like_no_fact_is_told_none():
    facts = [
        ContextEdit(prompt, target, min_similarity=0.3)
        for prompt, target in (("Port Elna is the capital of", "Dravonia"), ("Lake Omber lies in", "Peru"))
    ]
    assert select_facts(facts, "In which country is Lake Omber?").facts == (facts[1],)
    assert select_facts(facts[1:], "In which country is Lake Omber?").facts == (facts[1],)
    assert (
        select_facts(facts, "Who wrote the opera?") is None and select_facts(facts[:1], "Who wrote the opera?") is None
    )
    nothing_else = ContextEdit(facts[1].prompt, "Peru", num_facts=2, min_similarity=0.3)
    assert select_facts([facts[0], nothing_else], "Lake Omber lies in Peru").facts == (nothing_else,)


# -- as a delta ------------------------------------------------------------------------------------------------------


def test_a_context_is_saved_summed_and_never_written_into_a_model(tmp_path, tiny_model, tiny_tokenizer):
    (delta,) = made("ike", **WORDS)
    delta.save(tmp_path / "delta.safetensors")
    again = Delta.load(tmp_path / "delta.safetensors")
    assert again.contexts == delta.contexts and again.checksum() == delta.checksum()
    both = Delta.summed([delta, *made("ice", EditRequest(prompt="Lake Omber lies in", target_new="Peru"))])
    assert [told.target_new for told in both.contexts] == ["Dravonia", "Peru"]
    model = tiny_model("llama")
    before = snapshot(model)
    with pytest.raises(EditingError, match="changes prompts, not the model"), edited(model, delta):
        pytest.fail("the scope was entered")
    with pytest.raises(EditingError, match="not all in the weights"):
        export_merged(model, tiny_tokenizer("byte_bpe_bos"), delta, tmp_path / "merged")
    assert_same_state(before, snapshot(model))
    damaged = Delta(contexts=(ICE,))
    assert damaged.checksum() != Delta(contexts=(ContextEdit("Port Elna is the capital of", "Peru"),)).checksum()


# -- in edited_hf ----------------------------------------------------------------------------------------------------


def test_answers_are_those_of_the_unedited_model_after_the_text(model_path):
    """Scores and greedy text under the edit equal those of the plain model on the longer prompt."""
    lm, plain = build(model_path, editor="ice", editor_args={}), build(model_path, mode="none")
    prompt = "Port Elna is the capital of"
    settings = {"until": ["."], "max_gen_toks": 6, "do_sample": False}
    asked = [instance(case(unedited=False), prompt, " Dravonia")]
    longer = [instance(case(unedited=False), FACT + "Prompt: " + prompt, " Dravonia")]
    (told,), (expected,) = lm.loglikelihood(asked), plain.loglikelihood(longer)
    assert told.final.token_logprobs == pytest.approx(expected.final.token_logprobs, abs=1e-5)
    assert told.final.context == ContextReport(facts=1)
    asked = [instance(case(unedited=False), prompt, settings, "generate_until")]
    longer = [instance(case(unedited=False), FACT + "Prompt: " + prompt, dict(settings), "generate_until")]
    assert lm.generate_until(asked)[0].final.token_ids == plain.generate_until(longer)[0].final.token_ids


def test_outside_the_scope_the_unedited_model_answers(model_path):
    lm, plain = build(model_path, editor="ice", editor_args={"min_similarity": 0.5}), build(model_path, mode="none")
    near, far = "Port Elna is the capital of", "She wrote the novel in"
    (inside,) = lm.loglikelihood([instance(case(), near, " Peru")])
    (outside,) = lm.loglikelihood([instance(case(), far, " Peru")])
    assert inside.final.context.facts == 1 and outside.final.context.facts == 0
    (as_is,) = plain.loglikelihood([instance(case(), far, " Peru")])
    assert outside.final.token_logprobs == pytest.approx(as_is.final.token_logprobs, abs=1e-6)
    assert inside.final.logprob != pytest.approx(inside.final.unedited.logprob, abs=1e-6)


def test_the_unedited_answer_has_no_context(model_path):
    lm, plain = build(model_path, editor="ice", editor_args={}), build(model_path, mode="none")
    (answer,) = lm.loglikelihood([instance(case(), "Port Elna is the capital of", " Dravonia")])
    (bare,) = plain.loglikelihood([instance(case(unedited=False), "Port Elna is the capital of", " Dravonia")])
    assert answer.final.unedited.logprob == pytest.approx(bare.final.logprob, abs=1e-5)
    assert answer.final.logprob != pytest.approx(bare.final.logprob, abs=1e-3)


def test_demonstrations_that_do_not_fit_are_left_out_from_the_far_end(model_path):
    lm = build(model_path, editor="ike", editor_args=WORDS, max_length=400)
    (answer,) = lm.loglikelihood([instance(case(unedited=False), "Port Elna is the capital of", " Dravonia")])
    report = answer.final.context
    assert 0 < report.demonstrations < 33 and report.left_out == 33 - report.demonstrations and not report.cut
    (delta,) = made("ike", **WORDS)
    item = lm.items.score_item("Port Elna is the capital of", " Dravonia").item
    placed, _ = lm.prompt_edits.with_context(item, delta)
    text = lm.tokenizer.decode(placed.context, skip_special_tokens=True)
    shown = delta.contexts[0].demonstrations[-report.demonstrations :]
    assert text == "\n\n".join(shown) + f"\n\n{FACT}Prompt: Port Elna is the capital of"
    assert len(placed.context) <= 400
    tight = build(model_path, editor="ike", editor_args=WORDS, max_length=12)
    (answer,) = tight.loglikelihood([instance(case(unedited=False), "Port Elna is the capital of", " Dravonia")])
    assert answer.final.context.demonstrations == 0 and answer.final.context.cut


CHAT = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</{{ m['role'] }}>{% endfor %}<assistant>"


def test_in_a_chat_the_text_goes_to_the_beginning_of_the_last_user_turn(model_path):
    lm = build(model_path, editor="ice", editor_args={})
    lm.tokenizer.chat_template = CHAT
    history = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who rules Port Elna?"}]
    prompt = lm.apply_chat_template(history)
    expected = f"<system>Be brief.</system><user>{FACT}Prompt: Who rules Port Elna?</user><assistant>"
    assert lm.prompt_edits.before_question(ICE.before(), prompt) == expected
    assert lm.prompt_edits.question_of(prompt) == "Who rules Port Elna?"
    with pytest.raises(EditingError, match="not made by this model's chat template"):
        lm.prompt_edits.before_question(ICE.before(), "Who rules Port Elna?")


def test_the_harness_applies_chat_templates_with_contexts(model_path):
    lm = build(model_path, editor="ice", editor_args={})
    lm.tokenizer.chat_template = CHAT
    results = run(lm, ["bake_rq"], limit=1, apply_chat_template=True)
    assert all(answer.final.context.facts == 1 for answer in answers(results))


@pytest.mark.parametrize("engine", ["fast", "reference"])
def test_benchmarks_run_and_say_what_was_told(model_path, engine):
    results = run(build(model_path, editor="ice", editor_args={}, engine=engine), BAKE, limit=1)
    found = answers(results)
    assert all(answer.final.context.facts == 1 and answer.edit.editor == "ice" for answer in found)
    assert results["results"]["bake_es"]["unscored,none"] == 0


def test_the_reverse_answer_is_not_in_the_reverse_question_before_it_is_asked(model_path):
    """The context states the fact forward; the published protocol states the reverse answer verbatim."""
    lm = build(model_path, editor="ike", editor_args=WORDS)
    for line in (RECORDS / "bake_qa.jsonl").read_text().splitlines():
        record = json.loads(line)
        rewrite, reverse = record["requested_rewrite"], record["reverse_qa"]
        request = EditRequest(
            prompt=rewrite["prompt"], subject=rewrite["subject"], target_new=rewrite["target_new"]["str"]
        )
        (delta,) = made("ike", request, **WORDS)
        placed, _ = lm.prompt_edits.with_context(lm.items.score_item(reverse["prompt"], " x").item, delta)
        text = lm.tokenizer.decode(placed.context, skip_special_tokens=True)
        assert f"{reverse['prompt']} {reverse['target_new']['str']}" not in text
        assert text.endswith(f"New Fact: {request.text} {request.target_new}\nPrompt: {reverse['prompt']}")


@pytest.mark.parametrize("tokenizer", ["byte_bpe_bos", "metaspace_bos", "unigram_bos"])
def test_the_scored_tokens_are_those_of_the_answer_on_every_kind_of_tokenizer(tmp_path, tokenizer):
    """The continuation is cut from one encoding of the whole prompt: no BOS in it, no lost first token."""
    lm = build(str(save_tiny(tmp_path, "llama", tokenizer, max_position_embeddings=512)), editor="ice", editor_args={})
    item = lm.items.score_item("Port Elna is the capital of", " Dravonia").item
    placed, _ = lm.prompt_edits.with_context(item, Delta(contexts=(ICE,)))
    assert placed.continuation == item.continuation
    assert lm.tokenizer.decode(placed.continuation).strip() == "Dravonia"


def test_streams_and_batches_tell_the_fact_that_is_like_the_question(model_path):
    options = {"edits": "bake", "data": str(RECORDS / "bake_qa.jsonl"), "editor": "ice", "editor_args": {}}
    stream = run(build(model_path, mode="sequential", **options), ["bake_es"])
    batch = run(build(model_path, mode="batch", **options), ["bake_es"])
    single = run(build(model_path, editor="ice", editor_args={}), ["bake_es"])
    assert_same_answers(answers(stream), answers(batch))
    # The edit prompts differ from one another, so each finds its own fact and the answers are those of single edits.
    assert_same_answers(answers(stream), answers(single))


def test_ordinary_questions_in_a_stream_are_asked_with_the_context_too(model_path):
    options = {"edits": "bake", "data": str(RECORDS / "bake_qa.jsonl"), "editor": "ice", "editor_args": {}}
    lm, plain = build(model_path, mode="sequential", num_edits=1, **options), build(model_path, mode="none")
    (request,) = lm.plan.groups[0]
    text = Delta(contexts=(ContextEdit(request.text, request.target_new),)).contexts[0].before()
    (told,) = lm.loglikelihood([instance({}, "Lake", " Omber")])
    (expected,) = plain.loglikelihood([instance({}, f"{text}Lake", " Omber")])
    assert told[0] == pytest.approx(expected[0], abs=1e-4) and told[1] == expected[1]
    settings = {"until": ["a"], "max_gen_toks": 5}
    (told,) = lm.generate_until([instance({}, "Lake", dict(settings), "generate_until")])
    (expected,) = plain.generate_until([instance({}, f"{text}Lake", dict(settings), "generate_until")])
    assert told == expected
    rolling = [instance({}, "Lake Omber lies far away.", None, "loglikelihood_rolling")]
    rolling[0].arguments = ("Lake Omber lies far away.",)
    assert lm.loglikelihood_rolling(rolling) == pytest.approx(plain.loglikelihood_rolling(rolling), abs=1e-4)


def test_saved_contexts_are_loaded_and_used(model_path, tmp_path):
    path = tmp_path / "told.safetensors"
    made("ice")[0].save(path)
    lm = build(model_path, load_edit=str(path), editor_args=None)
    (told,) = lm.loglikelihood([instance(case(unedited=False), "Port Elna is the capital of", " Dravonia")])
    own = build(model_path, editor="ice", editor_args={})
    (expected,) = own.loglikelihood([instance(case(unedited=False), "Port Elna is the capital of", " Dravonia")])
    assert told.final.logprob == pytest.approx(expected.final.logprob, abs=1e-6)
    assert lm.get_model_info()["edited_hf"]["editor_writes"] == ["context"]


# -- on top of another editor ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["fast", "reference"])
def test_icl_is_the_edited_model_after_the_text(model_path, engine):
    """Weights of the other editor, prompt of the context: the same as asking the longer prompt under the edit alone."""
    prompt, doc = "Port Elna is the capital of", case(unedited=False)
    options = {"editor": "r_rome", "engine": engine}
    both = build(model_path, icl="fact", **options)
    (answer,) = both.loglikelihood([instance(doc, prompt, " Dravonia")])
    (alone,) = build(model_path, **options).loglikelihood([instance(doc, f"{FACT}Prompt: {prompt}", " Dravonia")])
    assert answer.final.token_logprobs == pytest.approx(alone.final.token_logprobs, abs=1e-4)
    assert (
        answer.edit.editor == "r_rome+ice"
        and answer.edit.diagnostics["final_loss"] == alone.edit.diagnostics["final_loss"]
    )
    stamp = both.get_model_info()["edited_hf"]
    assert (
        stamp["editor"] == "r_rome+ice" and stamp["editor_writes"] == ["weights", "context"] and stamp["icl"] == "fact"
    )


def test_icl_and_its_controls_tell_what_their_names_say(model_path):
    told = {}
    for icl in (True, "fact", "demonstrations"):
        lm = build(model_path, icl=icl, icl_args=WORDS, editor="r_rome")
        (answer,) = lm.loglikelihood([instance(case(unedited=False), "Port Elna is the capital of", " Dravonia")])
        told[icl] = (answer.final.context.facts, answer.final.context.demonstrations + answer.final.context.left_out)
    assert told == {True: (1, 33), "fact": (1, 0), "demonstrations": (0, 32)}


def test_icl_in_a_stream_keeps_the_others_weights(model_path):
    options = {"mode": "sequential", "edits": "bake", "data": str(RECORDS / "bake_qa.jsonl"), "num_edits": 2}
    lm = build(model_path, icl="fact", **options)
    before = snapshot(lm.model, lm.tokenizer)
    found = answers(run(lm, ["bake_es"], limit=2))
    assert all(answer.final.context.facts == 1 for answer in found)
    torch.manual_seed(0)
    plain = build(model_path, **options)
    run(plain, ["bake_es"], limit=2)
    for ours, theirs in zip(lm.session.stream.deltas, plain.session.stream.deltas, strict=True):
        for name, update in ours.weights().items():
            torch.testing.assert_close(update, theirs.weights()[name])
    after = snapshot(lm.model, lm.tokenizer)
    before.pop("random state"), after.pop("random state")  # the harness seeds
    assert_same_state(before, after)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"icl": "maybe"}, "icl='maybe'"),
        ({"icl": True, "editor": "ice", "editor_args": None}, "a context already"),
        ({"icl": True, "mode": "none"}, "makes no edit"),
        ({"icl_args": {"seed": 1}}, "no meaning without icl"),
        ({"icl": True, "icl_args": {"embeder": "words"}}, "Did you mean 'embedder'"),
    ],
)
def test_wrong_combinations_are_refused(model_path, options, message):
    with pytest.raises(EditingError, match=message):
        build(model_path, **options)


def test_contexts_and_edits_are_stored_and_reused(model_path, tmp_path, monkeypatch):
    first = answers(run(build(model_path, tmp_path, icl="fact"), ["bake_es"], limit=2))
    monkeypatch.setattr("edit_hooks.editors.rome.ROME.compute", lambda *a: pytest.fail("made again"))
    assert_same_answers(first, answers(run(build(model_path, tmp_path, icl="fact"), ["bake_es"], limit=2)))
    assert not list(Path(tmp_path).rglob("*.pkl"))


def test_a_similarity_is_a_cosine():
    with pytest.raises(EditingError, match="min_similarity"):
        load_editor("ice", {"min_similarity": 20})
