"""A results repository: result files by pull request, one folder per run, checked by ``lm-edit results check``.

Layout, below the root with the file :data:`MARKER`::

    lm-edit-results.json                                {"layout": 1}
    results/<model>/<name of the run>__<hash>/results_<date>.json
    results/<model>/<name of the run>__<hash>/samples_<task>_<date>.jsonl

Files are lm-eval's own, without the facts about the machine that they were made on.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePath
from typing import Any

from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.storage.files import write_atomically
from edit_hooks.utils.storage.json_io import json_lines, json_text, read_json
from edit_hooks.utils.storage.outputs import check_writable_folder
from lm_edit.results.checking.file_check import check_file
from lm_edit.results.files.runs import Paths, ResultFile, read_result_file, read_result_files
from lm_edit.results.markdown import escape_cell, markdown_table
from lm_edit.results.show import Comparison, comparison
from lm_edit.results.tables import IDENTITY, result_rows
from lm_eval_tasks.report.portable import portable
from lm_eval_tasks.report.run_facts import slug
from lm_eval_tasks.report.run_options import PLACE_DIGESTS, model_arguments, place_digests

MARKER = "lm-edit-results.json"
LAYOUT = 1
FOLDER = "results"
MESSAGE = "PULL_REQUEST.md"
MAX_FILE_BYTES = 100_000_000  # GitHub refuses larger ones
_NAME = re.compile(r"results_[\w.\-]+\.json")
# Facts about the machine, which change no number.
PRIVATE = ("pretty_env_info", "git_hash", "upper_git_hash")


def submit(paths: Paths, root: str | Path, *, samples: bool = True) -> list[Path]:
    """Prepare the files of a pull request in a clone of a results repository.

    Paths and facts of this machine are removed; numbers, answers and the identity of the run stay. A folder without the
    marker becomes a repository if it is new or empty. Nothing is sent anywhere.

    Args:
        samples: also copy the sample files.

    Returns:
        The files written; the last is the text of the pull request, which is beside the repository's files and should
        not be committed.

    Raises:
        EditingError: for results that ``lm-edit results check`` would refuse, a folder that is something else, one
            whose places are links, and results that are there already.
    """
    root = check_writable_folder(root)
    files = read_result_files(paths)
    for file in files:
        _refuse(file, samples)
    if (root / MARKER).is_file():
        read_marker(root)
    elif root.is_dir() and any(root.iterdir()):
        raise EditingError(
            f"{root} is no results repository: it has no {MARKER}. Name a clone of one, or a new folder."
        )
    planned = {file.path: _place(root, file) / file.path.name for file in files}
    for file in files:
        _refuse_taken(root, file, planned)
    table = comparison([file.path for file in files])
    written = []
    for file in files:
        place = planned[file.path].parent
        place.mkdir(parents=True, exist_ok=True)
        written.append(_write(planned[file.path], _public(file.content)))
        for task in file.tasks if samples else ():
            if file.sample_file(task) is not None:
                target = place / f"samples_{task}_{file.date_id}.jsonl"
                write_atomically(target, json_lines(row for _, row in file.samples(task)))
                written.append(target)
    if not (root / MARKER).is_file():
        written.append(_write(root / MARKER, {"layout": LAYOUT}))
    write_atomically(root / MESSAGE, _message(files, table))
    return [*written, root / MESSAGE]


def read_marker(root: Path) -> None:
    """Check the marker of a repository.

    Raises:
        EditingError: for another layout.
    """
    content = read_json(root / MARKER, "marker of a results repository")
    layout = content.get("layout") if isinstance(content, Mapping) else None
    if layout != LAYOUT:
        raise EditingError(f"{root / MARKER}: layout {layout!r} is unknown; this release reads layout {LAYOUT}.")


def _refuse(file: ResultFile, samples: bool) -> None:
    """Refuse a file that the check of the repository would refuse."""
    if not _NAME.fullmatch(file.path.name):
        raise EditingError(f"{file.path}: its name is not that of lm-eval, results_<date>.json; keep that name.")
    if found := check_file(file.path).problems:
        more = f" (and {len(found) - 1} more, see lm-edit results check)" if len(found) > 1 else ""
        raise EditingError(f"{file.path} cannot be submitted: {found[0].text}{more}")
    sizes = [file.path, *(file.sample_file(task) for task in file.tasks if samples)]
    if large := [path for path in sizes if path is not None and path.stat().st_size > MAX_FILE_BYTES]:
        raise EditingError(
            f"{large[0]} has more than {MAX_FILE_BYTES / 1e6:g} MB, which the repository does not accept; leave out "
            "the samples with --without-samples."
        )


def _refuse_taken(root: Path, file: ResultFile, planned: Mapping[Path, Path]) -> None:
    """Refuse a file whose place is taken or leads elsewhere, and a result that another file has."""
    target = planned[file.path]
    above = [part for part in target.parents if part != root and part.is_relative_to(root)]
    if link := next((part for part in above if part.is_symlink()), None):
        raise EditingError(f"{link} is a link, so that files would be written elsewhere; links are not accepted.")
    there = [path for path in sorted(target.parent.glob("results_*.json")) if path.is_file()]
    others = [source for source, place in planned.items() if source != file.path and place.parent == target.parent]
    own = {*identities(file.path)}
    same = [other for other in (*there, *others) if planned.get(other) == target or own & {*identities(other)}]
    if os.path.lexists(target) or same:
        raise EditingError(f"{[*same, target][0]} has results of {file.path}; results are added, never replaced.")


def identities(path: Path) -> Iterator[tuple[str, ...]]:
    """What tells the results of a file from all others, the task first; nothing for an unreadable file."""
    try:
        rows = list(result_rows(read_result_file(path)))
    except EditingError:
        return  # reported with the file
    yield from dict.fromkeys((str(row["task"]), *(str(row[name]) for name in IDENTITY)) for row in rows)


def unreadable(root: Path) -> Iterator[tuple[Path, str]]:
    """Yield what must not even be read, as the files of strangers may be links to devices: links, and large files."""
    for path in (root / FOLDER, *sorted(root.rglob("*"))):
        if not path.is_relative_to(root / FOLDER) and not path.name.startswith(("results_", "samples_")):
            continue
        if path.is_symlink():
            yield path, "links are not accepted."
        elif path.is_file() and path.stat().st_size > MAX_FILE_BYTES:
            yield path, f"the file has more than {MAX_FILE_BYTES / 1e6:g} MB."


def misplaced(root: Path) -> Iterator[tuple[Path, str]]:
    """Yield the misplaced files of a repository, each with the reason; see also :func:`unreadable`."""
    for path in sorted((root / FOLDER).rglob("*")):
        if path.is_symlink() or path.is_dir() or path.stat().st_size > MAX_FILE_BYTES:
            continue
        elif path.name.startswith("results_") and path.suffix == ".json":
            yield from ((path, text) for text in _wrong_place(root, path))
        elif not (path.name.startswith("samples_") and path.suffix == ".jsonl"):
            yield path, "neither results nor samples of lm-eval."
        elif not any(path.parent.glob("results_*.json")):
            yield path, "samples without their result file."
    for path in sorted(root.rglob("results_*.json")):
        if not path.is_relative_to(root / FOLDER) and not path.is_symlink():
            yield path, f"results belong below {FOLDER}/."


def _wrong_place(root: Path, path: Path) -> Iterator[str]:
    try:
        file = read_result_file(path)
    except EditingError:
        return  # reported with the file
    if path.parent != _place(root, file):
        yield f"the folder of this run is {_place(root, file).relative_to(root).as_posix()}."
    if any(name in file.content for name in PRIVATE):
        yield "facts about a machine; prepare the file with lm-edit results submit."


def _place(root: Path, file: ResultFile) -> Path:
    facts = file.facts
    return root / FOLDER / slug(facts.model) / f"{facts.name}__{facts.run}"


def _public(content: Mapping[str, Any]) -> dict[str, Any]:
    """The content of a result file without folders and facts of the machine."""
    public = {key: value for key, value in content.items() if key not in PRIVATE}
    configs = {}
    for task, config in content["configs"].items():
        metadata = dict(config.get("metadata") or {})
        if isinstance(yaml := metadata.get("config_source"), str):
            metadata["config_source"] = "/".join(PurePath(yaml).parts[-2:])
        configs[task] = {**portable(config), "metadata": portable(metadata)}
    config = portable(content["config"])
    if digests := place_digests(content["config"]):  # keep models apart whose folders have one last name
        config[PLACE_DIGESTS] = digests
    if isinstance(arguments := content["config"].get("model_args"), str):
        pairs = portable(model_arguments(arguments)).items()
        config["model_args"] = ",".join(f"{name}={value}" for name, value in pairs)
    return public | {"config": config, "configs": configs}


def _message(files: list[ResultFile], table: Comparison) -> str:
    """Title and body of the pull request."""
    names = dict.fromkeys(file.facts.name for file in files)
    lines = [f"# Results of {', '.join(names)}", "", *markdown_table(table.rows), ""]
    lines += [line for note in table.notes for line in (escape_cell(note), "")]
    lines.append(
        "Prepared with `lm-edit results submit`, which scores nothing again. `lm-edit results check .` checks it."
    )
    return "\n".join(lines) + "\n"


def _write(path: Path, content: Mapping[str, Any]) -> Path:
    write_atomically(path, json_text(content, indent=2) + "\n")
    return path
