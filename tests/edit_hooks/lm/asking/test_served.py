"""``server=``: a server answers under one adapter per edit, with the answers of this process."""

from __future__ import annotations

import json

import pytest
from adapter_server import adapter_server
from lm_runs import answers, assert_same_answers, build, run
from random_deltas import dense_delta, random_delta

from edit_hooks import EditingError
from edit_hooks.contract.tiny_models import save_tiny
from edit_hooks.inference.items import ScoreItem
from edit_hooks.lm.asking import served
from edit_hooks.lm.asking.server import Server
from edit_hooks.lm.options.editing import EditingOptions

TASKS = ["bake_es", "bake_ls"]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return str(save_tiny(tmp_path_factory.mktemp("tiny"), "llama"))


@pytest.fixture(scope="module")
def served_model(model_path):
    with adapter_server(model_path) as found:
        yield found


@pytest.mark.parametrize(("tasks", "data"), [(TASKS, "bake_qa.jsonl"), (["qaedit_wild_reliability"], "qaedit.jsonl")])
def test_answers_are_those_of_this_process(tasks, data, model_path, served_model, monkeypatch):
    server, url = served_model
    monkeypatch.setattr(served, "TOGETHER", 2)
    server.requests.clear()
    server.loaded.clear()
    settings = {"editor": "memit", "editor_args": {"layers": [0, 1], "second_moments": None, "num_steps": 6}}
    settings["editor_args"] |= {"context_templates": ["{}", "Then they said. {}"]}
    here = run(build(model_path, **settings), tasks, data, limit=3, log_samples=True)
    there = run(build(model_path, server=url, **settings), tasks, data, limit=3, log_samples=True)
    assert_same_answers(answers(here), answers(there))
    assert len(set(server.loaded)) == 3 and all(name.startswith("memit-") for name in server.loaded)
    assert not server.adapters  # all are unloaded
    models = {body["model"] for path, body in server.requests if path == "completions"}
    assert models - {server.base} == set(server.loaded)


def test_the_unedited_model_is_asked_by_its_name(model_path, served_model):
    server, url = served_model
    here = run(build(model_path, mode="none"), ["bake_es"], limit=2, log_samples=True)
    there = run(build(model_path, mode="none", server=url), ["bake_es"], limit=2, log_samples=True)
    assert_same_answers(answers(here), answers(there))
    assert {body["model"] for path, body in server.requests[-2:] if path == "completions"} == {server.base}


def test_a_rank_beyond_the_servers_limit_names_the_option(model_path):
    lora = {"editor": "lora", "editor_args": {"rank": 20, "num_steps": 1, "modules": ["rewrite"], "layers": [1]}}
    with adapter_server(model_path) as (server, url):
        with pytest.raises(EditingError, match=r"rank 16 is greater|rank 20 .*max-lora-rank 32"):
            run(build(model_path, server=url, **lora), ["bake_es"], limit=1)
        assert not server.adapters


def test_dense_edits_are_refused_with_what_helps(model_path, served_model):
    _, url = served_model
    with pytest.raises(EditingError, match="export --format merged"):
        run(build(model_path, server=url, editor="ft_m", editor_args={"num_steps": 1}), ["bake_es"], limit=1)


def test_nothing_is_loaded_if_a_later_edit_is_dense(model_path, served_model, tmp_path):
    server, url = served_model
    server.loaded.clear()
    lm = build(model_path, server=url)
    engine = served.ServedEngine(lm, lm.options, url)
    with pytest.raises(EditingError, match="export --format merged"):
        engine._load(tmp_path, [random_delta(lm.model), dense_delta(lm.model)], {})
    assert not server.loaded and not server.adapters


@pytest.mark.parametrize("loaded_before", [0, 1, 2])
def test_ctrl_c_leaves_no_adapter_behind(loaded_before, model_path, served_model, monkeypatch):
    """Also one between two adapters, and one that comes while the server loads."""
    server, url = served_model
    lm = build(model_path, server=url)
    engine, load = served.ServedEngine(lm, lm.options, url), Server.load

    def interrupted(self, name, folder):
        if len(server.adapters) == loaded_before:
            raise KeyboardInterrupt
        load(self, name, folder)
        if len(server.adapters) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(Server, "load", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.score([(ScoreItem((5,), (9,)), random_delta(lm.model, seed=seed)) for seed in range(3)])
    assert not server.adapters


def test_another_model_on_the_server_is_named(model_path, served_model, tmp_path, caplog):
    """Its adapters fit, so nothing else would tell."""
    _, url = served_model
    item = ScoreItem((5,), (9,))
    for seed in (0, 1):
        model = str(save_tiny(tmp_path / str(seed), "llama", seed=seed))
        lm = build(model, server=url, mode="none")
        served.ServedEngine(lm, lm.options, url).score([(item, None)])
        assert ("differs from that of pretrained=" in caplog.text) is bool(seed)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"editor": "grace"}, "changes more than weights"),
        ({"editor": "ike"}, "changes more than weights"),
        ({"icl": True}, "changes more than weights"),
        ({"mode": "sequential", "edits": "bake"}, "has no meaning in mode=sequential"),
    ],
)
def test_what_no_adapter_can_hold_is_refused_early(options, message):
    with pytest.raises(EditingError, match=message):
        EditingOptions(server="http://localhost:8000/v1", **options)


@pytest.mark.parametrize(
    ("path", "fault", "message"),
    [
        ("models", (200, "[]"), "no list 'data'"),
        ("models", (200, json.dumps({"data": [3]})), "lists no model"),
        ("models", (200, "<html>"), "reply of http"),
        ("completions", (200, json.dumps({"choices": []})), "0 choices"),
        ("completions", (200, json.dumps({"choices": [{}]})), "no list 'prompt_logprobs'"),
        ("completions", (200, json.dumps({"choices": [{"prompt_logprobs": [None]}]})), "1 prompt_logprobs for"),
        ("completions", (500, "out of memory"), r"refuses /completions \(500\): out of memory"),
    ],
)
def test_replies_of_another_kind_are_named(path, fault, message, served_model):
    server, url = served_model
    server.faults[path] = fault
    try:
        with pytest.raises(EditingError, match=message):
            client = Server(url)
            client.score(client.model(), [1, 2], [3])
    finally:
        server.faults.clear()


def test_a_token_without_its_log_probability_is_no_score(served_model):
    server, url = served_model
    server.faults["completions"] = (
        200,
        json.dumps({"choices": [{"prompt_logprobs": [None, {}, {"7": {"logprob": 0}}]}]}),
    )
    try:
        with pytest.raises(EditingError, match="without a token of the prompt"):
            Server(url).score("base", [1, 2], [3])
    finally:
        server.faults.clear()


def test_addresses_that_are_none():
    with pytest.raises(EditingError, match="an address like"):
        Server("localhost:8000")
    with pytest.raises(EditingError, match="cannot be reached"):
        Server("http://127.0.0.1:9/v1").model()
