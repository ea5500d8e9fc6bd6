"""A shipped configuration that names a source has the source's values, except for listed ones that its text names."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import pytest
import yaml
from paths import ROOT, TESTS

from edit_hooks.base.registry import editor_class
from edit_hooks.locate.moments.corpora import PUBLISHED_DATASET
from edit_hooks.memory.unrelated_texts import UNRELATED_TEXTS
from edit_hooks.training.find import trainer_class
from edit_hooks.utils.settings.options import parse_editor_args

CONFIGS = ROOT / "edit_hooks/configs"
RELEASED: dict[str, Any] = yaml.safe_load((TESTS / "data/released_settings.yaml").read_text(encoding="utf-8"))
RUNS: dict[str, Any] = RELEASED.pop("runs")
TRAINING: dict[str, Any] = RELEASED.pop("training")
DEMO = "gemma-3-270m"


class Deviation(NamedTuple):
    """A setting in which shipped files differ from their source.

    Attributes:
        ours: its value in these files; for ``layers`` the first and the last block.
        says: the words by which their text names the difference.
        files: without ``.yaml``; by default all files of the editor but the demo's.
    """

    editor: str
    setting: str
    ours: Any
    says: str
    files: tuple[str, ...] | None = None


ROME_RELEASE = ("gpt2-medium", "gpt2-large", "gpt2-xl", "gpt-j-6b", "gpt-neox-20b")
EASYEDIT_DEFER = ("gpt-j-6b", "llama-2-7b", "mistral-7b")
NO_INTEGRAL = ("llama-2-7b", "llama-3-8b", "llama-3.2-3b", "mistral-7b", "qwen2.5-7b")
DEVIATIONS = [
    # C from text that the model samples needs no network; Wikipedia is a download of 12 GB.
    Deviation("rome", "second_moments", "self", "C comes from Wikipedia (second_moments: published", ROME_RELEASE),
    Deviation(
        "memit", "second_moments", "self", "C is collected on text sampled from the model (second_moments: self)"
    ),
    Deviation("fe", "second_moments", "self", "C is collected on text sampled from the model (second_moments: self)"),
    Deviation(
        "emmet", "second_moments", "self", "C is collected on text sampled from the model (second_moments: self)"
    ),
    Deviation("pmet", "second_moments", "self", "C is collected on text sampled from the model (second_moments: self)"),
    Deviation("alphaedit", "second_moments", "self", "from text sampled from the model (second_moments: self)"),
    Deviation("suit", "second_moments", "self", "from text sampled from the model (second_moments: self)"),
    Deviation("evk_edit", "second_moments", "self", "from text sampled from the model (second_moments: self)"),
    # An edit then needs no statistics at all.
    Deviation("bird", "second_moments", None, "second moments, which are off", ("gpt2-xl", "gpt-j-6b", "llama-2-7b")),
    Deviation("bird", "second_moments", None, "without its second moments", ("llama-3-8b",)),
    # Other people's sentences are not shipped.
    Deviation(
        "bird",
        "wording",
        "own",
        "phrases are our own unless wording: released",
        ("gpt2-xl", "gpt-j-6b", "llama-2-7b", "llama-3-8b"),
    ),
    Deviation("wise", "loc_prompts", list(UNRELATED_TEXTS), "loc_prompts, texts of our own"),
    # One set of templates for all models; the release samples from the end-of-text token alone, which is no setting.
    Deviation("rome", "templates_from", None, "not after the end-of-text token", ROME_RELEASE),
    Deviation(
        "r_rome",
        "templates_from",
        None,
        "not after the end-of-text token",
        ("gpt2-medium", "gpt2-large", "gpt-neox-20b"),
    ),
    # Encoded alone, the target starts with BOS, which no model writes after a prompt.
    Deviation(
        "ft_l",
        "targets",
        "in_context",
        "(targets: alone)",
        ("llama-2-7b", "llama-2-13b", "llama-3-8b", "llama-3.2-3b", "mistral-7b"),
    ),
    # A route per forward pass changes in the middle of an answer.
    Deviation("wise", "decide", "prompt", "routing once per prompt (decide:every_call as there"),
    # Base models of the same shape have no template.
    Deviation(
        "wise", "chat", "auto", "chat: auto edits in the chat template", ("llama-3-8b", "qwen2.5-7b", "qwen3-8b")
    ),
    # The neighbor whose values these files have is shallower: its relative depth, or its last blocks.
    Deviation("ft_l", "layers", [35, 35], "27 of 28 blocks there", ("qwen3-8b",)),
    Deviation("wise", "layers", [30, 30], "23 of 28 blocks there", ("qwen3-8b",)),
    Deviation("mend", "layers", [37, 39], "29 to 31 of 32 blocks there", ("llama-2-13b",)),
    Deviation("mend", "layers", [33, 35], "25 to 27 of 28 blocks there", ("qwen3-8b",)),
    # The paper subtracts.
    Deviation("mend", "sign", "minus", "there it is added (sign: plus)"),
    # A name without an address.
    Deviation("serac", "counterfactual", "gpt2", "its gpt-j-335M-Code has no address there", ("gpt-j-6b",)),
    # An integral over one step is none.
    Deviation("kn", "num_steps", 20, "except its single step", NO_INTEGRAL),
    # Where a question ends, whatever follows.
    Deviation("melo", "query_token", "last_prompt", "the query is at the last prompt token"),
    Deviation("melo", "append_eos", False, "append_eos: released"),
    # Edits that share a block cannot be told apart.
    Deviation("melo", "num_edit_per_block", None, "(num_edit_per_block: 4)"),
    Deviation("defer", "query_token", "last_prompt", "(query_token: last_text there)", EASYEDIT_DEFER),
    Deviation("defer", "query_token", "last_prompt", "there the first target token", ("gpt2-xl",)),
    # A space behind an answer is in no text.
    Deviation("defer", "append_eos", False, "(append_eos: released)", ("gpt2-xl",)),
    # A look-up per forward pass changes in the middle of an answer.
    Deviation("defer", "query", "prefill", "(query: every_step there)", EASYEDIT_DEFER),
    # From an empty start a lone edit is normalized by the variance over its own few tokens.
    Deviation("ultraedit", "start", "calibrated_alone", "(start: calibrated_alone; there empty)"),
]


class Shipped(NamedTuple):
    """A shipped file: its text, and its settings with the editor's defaults."""

    text: str
    settings: dict[str, Any]

    @property
    def comments(self) -> str:
        """Comments and source, as one line."""
        lines = [line.partition("#") for line in self.text.splitlines() if "#" in line]
        source = yaml.safe_load(self.text)["source"]
        return " ".join(" ".join([*(comment for _, _, comment in lines), source]).split())


