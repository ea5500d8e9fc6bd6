"""The authors' judge prompt: read from their file at run time, with the slots filled as their code does."""

from __future__ import annotations

import dataclasses
import hashlib
import re
from pathlib import Path

import pytest
from file_server import serve_files

from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.storage import pinned_file
from judges import published_wording
from judges.base import Item
from judges.model.factory import make_model_judge
from judges.prompt import PROMPT_FOLDER, load_prompt
from judges.published_wording import SOURCE

# A module with the layout of the released one, in invented words.
MODULE = '''
def llm_judge(question, ground_truth, prediction, api_key):
    content_template = """
Compare.
```
Asked: {question}
Wanted: {target}
Given: {predicted_answer}
```
A or B?
    """.strip()
    other = """not this""".strip()
'''


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Serve the invented module in the place of the released one."""
    content = MODULE.encode()
    source = dataclasses.replace(SOURCE, sha256=hashlib.sha256(content).hexdigest())
    monkeypatch.setattr(published_wording, "SOURCE", source)
    monkeypatch.setenv("LM_EDIT_CACHE", str(tmp_path))
    source.cached.parent.mkdir(parents=True)
    source.cached.write_bytes(content)


@pytest.mark.usefixtures("module")
def test_slots_are_filled_without_quoting() -> None:
    prompt = load_prompt("published_wording")
    assert (prompt.name, prompt.quoting, prompt.system) == ("published_wording", "raw", None)
    (message,) = prompt.chat(Item("Who {gold}?", 'the "Rhine"', "{question}\nB"))
    filled = 'Compare.\n```\nAsked: Who {gold}?\nWanted: the "Rhine"\nGiven: {question}\nB\n```\nA or B?'
    assert message == {"role": "user", "content": filled}


@pytest.mark.usefixtures("module")
def test_the_preset_judges_with_it_under_a_name_and_hash_of_its_own() -> None:
    ours = make_model_judge({"preset": "published_setting", "store": "off"}).describe()
    theirs = make_model_judge({"preset": "published_wording", "store": "off"}).describe()
    assert (ours["prompt"], theirs["prompt"]) == ("correctness_v1", "published_wording")
    assert ours["prompt_hash"] != theirs["prompt_hash"]
    assert {key for key in ours if ours[key] != theirs[key]} == {"prompt", "prompt_hash"}


def test_without_a_network_the_judge_fails_before_it_judges(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LM_EDIT_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(EditingError, match=r"evaluate_utils\.py is not in the cache"):
        make_model_judge("published_wording")


def test_a_changed_layout_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    content = b"content_template = 'x'"
    source = dataclasses.replace(SOURCE, sha256=hashlib.sha256(content).hexdigest())
    monkeypatch.setattr(published_wording, "SOURCE", source)
    monkeypatch.setenv("LM_EDIT_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with serve_files({f"{source.repository}/{source.commit}/{source.path}": content}) as server:
        monkeypatch.setattr(pinned_file, "HOST", server.url)
        with pytest.raises(EditingError, match="holds no text between"):
            load_prompt("published_wording")


def test_the_source_is_pinned_and_its_words_are_not_here() -> None:
    assert re.fullmatch(r"[0-9a-f]{40}", SOURCE.commit) and re.fullmatch(r"[0-9a-f]{64}", SOURCE.sha256)
    assert not (PROMPT_FOLDER / "published_wording.txt").exists()
