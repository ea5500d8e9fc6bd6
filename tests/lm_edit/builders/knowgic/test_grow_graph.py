"""``lm-edit grow-graph`` with a scripted server: records of its graph, review, killed runs, plans, budgets, errors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from command_line import run_verb
from graph_world import REASONING, World, parse_prompt, write_seeds, write_wording
from judge_server import JudgeServer, ServerFault, serve
from paths import HELPERS, ROOT

from lm_edit.builders.facts import Fact
from lm_edit.builders.knowgic import growth as rules
from lm_edit.builders.knowgic.graph import read_graph
from lm_edit.builders.knowgic.review import triplet_id
from lm_edit.builders.knowgic.validation import UNKNOWN
from lm_edit.cli.main import main
from lm_eval_tasks.knowgic.benchmark import KNOWGIC


def serve_world(world: Any = None, delay: float = 0.0) -> Any:
    return serve(world or World(), delay, parse=lambda prompt: prompt)


def words_of(folder: Path, server: JudgeServer | None, *options: str, **changes: Any) -> list[str]:
    url = server.url if server else "http://127.0.0.1:9/v1"
    places = ["--out", str(folder / "graph.json"), "--store", str(folder / "store")]
    return ["grow-graph", str(write_seeds(folder, **changes)), "--writer", f"openai:w@{url}", *places, *options]


def test_the_graph_becomes_records(tmp_path: Path, capsys: Any) -> None:
    with serve_world() as server:
        assert main(words_of(tmp_path, server)) == 0
    printed = capsys.readouterr().out
    assert "chains of Ada Moss | school | Elmwood: 3" in printed and "these facts are unreviewed" in printed
    assert f"discarded, {UNKNOWN} (1): Ada Moss | friend | Zed Orr" in printed
    assert "facts: 7, after 3 rounds: all rounds are done" in printed
    graph = tmp_path / "graph.json"
    content = json.loads(graph.read_text(encoding="utf-8"))
    assert content["provenance"]["reviewed_by_people"] is False
    assert content["provenance"]["writer"]["max_reply_tokens"] == 512
    assert "questions about chains: 5, 0 of them answered with the last entity" in printed
    assert content["provenance"]["limits"]["chain_questions"] == 10
    assert content["provenance"]["chain_questions"][0] == {
        "chain": [["Ada Moss", "house", "Larkhall"], ["Larkhall", "home", "Elmwood"]],
        "question": "What is the home of the house of Ada Moss?",
        "problem": UNKNOWN,
    }
    assert len(read_graph(graph).facts) == 7
    chains = tmp_path / "chains.json"
    assert main(["build-knowgic", str(graph), "--out", str(chains)]) == 0
    (case,) = KNOWGIC.load({"data": str(chains)}).records
    assert sorted(len(chain) for chain in case.chains) == [1, 2, 2]
    assert case.chains[0][0].question == "What is the school of Ada Moss?"
    assert (case.request.text, case.request.target_new) == ("The school of Ada Moss is", "Oakridge")


def test_the_graphs_of_two_models_become_records(tmp_path: Path, capsys: Any) -> None:
    """The second model knows no house, but the friend, and words every question in another way."""

    def answer(question: str) -> str | None:
        if not question.startswith("Tell me: "):
            return None
        known = {"What is the friend of Ada Moss?": "Zed Orr.", "What is the house of Ada Moss?": "I do not know."}
        question = question.removeprefix("Tell me: ")
        return known.get(question) or World()(question)

    def reason(question: str) -> str:
        return "\n".join(REASONING[question.removeprefix("Tell me: ")])

    def word(texts: Any) -> str:
        return write_wording(*texts).replace('"question": "', '"question": "Tell me: ')

    graphs = []
    for name, world in (("one", World()), ("two", World({"question": answer, "reasoning": reason, "wording": word}))):
        folder = tmp_path / name
        folder.mkdir()
        with serve_world(world) as server:
            words = [text.replace("openai:w@", f"openai:{name}@") for text in words_of(folder, server, "--rounds", "1")]
            assert main(words) == 0
        graphs.append(str(folder / "graph.json"))
    chains = tmp_path / "chains.json"
    capsys.readouterr()
    assert main(["build-knowgic", *graphs, "--out", str(chains), "--context", "graph"]) == 0
    printed = capsys.readouterr().out
    assert f"{graphs[0]} (one): 4 facts, 4 of them joined, 1 in no other graph" in printed
    assert f"{graphs[1]} (two): 4 facts, 4 of them joined, 1 in no other graph" in printed
    assert "facts: 5, 3 in all graphs" in printed and "relations, worded otherwise in an earlier graph (3)" in printed
    (record,) = json.loads(chains.read_text(encoding="utf-8"))
    held = {one["fact"][1]: one["graphs"] for one in record["provenance"]["facts"]}
    assert held["house"] == graphs[:1] and held["school"] == graphs
    assert [one["writer"]["model"] for one in record["provenance"]["graphs"]] == ["one", "two"]
    assert KNOWGIC.load({"data": str(chains)}).records


def test_a_review_on_the_command_line(tmp_path: Path, capsys: Any) -> None:
    review, graph = tmp_path / "review.jsonl", tmp_path / "graph.json"
    with serve_world() as server:
        words = words_of(tmp_path, server, "--review", str(review))
        assert main(words) == 0
        printed = capsys.readouterr().out
        assert f"round 1: 3 triplets wait for a decision in {review}, 3 of them new" in printed
        assert "also listed: 1 triplets that failed validation, with keep: false, and 0 failed questions" in printed
        rows = rows_of(review)
        house = next(row for row in rows if row["object"] == "Larkhall")
        assert house["id"] == triplet_id(Fact("Ada Moss", "house", "Larkhall"))
        assert {**house, "id": None} == {
            "id": None, "round": 1, "subject": "Ada Moss", "relation": "house", "object": "Larkhall", "keep": None,
            "question": "What is the house of Ada Moss?", "response": "Larkhall!",
            "sentence": "Ada Moss lives in the house Larkhall.",
        }  # fmt: skip
        assert {**rows[3], "id": None} == {
            "id": None, "round": 1, "subject": "Ada Moss", "relation": "friend", "object": "Zed Orr", "keep": False,
            "question": "What is the friend of Ada Moss?", "statement": "The friend of Ada Moss is Zed Orr",
            "response": "I do not know.", "sentence": "Ada Moss is a friend of Zed Orr.", "problem": UNKNOWN,
        }  # fmt: skip
        before, num_requests = review.read_bytes(), sum(server.requests.values())
        assert main(words) == 0 and not graph.exists()  # nothing was decided
        assert review.read_bytes() == before and sum(server.requests.values()) == num_requests
        numbers = []
        for _ in range(4):
            text = review.read_text(encoding="utf-8").replace('"keep": null', '"keep": true').rstrip("\n")
            review.write_text(text, encoding="utf-8")  # without its last line feed
            assert main(words) == 0
            rows = rows_of(review)
            numbers.append([sum("chain" in row for row in rows), sum("chain" not in row for row in rows)])
            if graph.exists():
                break
        # Round 2: two triplets and a chain; round 3: a triplet and four chains; then the graph is written.
        assert numbers == [[1, 6], [5, 7], [5, 7]]
        assert max(server.requests.values()) == 1
    content = json.loads(graph.read_text(encoding="utf-8"))
    assert len(content["facts"]) == 7 and content["provenance"]["reviewed_by_people"] is True
    printed = capsys.readouterr().out
    assert "unreviewed" not in printed and "without effect" not in printed and "wordings" not in content


def rows_of(review: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in review.read_text(encoding="utf-8").splitlines()]


def change_rows(review: Path, change: Any) -> None:
    """Rewrite each line of a review after a function has changed it; undecided ones become true."""
    rows = rows_of(review)
    for row in rows:
        if row.get("keep", 0) is None:
            row["keep"] = True
        change(row)
    review.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")


def test_people_correct_a_triplet_and_give_other_questions(tmp_path: Path, capsys: Any) -> None:
    """The friend gets another question, a chain too; the file has both wordings, and a record is made of it."""
    friend, chain = "Who is Ada Moss fond of?", "Where does the house of Ada Moss belong?"

    def answer(question: str) -> str | None:
        return {friend: "Zed Orr, I hear.", chain: "To Elmwood."}.get(question)

    def reason(question: str) -> str | None:
        return "Elmwood has the mascot Otter." if question == chain else None

    def extract(sentence: str) -> str | None:
        return '[["Elmwood", "mascot", "Otter"]]' if "Otter" in sentence else None

    def change(row: dict[str, Any]) -> None:
        if row.get("object") == "Zed Orr":
            row |= {"question": friend, "statement": "Ada Moss is fond of Zed Orr.", "keep": True}
        if [fact[1] for fact in row.get("chain", ())] == ["house", "home"]:
            row["question"] = chain

    review, graph = tmp_path / "review.jsonl", tmp_path / "graph.json"
    with serve_world(World({"question": answer, "reasoning": reason, "extraction": extract})) as server:
        words = words_of(tmp_path, server, "--review", str(review), "--rounds", "2")
        for _ in range(5):
            assert main(words) == 0
            if graph.exists():
                break
            change_rows(review, change)
        assert max(server.requests.values()) == 1
    content = json.loads(graph.read_text(encoding="utf-8"))
    assert ["Ada Moss", "friend", "Zed Orr"] in content["facts"]
    assert content["relations"]["friend"] == {"prompt": "{} is fond of", "question": "Who is {} fond of?"}
    described = {tuple(one["fact"]): one for one in content["provenance"]["facts"]}
    assert described["Ada Moss", "friend", "Zed Orr"]["question_from"] == "people"
    assert "question_from" not in described["Ada Moss", "house", "Larkhall"]
    assert not any("Zed Orr" in one["fact"] for one in content["provenance"]["discarded"])
    assert {"question": chain, "problem": None}.items() <= next(
        one for one in content["provenance"]["chain_questions"] if len(one["chain"]) == 2
    ).items()
    # The reasoning about that question brought a triplet, which was listed and is not known.
    assert ["Elmwood", "mascot", "Otter"] in [one["fact"] for one in content["provenance"]["discarded"]]
    assert any(row.get("object") == "Otter" and row["keep"] is False for row in rows_of(review))
    assert "without effect" not in capsys.readouterr().out


def test_corrections_without_effect_are_counted(tmp_path: Path, capsys: Any) -> None:
    review = tmp_path / "review.jsonl"
    with serve_world() as server:
        words = words_of(tmp_path, server, "--review", str(review), "--rounds", "1")
        assert main(words) == 0
        for change in ({"object": "Bo Reed"}, {"keep": True}):
            rows = rows_of(review)
            change_rows(review, lambda row, change=change: row.update(change) if "problem" in row else None)
            assert main([*words, "--overwrite"]) == 0
            assert "keep: true without a correction): 1" in capsys.readouterr().out
            review.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")


def test_a_killed_run_goes_on(tmp_path: Path) -> None:
    alone = tmp_path / "alone"
    alone.mkdir()
    with serve_world() as server:
        assert main(words_of(alone, server)) == 0
        num_prompts = len(server.requests)
    with serve_world(delay=0.05) as server:
        words = words_of(tmp_path, server)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HELPERS), str(ROOT)])}
        process = subprocess.Popen(
            [sys.executable, "-m", "lm_edit.cli.main", *words],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        deadline = time.monotonic() + 120
        while len(server.replies) < 9 and time.monotonic() < deadline:
            time.sleep(0.005)
        process.kill()
        process.communicate()
        time.sleep(0.2)
        num_replies = sum(server.replies.values())
        assert 9 <= num_replies < num_prompts and not (tmp_path / "graph.json").exists()
        assert main(words) == 0
        assert len(server.requests) == num_prompts
        assert sum(server.replies.values()) <= num_prompts + 8  # those in flight
        again = sum(server.requests.values())
        assert main([*words, "--overwrite"]) == 0 and sum(server.requests.values()) == again
    graphs = [json.loads((folder / "graph.json").read_text(encoding="utf-8")) for folder in (alone, tmp_path)]
    for graph in graphs:
        graph["provenance"].pop("writer")  # the address of the server
    assert graphs[0] == graphs[1]


def test_a_dry_run_shows_the_next_requests(tmp_path: Path, capsys: Any) -> None:
    with serve_world() as server:
        words = words_of(tmp_path, server)
        assert main([*words, "--dry-run"]) == 0 and not server.requests
        printed = capsys.readouterr().out
        assert "round 0, validation of 1 triplets (1 the first of their relation): at least 1 requests" in printed
        assert "1 requests, 1 distinct, 0 in the store: 1 calls" in printed and 'Fact: \\u005b"Ada Moss"' not in printed
        assert '  Fact: ["Ada Moss", "school", "Elmwood"]' in printed and "depends on the replies" in printed
        assert run_verb([*words, "--max-calls", "5"]) == 2
        assert main([*words, "--dry-run"]) == 0
        assert "round 1, extraction: at least 6 requests, then one for each new triplet" in capsys.readouterr().out
        assert len(server.requests) == 3 and not (tmp_path / "graph.json").exists()
        assert main(words) == 0
        num_requests = sum(server.requests.values())
        review = ["--review", str(tmp_path / "review.jsonl")]
        assert main([*words, *review, "--overwrite", "--dry-run"]) == 0 and not (tmp_path / "review.jsonl").exists()
        assert f"the store has all replies: {rules.WAITING}" in capsys.readouterr().out
        assert sum(server.requests.values()) == num_requests


def test_the_budget_is_that_of_all_steps(tmp_path: Path, capsys: Any) -> None:
    with serve_world() as server:
        assert run_verb([*words_of(tmp_path, server), "--max-calls", "8"]) == 2
        assert "the next step needs 6 requests" in capsys.readouterr().err and len(server.requests) == 3
        runs = 1
        while run_verb([*words_of(tmp_path, server), "--max-calls", "8"]) == 2:
            runs += 1
            assert runs < 20
        assert max(server.requests.values()) == 1 and (tmp_path / "graph.json").exists()


def test_a_server_that_fails_ends_the_run(tmp_path: Path, capsys: Any) -> None:
    def fail(prompt: str, attempt: int) -> Any:
        return ServerFault(401) if parse_prompt(prompt)[0] == "extraction" else World()(prompt)

    with serve_world(fail) as server:
        assert run_verb(words_of(tmp_path, server)) == 2
    assert "the writer cannot be used: the key was not accepted" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seeds": []}, "'seeds' must be a list with entries [subject, relation, object, new object]"),
        ({"seeds": [["Ada", "school", "Elm"]]}, "4 texts are needed"),
        ({"seeds": [["Ada", "school", "Elm", 3]]}, "4 texts are needed"),
        ({"seeds": [["Ada", "school", "Elmwood", "Elm College"]]}, "changes 'Elmwood' to itself"),
        ({"seeds": [["Ada", "school", "Elm", "Oak"], ["Ada", "school", "Fir", "Oak"]]}, "a second object"),
        ({"seeds": [["Ada", "school", "Elm", "Oak"], ["Ada", "house", "Elm", "Oak"]]}, "a second time"),
        ({"seeds": [["Elm School", "town", "Elm", "Oak"]]}, "has the object in its subject"),
        ({"seeds": [["Ada {}", "town", "Elm", "Oak"]]}, "without brackets is needed"),
        ({"facts": [["Ada Moss", "school", "Pine"]]}, "a second object"),
        ({"facts": [["Ada Moss", "attended", "Elm College"]]}, "a second time"),
        ({"facts": [["Ada Moss", "attended"]]}, "three texts are needed"),
        ({"fact": []}, "Did you mean 'facts'"),
        ({"aliases": {"St. Elm": "Elm"}}, "a list of texts is needed"),
        ({"aliases": ["Elm"]}, "must be an object"),
        ({"relations": {"school": {"prompt": "{} is", "question": "Where?"}}}, "one {} for the subject"),
    ],
)
def test_bad_seeds_are_errors_before_any_request(changes: Any, message: str, tmp_path: Path, capsys: Any) -> None:
    assert run_verb(words_of(tmp_path, None, **changes)) == 2
    error = capsys.readouterr().err
    assert message in error and "seeds.json" in error and not (tmp_path / "graph.json").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--max-facts", "1"], "max_facts=1 is less than the 2 given triplets"),
        (["--review", "{folder}/graph.json"], "also the path of the graph"),
        (["--review", "{folder}/seeds.json"], "is a file of the input"),
        (["--review", "{folder}/r.jsonl", "--store", "off"], "--review needs stored replies"),
        (["--writer", "em"], "a writer is named as a judge is"),
        (["--writer", "hf:no/such-model-at-all"], "writer hf:no/such-model-at-all cannot be loaded"),
    ],
)
def test_bad_options_are_errors(options: list[str], message: str, tmp_path: Path, capsys: Any) -> None:
    filled = [option.replace("{folder}", str(tmp_path)) for option in options]
    assert run_verb([*words_of(tmp_path, None, facts=[["Elmwood", "town", "Fenn"]]), *filled]) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "graph.json").exists()