@functools.cache
def load(editor: str, name: str) -> Shipped:
    text = (CONFIGS / editor / f"{name}.yaml").read_text(encoding="utf-8")
    config = editor_class(editor).config_class(**yaml.safe_load(text)["config"])
    return Shipped(text, vars(config))


def released_files(editor: str) -> list[str]:
    return [name for name in RELEASED[editor] if name != "all"]


def released_values(editor: str, name: str) -> dict[str, Any]:
    return {**RELEASED[editor]["all"], **RELEASED[editor][name]}


FILES = [(editor, name) for editor in RELEASED for name in released_files(editor)]
# (editor, file, setting) -> the deviation
DEVIATING = {
    (one.editor, name, one.setting): one for one in DEVIATIONS for name in one.files or released_files(one.editor)
}


def same(ours: Any, released: Any) -> bool:
    if isinstance(ours, float) and isinstance(released, (int, float)):
        return ours == pytest.approx(released)
    return bool(ours == released)


def value_of(settings: Mapping[str, Any], setting: str) -> Any:
    """A setting in the form of released_settings.yaml."""
    value = settings.get(setting)
    if setting != "layers":
        return value
    assert value == list(range(value[0], value[-1] + 1))
    return [value[0], value[-1]]


def differences(editor: str, name: str, settings: Mapping[str, Any]) -> list[str]:
    """Settings of a file that have neither the released value nor the one that :data:`DEVIATIONS` lists."""
    found = []
    for setting, released in released_values(editor, name).items():
        deviation = DEVIATING.get((editor, name, setting))
        wanted = released if deviation is None else deviation.ours
        if not same(value_of(settings, setting), wanted):
            found.append(f"{setting}: {settings.get(setting)!r} here; released {released!r}, listed {deviation}")
    return found


