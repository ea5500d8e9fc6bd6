"""Benchmarks: found by folder and by entry point, and which data file belongs to which of them."""

from __future__ import annotations

import json
import logging
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from distributions import write_metadata
from record_files import invented_records, write_jsonl
from task_runs import FOLDER, kept_records

import lm_eval_tasks
from edit_hooks.utils.errors import EditingError
from lm_eval_tasks.bake.benchmark import BAKE_QJ
from lm_eval_tasks.common.records.benchmark import ENTRY_POINTS, all_benchmarks, find_benchmark, load_edit_requests
from lm_eval_tasks.qaedit.benchmark import QAEDIT

BUILT_IN = list(all_benchmarks())

MODULE = """
from pathlib import Path
from lm_eval_tasks.common.records.benchmark import Benchmark
from lm_eval_tasks.common.records.cases import Case
from lm_eval_tasks.common.records.dataset import Source

def make(name):
    source = Source(title=name, hub_id="a/b", files=(name + ".jsonl",), mini=Path(__file__).with_name("mini.jsonl"))
    return Benchmark(name=name, source=source, parse=lambda fields, row: Case(None))
"""


@pytest.fixture
def fresh_discovery() -> Iterator[None]:
    """Discovery that sees what a test installs, and forgets it afterwards."""
    all_benchmarks.cache_clear()
    yield
    all_benchmarks.cache_clear()


@pytest.fixture
def install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh_discovery: None, request: pytest.FixtureRequest
) -> Callable[[str, str], None]:
    """`install(code, target)` installs a package with that code, which registers ``target`` of its module."""
    packages: list[str] = []

    def install_package(code: str, target: str) -> None:
        # Modules stay in sys.modules, so every package of this test file has another name.
        package = f"plugin_{abs(hash((request.node.name, len(packages))))}"
        packages.append(package)
        site = tmp_path / package
        (site / package).mkdir(parents=True)
        (site / package / "__init__.py").touch()
        (site / package / "benchmark.py").write_text(MODULE + textwrap.dedent(code), encoding="utf-8")
        write_metadata(site, package, {ENTRY_POINTS: {package: target.format(module=f"{package}.benchmark")}})
        monkeypatch.syspath_prepend(str(site))

    return install_package


# ------------------------------------------------------------------ discovery


def test_every_folder_with_tasks_is_a_benchmark() -> None:
    modules = {benchmark.parse.__module__ for benchmark in all_benchmarks().values()}
    folders = {path.parent.name for path in FOLDER.glob("*/*.yaml")} - {"protocols", "general_ability"}  # no edits
    assert modules >= {f"lm_eval_tasks.{folder}.benchmark" for folder in folders}
    assert {"bake", "bake_qj", "bake_j", "qaedit", "qaedit_syn", "qaedit_wild"} <= set(BUILT_IN)


def test_built_in_benchmarks_need_no_metadata(monkeypatch: pytest.MonkeyPatch, fresh_discovery: None) -> None:
    """An installation that is older than the code, or none at all, still validates and tunes."""
    monkeypatch.setattr("edit_hooks.utils.plugins.entry_points", lambda group: ())
    assert list(all_benchmarks()) == BUILT_IN


def test_a_new_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh_discovery: None) -> None:
    folder = tmp_path / "new_folder"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "benchmark.py").write_text(MODULE + 'BENCHMARKS = (make("new_one"), make("new_two"))')
    monkeypatch.setattr(lm_eval_tasks, "__path__", [*lm_eval_tasks.__path__, str(tmp_path)])
    assert list(all_benchmarks()) == [*BUILT_IN, "new_one", "new_two"]


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ("REGISTERED = make('one')", ["one"]),
        ("REGISTERED = (make('one'), make('two'))", ["one", "two"]),
        ("REGISTERED = [make('one')]", ["one"]),
    ],
)
def test_other_packages_register_one_benchmark_or_several(install: Callable, code: str, names: list[str]) -> None:
    install(code, "{module}:REGISTERED")
    assert list(all_benchmarks()) == [*BUILT_IN, *names]
    assert find_benchmark("one").source.title == "one"


@pytest.mark.parametrize(
    ("code", "target", "message"),
    [
        ("REGISTERED = 'text'", "{module}:REGISTERED", r"benchmark .*:REGISTERED' is a str; a .*Benchmark or a tuple"),
        ("REGISTERED = (make('a'), 3)", "{module}:REGISTERED", "is a int; a "),
        ("REGISTERED = make('a')", "{module}:REGISTRED", "has no 'REGISTRED'"),
        ("REGISTERED = make('a')", "no_such_package.benchmark:X", "there is no module 'no_such_package'"),
        ("REGISTERED = make('bake')", "{module}:REGISTERED", r"two benchmarks are called 'bake': lm_eval_tasks\.bake"),
        ("REGISTERED = make('qaedit_wild')", "{module}:REGISTERED", "two benchmarks are called 'qaedit_wild'"),
    ],
)
def test_broken_entry_points_are_named(install: Callable, code: str, target: str, message: str) -> None:
    install(code, target)
    with pytest.raises(EditingError, match=message):
        all_benchmarks()


def test_two_packages_with_one_benchmark_are_named(install: Callable) -> None:
    install("REGISTERED = make('same')", "{module}:REGISTERED")
    install("REGISTERED = make('same')", "{module}:REGISTERED")
    with pytest.raises(EditingError, match=r"two benchmarks are called 'same': plugin_\d+\.\S+ and plugin_\d+"):
        all_benchmarks()


def test_an_unknown_name_lists_near_misses_names_and_the_alternative() -> None:
    with pytest.raises(EditingError, match=r"Did you mean 'qaedit'.*Accepted: bake, .*, or a JSON or JSONL file"):
        load_edit_requests("qaedits", {})


# ------------------------------------------------------------------ records


@pytest.mark.parametrize("name", BUILT_IN)
def test_edit_requests_are_those_of_the_records(name: str, tmp_path: Path) -> None:
    benchmark = find_benchmark(name)
    records = kept_records(benchmark)
    path = write_jsonl(tmp_path / "records.jsonl", records)
    cases = load_edit_requests(name, {"data": str(path)}).cases
    assert [{request.case_id for request in case} for case in cases] == [{str(row)} for row in range(len(cases))]
    assert len({tuple(request.key for request in case) for case in cases}) == len(cases)
    # Rows about one edit are joined.
    edits = {json.dumps(record["requested_rewrite"]) for record in records} if benchmark.join else records
    assert len(cases) == len(edits)


@pytest.mark.parametrize("name", [name for name in BUILT_IN if find_benchmark(name).source.mini])
def test_embedded_samples_are_valid(name: str) -> None:
    loaded = find_benchmark(name).load({})
    assert loaded.source["data"] == "mini"
    assert loaded.source["records"] == len(loaded.records) > 0
    assert len({case.request.key for case in loaded.records}) == len(loaded.records)


def test_a_file_of_another_benchmark_leaves_this_one_its_default(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One command may run tasks of two benchmarks with the data of one of them."""
    rows = invented_records("qaedit.jsonl")
    file = write_jsonl(tmp_path / "QAEdit_inter_1k.json", rows)
    with caplog.at_level(logging.WARNING):
        loaded = BAKE_QJ.load({"data": str(file)})
    assert loaded.source["data"] == "mini" and "is the file of QAEdit; BAKE-Q&J uses data=mini" in caplog.text
    assert len(QAEDIT.load({"data": str(file)}).records) == len(rows)
    renamed = file.rename(tmp_path / "something.json")
    with pytest.raises(EditingError, match="cannot be used"):
        BAKE_QJ.load({"data": str(renamed)})
