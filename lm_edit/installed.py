"""Which results were made with something else than is installed now: versions, code, tasks, data, shipped settings.

A fact that a result has not recorded, or that cannot be found here (an editor of another machine, published data
without a pinned revision), makes nothing stale. Nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from edit_hooks.base.registry import editor_names, load_editor
from edit_hooks.base.shipped import names_blocks, shipped_files
from edit_hooks.lm.loading.versions import installed_versions
from edit_hooks.lm.model import EditedHFLM
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.storage.hashing import code_fingerprint
from lm_edit.results.files.runs import Paths
from lm_edit.results.files.task_facts import UNEDITED
from lm_edit.results.filters import is_missing, text_of
from lm_edit.results.history import BASE, DatedRow, base_settings, describe_changes, newest_rows
from lm_edit.results.show import Comparison
from lm_edit.sweeps.checking.tasks import task_metadata
from lm_eval_tasks.common.records.benchmark import find_benchmark

ENGINE = EditedHFLM.__module__  # whose code every fingerprint of a run has
MINI = "mini"
HUB = "hub"


def stale_rows(paths: Paths, metrics: Sequence[str] = (), only: Sequence[str] = ()) -> Comparison:
    """The newest result of every row that another installation made, with what differs from this one.

    Args:
        metrics, only: as in :func:`lm_edit.results.history.history`.

    Raises:
        EditingError: as ``history``, but not for rows of one date.
    """
    entries, labels = newest_rows(paths, metrics, only)
    table = [["task", "metric", "run", "date", "value", "made stale by"]]
    for entry in entries:
        now = {**entry.facts, **installed_facts(entry)}
        if now == dict(entry.facts) or not (changes := describe_changes(entry.facts, now, "")):
            continue
        row = entry.row
        value = "unscored" if is_missing(row["value"]) else f"{row['value']:.3f}"
        table.append([row["task"], row["shown"], labels[row["run"]], row["date"], value, changes])
    stale = len(table) - 1
    fresh = "is" if len(entries) - stale == 1 else "are"
    note = f"{stale} of {len(entries)} rows are stale; {len(entries) - stale} {fresh} of what is installed."
    return Comparison(table if stale else [], [note])


def installed_facts(entry: DatedRow) -> dict[str, str]:
    """The facts of a result as they would be recorded now, under the names of :class:`DatedRow`."""
    own = entry.recorded
    facts = {f"version of {name}": version for name, version in installed_versions().items()}
    if (code := _code(own, entry.row)) is not None:
        facts["code of the package"] = code
    if (version := task_metadata(str(entry.row["task"])).get("version")) is not None:
        facts["task version"] = str(version)
    return facts | dict(_data(entry)) | dict(_settings(own))


def _code(own: Mapping[str, Any], row: Mapping[str, Any]) -> str | None:
    """The fingerprint of the engine and the editor; ``None`` if other code took part or the editor is not installed.

    The names come from a result file, so they are no paths to import, as ``package.module:Class`` would be.
    """
    name, config = text_of(own.get("editor")), own.get("editor_config")
    if name in ("", UNEDITED.strip("_"), "none") or own.get("load_edit") or text_of(own.get("icl")) not in ("", "no"):
        return None
    base = {"base": config["base"]} if isinstance(config, Mapping) and isinstance(config.get("base"), str) else {}
    if not {name, *base.values()} <= set(editor_names()):
        return None
    try:
        return code_fingerprint(ENGINE, *load_editor(name, base).source_modules)
    except EditingError:
        return None


def _data(entry: DatedRow) -> Iterator[tuple[str, str]]:
    """Digest of an embedded sample, or the revision to which published data are pinned, unless the run named one."""
    row = entry.row
    try:
        benchmark = find_benchmark(text_of(row["benchmark"]))
    except EditingError:
        return
    label, _, name = text_of(row["data"]).partition(":")
    digest, _, subset = text_of(row["data_hash"]).partition(" ")
    if label == MINI and digest:
        try:
            now = str(benchmark.load({"data": text_of(row["data"])}).source.get("sha256", ""))
        except EditingError:
            now = "none"  # the sample is not there any more
        yield "hash of the data", f"{now} {subset}".rstrip()
    if label == HUB and not (entry.recorded.get("data_revision") or entry.settings.get("data_revision")):
        file = (benchmark.source.sets or {}).get(name) if name else benchmark.source.published
        if revision := getattr(file, "revision", None):
            yield "data revision", str(revision)


def _settings(own: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Values that the shipped files of a run have now and that the run did not use.

    Settings that the run gave itself do not count, nor do blocks of a file that was moved to another depth.
    """
    origin, config = own.get("settings_origin"), own.get("editor_config")
    if not isinstance(origin, Mapping) or not isinstance(config, Mapping):
        return
    drawn = own.get("drawn_settings") or {}
    exempt = {*(origin.get("given") or ()), *drawn, *base_settings(drawn)}
    for file in origin.get("shipped") or ():
        folder, _, name = str(file).removesuffix(".yaml").partition("/")
        try:
            content = dict(shipped_files(folder)).get(name)
        except EditingError:
            content = None
        if content is None:
            yield f"settings file {file}", "not shipped any more"
            continue
        for setting, value in content["config"].items():
            if setting in exempt or (origin.get("moved") and names_blocks(setting, value)):
                continue
            used = {
                name: settings[setting]
                for name, settings in ((setting, config), (f"{BASE}.{setting}", base_settings(config)))
                if setting in settings
            }
            if value not in used.values():  # 15000 in a file is 15000.0 in a configuration
                yield from ((f"setting {name}", str(value)) for name in used)
