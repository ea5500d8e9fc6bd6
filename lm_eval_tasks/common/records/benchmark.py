"""The `Benchmark` type, and discovery of benchmarks here and in other packages.

A built-in benchmark is a folder of ``lm_eval_tasks`` with a module ``benchmark`` that defines ``BENCHMARKS``. Another
package registers its benchmarks as an entry point of the group :data:`ENTRY_POINTS`.
"""

from __future__ import annotations

import functools
import importlib.util
import pkgutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from edit_hooks.prompt_context import require_separator, separator_name
from edit_hooks.request import EditedCases, describe_texts
from edit_hooks.utils.errors import EditingError, near_misses, unknown_keys_error
from edit_hooks.utils.logs import get_logger
from edit_hooks.utils.plugins import import_object, registered
from edit_hooks.utils.storage.files import names_file, user_path
from edit_hooks.utils.storage.json_io import read_rows
from edit_hooks.utils.text.readable import readable
from lm_eval_tasks.common.records.cases import Case, with_separator
from lm_eval_tasks.common.records.dataset import (
    HUB,
    MINI,
    LoadedRecords,
    Source,
    choose_data,
    load_records,
    named_set,
    with_set,
)
from lm_eval_tasks.common.records.fields import Fields
from lm_eval_tasks.common.records.foreign import refuse_other_formats
from lm_eval_tasks.common.records.layouts import Layout, accepts, read_on
from lm_eval_tasks.common.settings import (
    BAD_RECORDS,
    COMMON_SETTINGS,
    DATA_REVISION,
    SCORE_UNEDITED_CASES,
    SEPARATOR,
    SET_SUFFIX,
    Setting,
    Settings,
    check_settings,
    set_setting,
)
from lm_eval_tasks.folder import TASKS_DIR, package_path

logger = get_logger("lm_eval.editing_tasks")

ENTRY_POINTS = "lm_eval_editing.benchmarks"
OWN_FACTS = "counterfact_flat"  # the benchmark whose layout users write
FACTS = "a JSON or JSONL file of facts"
OF_FILES = (BAD_RECORDS.name, SEPARATOR.name)  # settings that have a meaning for any file of records

CaseT = TypeVar("CaseT", bound=Case)


@dataclass(frozen=True, kw_only=True)
@readable
class Benchmark(Generic[CaseT]):
    """A data set of edits: where its records are and how one of them becomes a case.

    Attributes:
        name: name of the edits, as in ``edits=<name>``; lower case.
        other_names: task groups with the same edits, accepted in place of ``name``.
        source: the files.
        parse: (fields of a record, row number from 0) -> case; raises EditingError if the record violates the schema.
        settings: the settings that its tasks read besides the common ones.
        count_odd: counts of unusual but valid records, for ``data_source`` in the results.
        join: makes one case of several rows of a file.
        separator: white space between prompts and answers of records without one of their own; ``None``: by script.
    """

    name: str
    other_names: Sequence[str] = ()
    source: Source
    parse: Callable[[Fields, int], CaseT]
    settings: Sequence[Setting[Any]] = ()
    count_odd: Callable[[Sequence[CaseT]], Mapping[str, int]] | None = None
    join: Callable[[Sequence[CaseT]], Sequence[CaseT]] | None = None
    separator: str | None = None

    @property
    def layout(self) -> Layout[CaseT]:
        """The layout of its records."""
        return self.source.layout(self._parse, self.other_names or (self.name,))

    def _parse(self, fields: Fields, row: int) -> CaseT:
        """The case of a record in any layout, with the separator that the record may have."""
        case = self.parse(fields, row)
        if (separator := fields.optional("separator")) is None:
            return case
        return with_separator(case, require_separator(separator, f"{fields.where}: field 'separator'"))

    @property
    def _set_setting(self) -> Setting[str | None]:
        """``<name>_set``: another form of ``data=hub:<set>``."""
        return set_setting(f"{self.name}{SET_SUFFIX}", self.source.sets)

    @property
    def declared_settings(self) -> Sequence[Setting[Any]]:
        """Its settings, with that of its published sets if it has any."""
        return [*self.settings, self._set_setting] if self.source.sets else self.settings

    def load(self, settings: Settings) -> LoadedRecords[CaseT]:
        """Read and check all cases.

        For settings and errors see :func:`~lm_eval_tasks.common.records.dataset.load_records`.
        """
        return self._load(self.data_settings(settings))

    def load_file(self, path: str, settings: Settings) -> LoadedRecords[CaseT]:
        """As :meth:`load`, of a file whose name says nothing about its benchmark."""
        return self._load({**settings, "data": path})

    def _load(self, settings: Settings) -> LoadedRecords[CaseT]:
        loaded = load_records(self.source, settings, self.layout, all_layouts, self.join)
        chosen = SEPARATOR.read(settings)
        separator = self.separator if chosen is None else chosen
        loaded.records[:] = [with_separator(case, separator) for case in loaded.records]
        loaded.source.update(describe_texts([request for case in loaded.records for request in case.requests]))
        if self.count_odd:
            loaded.source.update(self.count_odd(loaded.records))
        return loaded

    def check_settings(self, settings: Settings, further: Sequence[Setting[Any]] = ()) -> None:
        """Check the settings of a task of this benchmark, and further ones that the task reads.

        See :mod:`lm_eval_tasks.common.settings`.
        """
        check_settings(settings, [*COMMON_SETTINGS, *self.declared_settings, *further], settings_of_all_benchmarks)

    def data_settings(self, settings: Settings) -> Settings:
        """The settings with ``data`` as this benchmark reads it."""
        return with_set(self._own_settings(settings), self._set_setting, self.source)

    def resolved_settings(self, settings: Settings) -> dict[str, Any]:
        """Its own settings with their defaults, for the results."""
        declared = [*self.declared_settings, SCORE_UNEDITED_CASES]
        separator = SEPARATOR.read(settings)
        chosen = {} if separator is None else {SEPARATOR.name: separator_name(separator)}
        return chosen | {setting.name: value for setting in declared if (value := setting.read(settings)) is not None}

    def _own_settings(self, settings: Settings) -> Settings:
        """See :func:`without_foreign_data`."""
        return without_foreign_data(settings, self.source)


