"""BIRD: its terms against full forward passes in float64, its relation phrases, and bad requests."""

from __future__ import annotations

import csv
import dataclasses
import json

import pytest
import torch
from editor_settings import BIRD_CONFIG, ROME_CONFIG
from lm_runs import build, run
from paths import REAL_DATA, RECORDS, ROOT
from record_files import write_jsonl
from tiny_architectures import ARCHITECTURES

from edit_hooks import EditingError, EditRequest, load_editor
from edit_hooks.contract.tiny_models import CONTEXT_TEMPLATES, NATURAL_TOKENIZER, REQUESTS, build_model, build_tokenizer
from edit_hooks.editors import bird
from edit_hooks.editors.bird import BIRDTerm, phrase_table
from edit_hooks.lm.editing.independent import IndependentEdits
from edit_hooks.locate.value_editor import forward_maker
from edit_hooks.modeling.fingerprint.identity import model_identity
from edit_hooks.store.store import Store

EDITS = [EditRequest(**record) for record in REQUESTS]
# No float32 anywhere on the way, so both sides agree to rounding.
MODEL_TYPES = ["gpt2", "gemma3_text"]
RELATION_IDS = REAL_DATA.parent / "spec" / "bird-relations.csv"


def wide(model_type: str):
    return build_model(model_type, dtype=torch.float64), build_tokenizer(NATURAL_TOKENIZER[model_type])


def config_of(model, **settings):
    return load_editor("bird", {**BIRD_CONFIG, "alpha": 0.3, "beta": 0.7, **settings}).default_config(model)


def distance(ours, theirs) -> float:
    first, second = ours.weights(), theirs.weights()
    return max(float((first[name] - second[name]).norm() / second[name].norm()) for name in second)


def mean_state(model, tokenizer, name: str, span: str, text: str, expression: str, offset_D=None) -> torch.Tensor:
    """Mean last hidden state over the last words of a text; the offset joins the MLP output at its last token."""
    encoding = tokenizer(text, return_offsets_mapping=True)
    start = len(text) - len(expression)
    tokens = [i for i, (a, b) in enumerate(encoding["offset_mapping"]) if b > start and a < b]
    if span == "released":
        tokens = list(range(len(encoding["input_ids"])))[-len(tokenizer.tokenize(expression)) :]

    def add(_module, _args, output):
        if offset_D is None:
            return output
        shift = torch.zeros_like(output)
        shift[0, tokens[-1]] = 1
        return output + shift * offset_D

    handle = model.get_submodule(name).register_forward_hook(add)
    try:
        hidden = model(torch.tensor([encoding["input_ids"]]), output_hidden_states=True).hidden_states[-1]
    finally:
        handle.remove()
    return hidden[0, tokens].mean(0)


def bracket(model, tokenizer, name: str, span: str, request, template: str, offset_D, beta: float) -> torch.Tensor:
    """L1 + L2 - beta (L3 + L4) of one context, from the paper's equations."""
    before = template.removesuffix("{}")
    forward, backward = phrase_table()[request.relation_id]

    def state(expression: str, offset=None) -> torch.Tensor:
        return mean_state(model, tokenizer, name, span, before + expression, expression, offset)

    subject = state(request.subject, offset_D)
    r, inverse = state(forward), state(backward)

    def pair(o: torch.Tensor) -> torch.Tensor:
        return (subject + r - o).norm() + (o + inverse - subject).norm()

    return pair(state(request.target_new)) - beta * pair(state(request.target_true))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("engine", ["fast", "reference"])
