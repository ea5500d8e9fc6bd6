"""Commands in all Markdown files exist as they are written: verbs, flags, options, settings, tasks, scripts.

`test_readme.py` runs those of the README; the others need data, keys or hours, so they are parsed.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import re
import shlex
import subprocess

import pytest
import yaml
from lm_eval.models.huggingface import HFLM
from paths import ROOT

from edit_hooks.base.registry import EDITORS, editor_class
from edit_hooks.lm.model import OWN_OPTIONS
from judges.settings import read_settings
from lm_edit.cli.main import build_parser
from lm_eval_tasks.common.records.benchmark import all_benchmarks
from lm_eval_tasks.common.settings import COMMON_SETTINGS

TRACKED = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=False).stdout
# The changelog also quotes what is gone. Without git (an unpacked archive) all files are read.
FILES = [ROOT / name for name in TRACKED.split()] or sorted(ROOT.rglob("*.md"))
FILES = [path for path in FILES if path.name != "CHANGELOG.md"]
FENCED = re.compile(r"^ *```(\w*)\n(.*?)^ *```", flags=re.DOTALL | re.MULTILINE)
TASKS = {
    str(config[key])
    for path in (ROOT / "lm_eval_tasks").glob("*/*.yaml")
    for config in [yaml.safe_load(path.read_text(encoding="utf-8").replace("!function", ""))]
    for key in ("task", "group")
    if isinstance(config.get(key), str)
}
SETTINGS = {setting.name for benchmark in all_benchmarks().values() for setting in benchmark.declared_settings}
SETTINGS |= {setting.name for setting in COMMON_SETTINGS}
ELSEWHERE = {"mmlu", "..."}  # tasks of lm-eval itself, and a placeholder


def commands(program: str) -> list[str]:
    """Full command lines in fenced blocks, without comments."""
    found = []
    for path in FILES:
        for language, block in FENCED.findall(path.read_text(encoding="utf-8")):
            lines = block.replace("\\\n", " ").splitlines() if language in ("", "bash") else []
            found += [line.split(" #")[0].strip() for line in lines if line.strip().startswith(f"{program} ")]
    return sorted(set(found))


def mentions(program: str) -> list[str]:
    """Commands between backticks."""
    texts = [path.read_text(encoding="utf-8") for path in FILES]
    return sorted({quoted for text in texts for quoted in re.findall(rf"`({program} [^`]+)`", text)})


def words_of(command: str) -> list[str]:
    filled = command.replace("'$(hostname)'", "localhost").replace("'$PORT'", "8000")  # what a shell puts there
    return shlex.split(filled.replace("<", "").replace(">", ""))


@pytest.mark.parametrize("command", commands("lm-edit"))
def test_lm_edit_commands_parse(command: str) -> None:
    words = words_of(command)[1:]
    try:
        parsed = build_parser().parse_args(words)
    except SystemExit:
        pytest.fail(f"not accepted: {command}")
    assert parsed.verb == words[0]


@pytest.mark.parametrize("command", mentions("lm-edit"))
def test_mentioned_verbs_and_flags_exist(command: str) -> None:
    _, verb, *words = words_of(command)
    subparsers = next(action for action in build_parser()._actions if action.dest == "verb")
    flags = {flag for action in subparsers.choices[verb]._actions for flag in action.option_strings}
    assert {word for word in words if word.startswith("--")} <= flags


@pytest.mark.parametrize("command", [*commands("lm_eval"), *mentions("lm_eval --model edited_hf")])
def test_lm_eval_commands_name_what_exists(command: str) -> None:
    words = words_of(command)
    if "--tasks" in words:
        assert set(words[words.index("--tasks") + 1].split(",")) <= TASKS | ELSEWHERE
    if "--metadata" in words:
        given = words[words.index("--metadata") + 1]
        pairs = [part.split("=", 1) for part in given.split(",")]
        settings = json.loads(given) if given.startswith("{") else dict(pairs)
        assert set(settings) <= SETTINGS, set(settings) - SETTINGS
        assert "judge" not in settings or read_settings(settings["judge"])
    if "--model_args" in words:
        accepted = {*OWN_OPTIONS, *inspect.signature(HFLM).parameters}
        given = {part.split("=")[0] for part in words[words.index("--model_args") + 1].split(",")} - {"ARGS"}
        assert given <= accepted, given - accepted


@pytest.mark.parametrize("command", sorted({*commands("python"), *mentions("python"), *commands("bash")}))
def test_scripts_exist_with_their_flags(command: str) -> None:
    _, script, *words = words_of(command)
    if script == "-m":  # a module of another package
        assert importlib.util.find_spec(words[0])
        return
    path = ROOT / script
    assert path.is_file(), script
    if path.suffix == ".py":
        text = path.read_text(encoding="utf-8")
        assert all(f'"{word}"' in text for word in words if word.startswith("--"))


def test_the_example_of_an_editor_applies_what_it_makes() -> None:
    """A context is not applied to a model: `edited` refuses it."""
    for name in EDITORS:
        page = (ROOT / "docs" / "editors" / f"{name}.md").read_text(encoding="utf-8")
        (example,) = re.findall(r"^```python\n(.*?)^```", page, flags=re.DOTALL | re.MULTILINE)
        assert "edited(" not in example or editor_class(name).writes != ("context",), name
        compile(example, page, "exec")