def without_foreign_data(settings: Settings, source: Source) -> Settings:
    """The settings without a ``data`` file or set that belongs to a benchmark of another source.

    The published name of a file identifies its benchmark, and so does the name of a set, to which ``data_revision``
    then belongs, too.

    With tasks of two benchmarks, ``data=QAEdit.json`` gives QAEdit its file. The other benchmark uses its default.
    """
    data = choose_data(settings)
    if (owner := _foreign_owner(data, source)) is None:
        return settings
    title = owner.source.title
    if chosen := named_set(data):
        origin, _ = chosen
        logger.warning("data=%s is a set of %s; %s uses data=%s.", data, title, source.title, origin)
        return {**_without(settings, DATA_REVISION.name), "data": origin}
    rest = _without(settings, "data")
    logger.warning("data=%s is the file of %s; %s uses data=%s.", data, title, source.title, choose_data(rest))
    return rest


def check_data(name: str, data: str | None) -> None:
    """Refuse the file or set of another benchmark, where no task could read it.

    Raises:
        EditingError: names that benchmark.
    """
    source = find_benchmark(name, FACTS).source
    if data is not None and (owner := _foreign_owner(data, source)):
        raise EditingError(
            f"data={data} is that of {owner.source.title}, not of {source.title}. Name {owner.name} in place of {name}."
        )


def _foreign_owner(data: str, source: Source) -> Benchmark[Any] | None:
    """The benchmark of another source that a set or the published name of a file belongs to."""
    others = all_benchmarks().values()
    if (chosen := named_set(data)) and chosen[1] not in source.named_sets(chosen[0]):
        origin, name = chosen
        return next((other for other in others if name in other.source.named_sets(origin)), None)
    path = user_path(data, "data")
    if data in (MINI, HUB) or path.name in source.files or not path.is_file():
        return None
    return next((other for other in others if path.name in other.source.files), None)


def _without(settings: Settings, name: str) -> Settings:
    return {key: value for key, value in settings.items() if key != name}


def find_benchmark(name: str, alternative: str = "") -> Benchmark[Any]:
    """A benchmark by any of its names.

    Args:
        alternative: another source that the caller accepts, for the error message, as in ``a JSONL file``.

    Raises:
        EditingError: for an unknown name, with near misses and all names; see also :func:`all_benchmarks`.
    """
    known = all_benchmarks()
    if name not in known:
        accepted = ", ".join(known) + (f", or {alternative}" if alternative else "")
        raise EditingError(f"unknown benchmark {name!r}.{near_misses(name, known)} Accepted: {accepted}.")
    return known[name]


def benchmark_of_task(task: str) -> Benchmark[Any]:
    """The benchmark of a task, which is named ``<benchmark>_<probe>``; the longest name decides.

    Raises:
        EditingError: for a task of no benchmark.
    """
    known = all_benchmarks()
    names = [name for name in known if task == name or task.startswith(f"{name}_")]
    if not names:
        raise EditingError(
            f"{task!r} is no task of a benchmark.{near_misses(task, known)} Accepted: {', '.join(known)}."
        )
    return known[max(names, key=len)]


def load_edit_requests(name: str, settings: Settings) -> EditedCases:
    """The edits of each case of a benchmark, in the order of its cases, and where they were read.

    Registered as the edit source of ``edited_hf`` (``edits=<name>``).

    Args:
        name: of a benchmark, or a file of records, whose fields name their benchmark.

    Raises:
        EditingError: for an unknown benchmark, for data that cannot be read, and as :meth:`Benchmark.check_settings`.
    """
    loaded = load_cases(name, settings)
    return EditedCases([case.requests for case in loaded.records], loaded.source)


