"""Generated text of the site: every block is made, and shows every editor, option and verb once."""

from __future__ import annotations

import functools
import importlib
import re

import pytest
from blocks import BLOCKS
from blocks_editors import FACTS
from blocks_measured import FINDINGS, MEASURED
from blocks_reference import COLUMNS, PUBLIC
from generated import filled, marks_of, pages
from made import KEPT, example, examples
from paths import ROOT

from edit_hooks.base.describe import describe_editor
from edit_hooks.base.registry import CORE, EDITORS, MORE, editor_class
from edit_hooks.contract.family_configs import FAMILY_CONFIGS
from edit_hooks.contract.tiny_models import ALL_MODEL_TYPES
from edit_hooks.lm.options.harness import PARENT_OPTIONS
from edit_hooks.run_options import RUN_OPTIONS
from lm_edit.cli.main import VERBS
from lm_edit.figures.drawing.charts import Chart
from lm_edit.figures.drawing.tables import Table
from lm_edit.figures.registry import all_figures, find_figure
from lm_edit.results.checking.check import check_results
from lm_edit.sweeps.planning.plan import shipped_plans
from lm_eval_tasks.common.records.benchmark import all_benchmarks
from lm_eval_tasks.common.settings import COMMON_SETTINGS
from lm_eval_tasks.report.catalog import list_tasks
from lm_eval_tasks.report.glossary import QUESTIONS, SCORES

TERM = re.compile(r"^(`.*`)\n: ", flags=re.MULTILINE)
PAGES = {path.relative_to(ROOT).as_posix(): path for path in pages()}