def other_value(value: Any) -> Any:
    """Some other value of the same type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return 7 * value + 1
    if isinstance(value, str):
        return f"not {value}"
    if isinstance(value, list):
        return [*value, value[-1] + 1 if isinstance(value[-1], int) else "more"]
    return {} if isinstance(value, dict) else 0.5


@pytest.mark.parametrize(("editor", "name"), FILES)
def test_values_are_the_sources_or_listed(editor: str, name: str) -> None:
    assert differences(editor, name, load(editor, name).settings) == []


@pytest.mark.parametrize(("editor", "name"), FILES)
def test_no_other_value_passes(editor: str, name: str) -> None:
    """Once any value passed where the file's text held the name of the setting, as "alpha" in a source."""
    settings = load(editor, name).settings
    for setting in released_values(editor, name):
        broken = {**settings, setting: other_value(settings.get(setting))}
        assert [text.partition(":")[0] for text in differences(editor, name, broken)] == [setting]


@pytest.mark.parametrize(
    ("editor", "name", "setting"), DEVIATING, ids=[f"{editor}-{name}-{key}" for editor, name, key in DEVIATING]
)
def test_a_listed_deviation_is_one_and_the_text_names_it(editor: str, name: str, setting: str) -> None:
    deviation = DEVIATING[editor, name, setting]
    assert not same(deviation.ours, released_values(editor, name)[setting])
    assert deviation.says in load(editor, name).comments


@pytest.mark.parametrize(("editor", "name"), FILES)
def test_every_setting_of_a_file_has_a_released_value(editor: str, name: str) -> None:
    config = yaml.safe_load(load(editor, name).text)["config"]
    assert set(config) <= set(released_values(editor, name))


@pytest.mark.parametrize(("editor", "name"), FILES)
def test_the_text_names_articles_and_precision_of_the_sources_run(editor: str, name: str) -> None:
    """Two files claimed the 100,000 articles of `published` where their releases have 50,000 and 10,000."""
    comments = load(editor, name).comments
    run = RUNS.get(editor, {}).get(name, {})
    articles = {int(number.replace(",", "")) for number in re.findall(r"([\d,]+) articles", comments)}
    assert articles == ({run["articles"], PUBLISHED_DATASET.num_documents} if "articles" in run else set())
    assert set(re.findall(r"b?float\d+", comments)) == {run[key] for key in run if key == "dtype"}


def test_every_run_is_that_of_a_file() -> None:
    assert {(editor, name) for editor, runs in RUNS.items() for name in runs} <= set(FILES)
    assert {key for runs in RUNS.values() for run in runs.values() for key in run} == {"articles", "dtype"}


OF_OURS = (DEMO, "smollm2-135m")  # models whose settings no release has


def test_every_file_is_checked() -> None:
    files = {(path.parent.name, path.stem) for path in CONFIGS.glob("*/*.yaml") if path.stem not in OF_OURS}
    assert files == set(FILES)


# ------------------------------------------------------------------ the demo model

# What the sources of the demo's files say of other files: editor -> (editor, file, settings that are the same).
SAME_AS: dict[str, list[tuple[str, str, list[str]]]] = {
    "rome": [
        ("rome", "gpt2-xl", ["num_steps", "early_stop_loss", "lr", "second_moments"]),
        ("rome", "llama-2-7b", ["weight_decay"]),
    ],
    "r_rome": [("rome", "gpt2-xl", ["num_steps", "early_stop_loss", "lr"]), ("rome", "llama-2-7b", ["weight_decay"])],
    "alphaedit": [("memit", DEMO, ["layers", "num_steps", "lr", "weight_decay", "clamp_factor"])],
    "evk_edit": [("alphaedit", DEMO, ["layers", "num_steps", "lr", "weight_decay", "clamp_factor"])],
    "emmet": [("memit", DEMO, ["num_steps", "lr", "weight_decay"])],
    "suit": [
        ("alphaedit", DEMO, ["layers", "num_steps", "lr", "weight_decay", "clamp_factor", "nullspace_threshold", "l2"])
    ],
    "fe": [("memit", DEMO, ["layers", "num_steps", "lr", "weight_decay", "clamp_factor"])],
    "loc_ft_crispedit": [("loc_ft", DEMO, ["layers", "lr"])],
    "pmet": [
        ("memit", DEMO, ["layers", "num_steps", "weight_decay", "clamp_factor"]),
        ("pmet", "gpt-j-6b", ["lr"]),
        ("pmet", "llama-2-7b", ["kl_factor"]),
    ],
    "bird": [
        ("rome", DEMO, ["layers", "weight_decay", "context_templates"]),
        ("bird", "llama-2-7b", ["beta"]),
    ],
}
CLAIM = re.compile(r"as published|as for|for the demo before|'s for|as ROME's|of Llama 2")