def load_cases(source: str, settings: Settings) -> LoadedRecords[Any]:
    """The cases of a benchmark, or of a file of records.

    Raises:
        EditingError: as :func:`load_edit_requests`.
    """
    if names_file(source):
        return load_own_file(source, settings)
    benchmark = find_benchmark(source, FACTS)
    benchmark.check_settings(settings)
    sets = [f"{known.name}{SET_SUFFIX}" for known in all_benchmarks().values() if known.source.sets]
    if unknown := {key for key in settings if key.endswith(SET_SUFFIX)} - set(sets):
        raise unknown_keys_error("setting", unknown, dict.fromkeys(sets))
    return benchmark.load(settings)


def load_own_file(source: str, settings: Settings) -> LoadedRecords[Any]:
    """The cases of a file of records, of whatever benchmark; the settings that count are :data:`OF_FILES`.

    Raises:
        EditingError: as :func:`benchmark_of_file`, and for records that cannot be used.
    """
    benchmark = benchmark_of_file(source)
    chosen = {name: settings[name] for name in OF_FILES if name in settings}
    loaded = benchmark.load_file(source, chosen)
    return replace(loaded, source={"benchmark": benchmark.name, **loaded.source})


def benchmark_of_file(source: str) -> Benchmark[Any]:
    """The benchmark that reads most of the fields of a file's first record; of several, that of own facts.

    Raises:
        EditingError: for a file that is no file of records, and for records that several benchmarks edit in their way.
    """
    path = user_path(source, "file of facts")
    refuse_other_formats(path)
    first = next((record for _, record in read_rows(path, "file of facts") if isinstance(record, Mapping)), {})
    names = benchmarks_of_record(first)
    if OWN_FACTS in names:
        return find_benchmark(OWN_FACTS)
    if len(names) > 1:
        raise EditingError(
            f"{path} holds records of {' and of '.join(names)}, whose edits differ. Choose one, for example: "
            f"edits={names[0]},data={path} (lm-edit: --edits {names[0]} --data {path})."
        )
    return find_benchmark(names[0])


@functools.cache
def all_benchmarks() -> Mapping[str, Benchmark[Any]]:
    """All benchmarks by each of their names.

    The built-in ones come first, by folder, then those of other packages.

    Raises:
        EditingError: when an entry point cannot be imported or is no benchmark, and when two have the same name.
    """
    by_name: dict[str, Benchmark[Any]] = {}
    origins: dict[str, str] = {}
    for path in [*_builtin_paths(), *(entry.value for entry in registered(ENTRY_POINTS).values())]:
        for benchmark in _import_benchmarks(path):
            for name in (benchmark.name, *benchmark.other_names):
                if name in by_name:
                    raise EditingError(
                        f"two benchmarks are called {name!r}: {origins[name]} and {path}. Rename one, or uninstall its "
                        "package."
                    )
                by_name[name], origins[name] = benchmark, path
    return by_name


def settings_of_all_benchmarks() -> Iterator[Setting[Any]]:
    """The settings of all benchmarks besides the common ones."""
    for benchmark in all_benchmarks().values():
        yield from benchmark.declared_settings


def all_layouts() -> Sequence[Layout[object]]:
    """The layouts of all benchmarks."""
    return list({benchmark.name: benchmark.layout for benchmark in all_benchmarks().values()}.values())


def benchmarks_of_record(record: Mapping[str, Any]) -> list[str]:
    """Names of the benchmarks whose parser leaves the fewest of a record's fields unread; of these, who accept it.

    A parser that refuses the record counts, too, with the fields behind a missing one: a damaged record is one of its
    layout, not one of another that reads less of it.
    """
    ranks: dict[str, tuple[int, bool]] = {}
    for benchmark in all_benchmarks().values():
        fields = Fields(record, "record")
        accepted = accepts(benchmark.layout, fields, 0)
        read = fields if accepted else read_on(benchmark.layout, fields, 0)
        ranks[benchmark.name] = (len(read.unread_paths()), not accepted)
    return [name for name, rank in ranks.items() if rank == min(ranks.values())]


def _builtin_paths() -> Iterator[str]:
    """``module:BENCHMARKS`` of every folder that has a module ``benchmark``."""
    for folder in pkgutil.iter_modules(package_path()):
        module = f"{TASKS_DIR.name}.{folder.name}.benchmark"
        if folder.ispkg and module != __name__ and importlib.util.find_spec(module):
            yield f"{module}:BENCHMARKS"


def _import_benchmarks(path: str) -> Sequence[Benchmark[Any]]:
    """The benchmarks at ``module:attribute``: one or several."""
    value = import_object(path, "benchmark")
    benchmarks = value if isinstance(value, (list, tuple)) else [value]
    for benchmark in benchmarks:
        if not isinstance(benchmark, Benchmark):
            raise EditingError(
                f"benchmark {path!r} is a {type(benchmark).__name__}; a lm_eval_tasks.Benchmark or a tuple of them is "
                "needed."
            )
    return benchmarks