@pytest.mark.parametrize("page", PAGES)
def test_every_block_of_a_page_is_made(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = {(name, argument): BLOCKS[name](argument) for name, argument in marks_of(PAGES[page])}
    for name in {name for name, _ in made}:
        monkeypatch.setitem(BLOCKS, name, functools.partial(lambda name, argument: made[name, argument], name))
    assert "<!-- generated" not in filled(PAGES[page].read_text(encoding="utf-8"), page)
    assert all(len(block.text) > 20 for block in made.values())


def test_an_unknown_block_is_named() -> None:
    with pytest.raises(ValueError, match=r"docs/a\.md asks for the generated block 'nothing'; known are: .*commands"):
        filled("text\n\n<!-- generated: nothing -->\n", "docs/a.md")


def test_the_entry_to_cite_is_that_of_the_citation_file() -> None:
    facts = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    (version,), (year,) = re.findall(r"^version: (.+)$", facts, re.MULTILINE), re.findall(r"released: (\d{4})", facts)
    entry = BLOCKS["citation"]("").text
    assert "@software{" in entry and f"= {{{version}}}," in entry and f"= {{{year}}}," in entry
    assert entry.count("{") == entry.count("}")


def test_every_option_of_a_run_has_one_entry() -> None:
    named = [name for terms in TERM.findall(BLOCKS["run-options"]("").text) for name in re.findall(r"`(\w+)`", terms)]
    assert named == [option.name for option in RUN_OPTIONS]


def test_every_verb_has_one_section_and_one_line() -> None:
    sections = re.findall(r"^## lm-edit (\S+)$", BLOCKS["commands"]("").text, flags=re.MULTILINE)
    listed = re.findall(r"^- \[`([\w-]+)`\]", BLOCKS["verbs"]("").text, flags=re.MULTILINE)
    assert sections == list(VERBS) and sorted(listed) == sorted(VERBS)


@pytest.mark.parametrize(("tier", "names"), [("core", CORE), ("more", MORE)])
def test_every_editor_has_one_row(tier: str, names: dict[str, str]) -> None:
    assert re.findall(r"^\| \[`(\w+)`\]", BLOCKS["editors"](tier).text, flags=re.MULTILINE) == list(names)


@pytest.mark.parametrize("name", EDITORS)
def test_every_editor_has_a_page(name: str) -> None:
    path = ROOT / f"docs/editors/{name}.md"
    text = path.read_text(encoding="utf-8")
    head, rest = text.split("::::{grid}", 1)
    title, mark, idea, equation = head.strip().split("\n\n")
    assert title == f"# {FACTS[name]['title']}" and mark == f"<!-- generated: editor-head {name} -->"
    assert equation.startswith("$$\n") and equation.endswith("\n$$")
    assert 3 <= len(re.findall(r"[.:!](?=\s|$)", idea)) <= 5, "the idea in three sentences"
    for part in ("Use it if\n", "Rather not if\n", "```bash\nlm_eval --model edited_hf", f'load_editor("{name}"'):
        assert part in rest
    blocks = [block for block, argument in marks_of(path) if argument == name]
    assert blocks == ["editor-head", "measured", "settings", *blocks[3:-2], "shipped", "parity"]
    assert set(blocks[3:-2]) == ({"training-settings"} if editor_class(name).trainer else set())


def test_facts_about_editors_are_those_of_the_registry() -> None:
    assert sorted(FACTS) == sorted(EDITORS)
    assert all(set(facts) == {"title", "papers", "writes", "parity"} for facts in FACTS.values())


@pytest.mark.parametrize("name", EDITORS)
def test_every_setting_of_an_editor_has_one_entry(name: str) -> None:
    named = re.findall(r"^`(\w+)` `.*`\n: ", BLOCKS["settings"](name).text, flags=re.MULTILINE)
    assert named == [setting.name for setting in describe_editor(name).settings]


def test_settings_in_the_commands_of_editors_exist() -> None:
    """``editor_args`` of commands on all pages, and mappings given to ``load_editor``."""
    checked = 0
    for path in (ROOT / "docs").rglob("*.md"):
        text = path.read_text(encoding="utf-8")
        given = re.findall(r'editor=(\w+),editor_args=([\w:;.\-]+:[^,"\s`]+)', text)
        given += re.findall(r'load_editor\("(\w+)", \{(.*?)\}', text)
        for name, settings in given:
            known = {setting.name for setting in describe_editor(name).settings}
            names = re.findall(r'(?:^|;|, )"?(\w+)"?:', settings)
            assert names and set(names) <= known, f"{path}: {name} {settings}"
            checked += 1
    assert checked > 5


def named(block: str, argument: str = "") -> list[str]:
    return [name for terms in TERM.findall(BLOCKS[block](argument).text) for name in re.findall(r"`(\w+)`", terms)]


def test_every_option_of_lm_eval_has_one_entry() -> None:
    assert sorted(named("harness-options")) == sorted(PARENT_OPTIONS)


@pytest.mark.parametrize("which", COLUMNS)
def test_every_column_has_one_entry(which: str) -> None:
    assert named("columns", which) == list(COLUMNS[which])


def test_the_api_shows_what_an_editor_has_of_a_base_without_an_entry() -> None:
    """Its settings; of bases with an entry, and of other libraries, nothing is repeated."""
    (options,) = re.findall(
        r"^\.\. autoclass:: Editor\n((?:   :.*\n)+)", BLOCKS["api"]("edit_hooks").text, re.MULTILINE
    )
    assert ":inherited-members: ABC, Generic, object" in options
    assert BLOCKS["api"]("edit_hooks").text.count(":inherited-members:") == 1


def test_every_plan_family_figure_and_word_is_shown_once() -> None:
    sections = re.findall(r"^### (\w+)$", BLOCKS["plans"]("").text, flags=re.MULTILINE)
    assert sections == list(shipped_plans())
    rows = re.findall(r"^\| `([\w-]+)` \|", BLOCKS["families"]("").text, flags=re.MULTILINE)
    assert sorted(rows[1:]) == sorted([*FAMILY_CONFIGS, *ALL_MODEL_TYPES])
    figures = [spec.name for spec in all_figures()]
    assert re.findall(r"^\| \[`(\w+)`\]", BLOCKS["figures"]("").text, flags=re.MULTILINE) == figures
    assert named("questions") == list(QUESTIONS) and named("scores") == list(SCORES)


def test_the_gallery_has_a_card_a_section_and_a_command_of_every_figure() -> None:
    text = BLOCKS["gallery"]("").text
    figures = [spec.name for spec in all_figures()]
    assert re.findall(r"^:::\{grid-item-card\} \[(\w+)\]", text, flags=re.MULTILINE) == figures
    assert re.findall(r"^## (\w+)$", text, flags=re.MULTILINE) == figures
    assert re.findall(r"^lm-edit figure (\w+) ", text, flags=re.MULTILINE) == figures
    assert set(examples()) <= set(figures)


# UMAP takes longer than all others together; the build of the site draws its map.
@pytest.mark.parametrize(
    "name", [name for name, chosen in examples().items() if not chosen.picture and name != "evk_map"]
)
def test_an_example_of_the_gallery_is_read_from_kept_results(name: str) -> None:
    assert isinstance(example(name), Table if find_figure(name).is_table else Chart)


def test_kept_results_pass_the_check_and_name_no_folder_of_a_machine() -> None:
    report = check_results([KEPT, MEASURED, FINDINGS])
    assert report.num_files > 200 and not report.problems
    for path in (path for folder in (KEPT, MEASURED, FINDINGS) for path in folder.rglob("*.json*")):
        text = path.read_text(encoding="utf-8")
        assert not re.search(r'"/(?:home|root|tmp|Users)/|pretty_env_info', text), path


def test_every_task_and_setting_of_a_benchmark_is_on_its_page() -> None:
    shown = [
        row
        for page in PAGES
        for name, folder in marks_of(PAGES[page])
        if name == "tasks" and folder
        for row in re.findall(r"^\| `(\w+)` \|", BLOCKS["tasks"](folder).text, flags=re.MULTILINE)
    ]
    folders = {path.parent.name for path in (ROOT / "lm_eval_tasks").glob("*/benchmark.py")}
    known = {row.name for row in list_tasks() if row.folder in folders}
    assert sorted(shown) == sorted(known)
    assert named("common-settings") == [setting.name for setting in COMMON_SETTINGS]
    settings = {name for folder in folders for name in named("benchmark-settings", folder)}
    assert settings == {one.name for benchmark in all_benchmarks().values() for one in benchmark.declared_settings}


@pytest.mark.parametrize("package", PUBLIC)
def test_every_public_name_is_documented_once(package: str) -> None:
    found = re.findall(r"^\.\. (?:auto|py:)\w+:: (\w+)$", BLOCKS["api"](package).text, flags=re.MULTILINE)
    assert sorted(found) == sorted(importlib.import_module(package).__all__)