@pytest.mark.parametrize("editor", SAME_AS)
def test_the_demo_has_the_values_that_its_source_names(editor: str) -> None:
    settings = load(editor, DEMO).settings
    for other, name, keys in SAME_AS[editor]:
        theirs = load(other, name).settings
        assert {key: settings[key] for key in keys} == {key: theirs[key] for key in keys}, (other, name)


def test_half_the_steps_are_half_the_steps() -> None:
    assert "half its steps" in load("bird", DEMO).text
    assert 2 * load("bird", DEMO).settings["num_steps"] == load("rome", DEMO).settings["num_steps"]


def test_every_source_of_the_demo_that_names_another_file_is_checked() -> None:
    sources = {path.parent.name: yaml.safe_load(path.read_text())["source"] for path in CONFIGS.glob(f"*/{DEMO}.yaml")}
    assert {editor for editor, source in sources.items() if CLAIM.search(source)} == set(SAME_AS)


# ------------------------------------------------------------------ trainings

PAGE = (ROOT / "docs/editors/training.md").read_text(encoding="utf-8").partition("## Trainings of the releases")[2]
TRAINED_FILES = [(editor, name) for editor, files in TRAINING.items() for name in files if name != "all"]
ROWS = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| `(\w+)` \| `(.*?)` \| `(.*?)` \|", PAGE, re.M)
# (editor, setting) -> our value and that of the source, as the page gives them
LISTED = {
    (editor, setting): (ours, theirs)
    for editors, setting, ours, theirs in ROWS
    for editor in re.findall(r"\w+", editors)
}
LINES = dict(re.findall(r'^lm-edit train (\w+) .*\\\n  --settings "(.*)"$', PAGE, re.M))


def training_settings(editor: str, name: str, **given: Any) -> dict[str, Any]:
    """The settings of a training under a shipped file."""
    content = yaml.safe_load((CONFIGS / editor / f"{name}.yaml").read_text(encoding="utf-8"))
    config_class = trainer_class(editor_class(editor)).config_class
    return vars(config_class.from_mapping({**content["config"], **content.get("training", {}), **given}))


def different_trainings(editor: str, name: str, settings: Mapping[str, Any]) -> dict[str, str]:
    """Settings with another value than the source's -> that value."""
    released = {**TRAINING[editor]["all"], **TRAINING[editor][name]}
    if released["patience"] == "never":  # as a patience of all steps, or more
        steps = released["num_steps"]
        released["patience"] = settings["patience"] if settings["patience"] >= steps else steps
    return {key: str(value) for key, value in released.items() if not same(settings[key], value)}


@pytest.mark.parametrize(("editor", "name"), TRAINED_FILES)
def test_a_training_is_the_sources_or_the_page_lists_the_setting(editor: str, name: str) -> None:
    settings = training_settings(editor, name)
    for setting, theirs in different_trainings(editor, name, settings).items():
        assert LISTED[editor, setting] == (str(settings[setting]), theirs)
    assert '"Trainings of the releases" in docs/editors/training.md' in load(editor, name).comments


@pytest.mark.parametrize(("editor", "setting"), LISTED)
def test_a_listed_difference_of_a_training_is_one(editor: str, setting: str) -> None:
    files = [name for name in TRAINING[editor] if name != "all"]
    assert any(setting in different_trainings(editor, name, training_settings(editor, name)) for name in files)


@pytest.mark.parametrize(("editor", "name"), TRAINED_FILES)
def test_the_settings_of_the_readme_are_the_sources_training(editor: str, name: str) -> None:
    given = parse_editor_args(LINES[editor])
    assert different_trainings(editor, name, training_settings(editor, name, **given)) == {}
    of_training = {setting for one, setting in LISTED if one == editor}
    assert of_training <= set(given)
    for setting in set(given) - of_training:  # of the editor itself
        assert given[setting] == released_values(editor, name)[setting]


def test_every_file_and_setting_of_a_training_is_checked() -> None:
    trained = {editor for editor, _ in FILES if editor_class(editor).trainer is not None}
    assert set(TRAINED_FILES) == {(editor, name) for editor, name in FILES if editor in trained}
    for editor in TRAINING:
        trainer = trainer_class(editor_class(editor))
        own = {field.name for field in dataclasses.fields(editor_class(editor).config_class)}
        further = {field.name for field in dataclasses.fields(trainer.config_class)} - own
        assert set(TRAINING[editor]["all"]) == further - {"batch_size"}  # shares passes, moves nothing
    with_section = {
        path.parent.name for path in CONFIGS.glob("*/*.yaml") if "training" in yaml.safe_load(path.read_text())
    }
    assert with_section <= trained