@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("span", ["released", "covering"])
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_terms_match_the_equations_of_the_paper(model_type, span, reduction, engine):
    """Value and gradient for all edits at once, and after some have finished."""
    model, tokenizer = wide(model_type)
    config = config_of(model, engine=engine, template_reduction=reduction, token_span=span)
    name = ARCHITECTURES[model_type].mlp_name(1)
    generator = torch.Generator().manual_seed(1)
    delta_ED = torch.randn(len(EDITS), 32, dtype=torch.float64, generator=generator).requires_grad_(True)
    wanted_E = torch.stack(
        [
            0.3 * sum(bracket(model, tokenizer, name, span, request, text, offset_D, 0.7) for text in CONTEXT_TEMPLATES)
            for request, offset_D in zip(EDITS, delta_ED, strict=True)
        ]
    )
    if reduction == "mean":
        wanted_E = wanted_E / len(CONTEXT_TEMPLATES)
    term = BIRDTerm(model, tokenizer, EDITS, config, forward_maker(model, config, 1, "mlp"))
    ours_E = term.loss(delta_ED, 0)
    torch.testing.assert_close(ours_E, wanted_E, rtol=1e-8, atol=1e-10)
    (theirs,) = torch.autograd.grad(wanted_E.sum(), delta_ED)
    torch.testing.assert_close(torch.autograd.grad(ours_E.sum(), delta_ED)[0], theirs, rtol=1e-7, atol=1e-10)
    keep = torch.tensor([False, True, True, False])
    term.select(keep)
    torch.testing.assert_close(term.loss(delta_ED[keep], 1), wanted_E[keep], rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("model_type", ["gpt2", "gemma3_text"])
def test_zero_alpha_is_rome_and_engines_agree(model_type):
    model, tokenizer = wide(model_type)
    rome = load_editor("rome", ROME_CONFIG).edit(model, tokenizer, EDITS)
    weightless = load_editor("bird", {**ROME_CONFIG, "alpha": 0.0}).edit(model, tokenizer, EDITS)
    assert all(distance(a, b) == 0 for a, b in zip(weightless, rome, strict=True))
    fast = load_editor("bird", {**ROME_CONFIG, "alpha": 0.02}).edit(model, tokenizer, EDITS)
    slow = load_editor("bird", {**ROME_CONFIG, "alpha": 0.02, "engine": "reference"}).edit(model, tokenizer, EDITS)
    for ours, theirs, without in zip(fast, slow, rome, strict=True):
        assert distance(ours, theirs) < 1e-7 < 1e-3 < distance(ours, without)
    (alone,) = load_editor("bird", {**ROME_CONFIG, "alpha": 0.02}).edit(model, tokenizer, EDITS[2:3])
    assert distance(alone, fast[2]) < 1e-7
    both = {**ROME_CONFIG, "alpha": 0.02, "evk_align": True}
    (delta,) = load_editor("bird", both).edit(model, tokenizer, EDITS[:1])
    assert {"bird", "evk"} <= set(delta.diagnostics["losses"][0])


def test_early_stop_ignores_the_bidirectional_terms():
    model, tokenizer = wide("gpt2")
    settings = {**ROME_CONFIG, "num_steps": 15, "context_templates": ["{}"]}
    (plain,) = load_editor("rome", settings).edit(model, tokenizer, EDITS[1:2])
    losses = [record["loss"] for record in plain.diagnostics["losses"]]
    bound = (losses[0] + losses[-1]) / 2
    assert losses[-1] < bound - 0.05
    settings |= {"alpha": 0.02, "beta": 0.0, "num_steps": 40, "early_stop_loss": bound}
    (delta,) = load_editor("bird", settings).edit(model, tokenizer, EDITS[1:2])
    before, last = delta.diagnostics["losses"][-2:]
    assert delta.diagnostics["stop_reason"] == "loss"
    assert last["loss"] == pytest.approx(sum(last[part] for part in ("nll", "kl", "weight_decay", "bird")))
    assert last["loss"] - last["bird"] < bound < min(last["loss"], before["loss"] - before["bird"])


def test_every_relation_of_the_benchmarks_has_phrases():
    """The embedded sample, the test records, and the benchmarks' relations as far as they are known."""
    used = set()
    for path in [*ROOT.glob("lm_eval_tasks/*/data/*.jsonl"), *ROOT.glob("tests/records/*.json*")]:
        text = path.read_text(encoding="utf-8")
        rows = json.loads(text) if path.suffix == ".json" else [json.loads(line) for line in text.splitlines()]
        for row in rows if isinstance(rows, list) else []:
            rewrites = row.get("requested_rewrite", []) if isinstance(row, dict) else []
            for rewrite in rewrites if isinstance(rewrites, list) else [rewrites]:
                used.add(rewrite.get("relation_id"))
    assert {"capital_of", "P50"} <= used
    counterfact = "17 19 20 27 30 36 37 39 101 103 106 108 127 131 136 138 140 159 176 178 190 264 276 364 407 413 449"
    counterfact += " 463 495 641 740 937 1303 1412"
    mquake = "6 17 19 20 26 27 30 35 36 37 40 50 69 106 108 112 127 131 136 140 159 169 170 175 176 178 190 264 276 286"
    mquake += " 364 407 413 449 463 488 495 641 740 800 937 1037 1308 1412"
    used |= {f"P{number}" for number in f"{counterfact} {mquake} 38 1376".split()}
    assert not (used - {None}) - phrase_table().keys()


# The ids of BAKE's records, as its release lists them: Wikidata properties, and inverses of some of them.
BAKE_NUMBERS = [
    26,
    35,
    36,
    37,
    38,
    39,
    47,
    50,
    86,
    103,
    108,
    110,
    112,
    119,
    162,
    169,
    176,
    185,
    190,
    277,
    287,
    355,
    530,
]
BAKE_NUMBERS += [530, 634, 749, 1327, 1429, 1589, 2389]
INVERSE_NUMBERS = [37, 39, 50, 86, 103, 108, 110, 112, 119, 162, 176, 277, 287, 749, 1589, 2389]
BAKE_IDS = {f"P{number}" for number in BAKE_NUMBERS} | {f"re_P{number}" for number in INVERSE_NUMBERS}


def test_every_relation_of_bake_has_phrases():
    assert len(BAKE_IDS) == 45
    assert not BAKE_IDS - phrase_table().keys()
    assert phrase_table()["re_P50"] == ["is the author of", "was written by"]


@pytest.mark.skipif(not RELATION_IDS.exists(), reason="the list of BAKE's relation ids is not on this machine")
def test_the_ids_are_those_of_the_release():
    with RELATION_IDS.open(encoding="utf-8") as file:
        released = {row["relation_id"] for row in csv.DictReader(file)}
    assert released == BAKE_IDS


def test_every_table_entry_is_two_phrases():
    for relation, phrases in phrase_table().items():
        assert len(phrases) == 2 and all(isinstance(p, str) and p == p.strip() and p for p in phrases), relation


def test_another_phrase_table_is_another_stored_edit(monkeypatch, tmp_path):
    """An edit made with the old phrases must not be loaded for the new ones."""
    model, tokenizer = wide("gpt2")
    editor = load_editor("bird", {**BIRD_CONFIG, "num_steps": 3})

    def make_edit():
        identity = model_identity(model, tokenizer)
        edits = IndependentEdits(
            model, tokenizer, type(editor)(editor.overrides), Store(tmp_path), identity, quiet=True
        )
        (delta,) = edits.in_order([(EDITS[0],)])
        return delta

    first = make_edit()
    assert make_edit().checksum() == first.checksum()
    table = dict(phrase_table())
    table[EDITS[0].relation_id] = ["is governed from", "governs"]
    monkeypatch.setattr(bird, "phrase_table", lambda wording: table)
    assert make_edit().checksum() != first.checksum()


def test_incomplete_requests_are_refused():
    model, tokenizer = wide("llama")
    bare = dict(REQUESTS[0], case_id="12")

    def refused(match: str, settings=None, **changes):
        request = EditRequest(**{**bare, **changes})
        with pytest.raises(EditingError, match=match):
            load_editor("bird", {**BIRD_CONFIG, **(settings or {})}).edit(model, tokenizer, [request])

    refused(r"case 12 .*no 'relation_id'.*r_rome", relation_id=None)
    refused(r"no phrases are known for relation 'capital_off'.*Did you mean 'capital_of'", relation_id="capital_off")
    refused(r"no phrases .*'P999999'.*relation_phrases", relation_id="P999999")
    refused(r"no 'target_true'.*beta: 0", target_true=None)
    with pytest.raises(EditingError, match="two phrases"):
        load_editor("bird", {"relation_phrases": {"P1": ["is"]}})
    own = {"relation_phrases": {"P999999": ["was first sung in", "is where one first sang"]}, "beta": 0.0}
    request = dataclasses.replace(EDITS[0], relation_id="P999999", target_true=None)
    (delta,) = load_editor("bird", {**BIRD_CONFIG, **own}).edit(model, tokenizer, [request])
    assert delta.diagnostics["losses"][0]["bird"] > 0


@pytest.fixture
def released_table(monkeypatch, tmp_path):
    """A file in the layout of the release, in place of the download."""
    path = tmp_path / "const.py"
    path.write_text("table={\n'P36': ['has it',\"is it\"],\n'P1327': ['works beside',\"\"],\n}\n", encoding="utf-8")
    monkeypatch.setattr(bird.PinnedFile, "fetch", lambda self: path)
    bird._released_phrases.cache_clear()
    yield {"P36": ["has it", "is it"], "P1327": ["works beside", ""]}
    bird._released_phrases.cache_clear()


def test_the_released_wording_is_another_table(released_table):
    assert phrase_table("released") == released_table
    model, tokenizer = wide("gpt2")
    request = dataclasses.replace(EDITS[0], relation_id="P36")
    settings = {**BIRD_CONFIG, "num_steps": 3, "alpha": 0.05}
    own, released = (
        load_editor("bird", {**settings, "wording": wording}).edit(model, tokenizer, [request])[0]
        for wording in ("own", "released")
    )
    assert distance(own, released) > 1e-4
    assert own.meta["config"]["phrase_table_digest"] != released.meta["config"]["phrase_table_digest"]


def test_an_empty_phrase_of_the_release_is_refused(released_table):
    model, tokenizer = wide("gpt2")
    request = dataclasses.replace(EDITS[0], relation_id="P1327")
    with pytest.raises(EditingError, match=r"'P1327' has an empty phrase.*wording: own"):
        load_editor("bird", {**BIRD_CONFIG, "wording": "released"}).edit(model, tokenizer, [request])


@pytest.mark.parametrize("mode", ["single", "sequential"])
def test_a_record_with_an_empty_phrase_leaves_the_others_edited(mode, released_table, tiny_path, tmp_path):
    """Also as the first step of a stream, before any edit has shown that the settings work."""
    records = [json.loads(line) for line in (RECORDS / "bake_qa.jsonl").read_text(encoding="utf-8").splitlines()[:2]]
    for record, relation in zip(records, ["P1327", "P36"], strict=True):
        record["requested_rewrite"]["relation_id"] = relation
    data = str(write_jsonl(tmp_path / "bake.jsonl", records))
    stream = {"mode": mode, "edits": "bake", "data": data} if mode == "sequential" else {}
    settings = {"context_templates": ["{}"], "num_steps": 2, "wording": "released"}
    lm = build(str(tiny_path("gpt2")), editor="bird", editor_args=settings, **stream)
    refused, edited = run(lm, ["bake_es"], data)["samples"]["bake_es"]
    assert (
        "'P1327' has an empty phrase" in refused["unscored_reason"]["efficacy_prob"]
        and refused["efficacy_prob"] is None
    )
    assert edited["efficacy_prob"] is not None and not edited["unscored_reason"]
