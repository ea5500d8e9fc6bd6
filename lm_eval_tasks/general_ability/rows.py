"""Rows of public data sets: those that AlphaEdit's release evaluates, found again by number and content.

The release holds copies of the rows in pickles. ``data/rows.json`` has the number of each row in the public data set
and a hash of its text instead.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edit_hooks.utils.errors import EditingError, first_line
from edit_hooks.utils.logs import get_logger
from edit_hooks.utils.storage.files import sha256_of, user_path
from edit_hooks.utils.storage.json_io import read_json, read_rows
from lm_eval_tasks.common.records.benchmark import all_benchmarks, without_foreign_data
from lm_eval_tasks.common.records.dataset import DATA_HINT, DEFAULT_REVISION, HUB, MINI, Source, choose_data, named_set
from lm_eval_tasks.common.records.published import DataFiles, read_records
from lm_eval_tasks.common.settings import DATA_REVISION, Settings

logger = get_logger("lm_eval.editing_tasks")

FOLDER = Path(__file__).parent / "data"
Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class RowSource:
    """Where the rows of a task are.

    Attributes:
        name: of the selection in ``data/rows.json``, and of the file ``<name>.jsonl`` in a folder given as ``data=``.
        hub_id, subset, split: the public data set.
        fields: the fields of a row that its prompt and its label need.
        mini: embedded sample.
    """

    name: str
    hub_id: str
    subset: str
    split: str
    fields: Sequence[str]
    mini: str

    def load(self, settings: Settings) -> tuple[list[Row], dict[str, Any]]:
        """The rows of the chosen data, and their origin for the results.

        ``data`` and ``data_revision`` of a benchmark whose edits the run makes are not those of these rows, which then
        come from the default.

        Raises:
            EditingError: for data that cannot be reached, and for rows that are missing or differ from the published.
        """
        settings = self._own_settings(settings)
        data = choose_data(settings)
        if data == MINI:
            path = FOLDER / self.mini
            rows = [row for _, row in read_rows(path, "sample")]
            return rows, {"data": MINI, "file": path.name, "sha256": sha256_of(path), "records": len(rows)}
        if data == HUB:
            revision = DATA_REVISION.read(settings) or DEFAULT_REVISION
            found, origin = self._download(revision), {"hub_id": self.hub_id, "revision": revision, "split": self.split}
        else:
            path = self._search(user_path(data, "data"))
            found, origin = [row for _, row in read_rows(path, "file of rows")], {"sha256": sha256_of(path)}
        rows = self.select(found, str(data))
        return rows, {"data": str(data), **origin, "records": len(rows)}

    @property
    def file(self) -> str:
        """Name of the file of these rows in a folder given as ``data=``."""
        return f"{self.name}.jsonl"

    @property
    def title(self) -> str:
        """Name for messages."""
        return f"EditGLUE ({self.name})"

    def _own_settings(self, settings: Settings) -> Settings:
        """The settings without ``data`` and ``data_revision`` of another benchmark or task; a warning names them."""
        own = without_foreign_data(settings, Source(title=self.title, hub_id=self.hub_id, files=(self.file,)))
        data = choose_data(own)
        if chosen := named_set(data):
            raise EditingError(f"data={data}: no benchmark has a set {chosen[1]!r}. {self.title} has none. {DATA_HINT}")
        if data not in (MINI, HUB) and (reason := self._why_foreign(user_path(data, "data"))):
            own = {key: value for key, value in own.items() if key != "data"}
            logger.warning("data=%s %s; %s uses data=%s.", data, reason, self.title, choose_data(own))
        revision, edits = DATA_REVISION.read(own), str(own.get("edits"))
        if choose_data(own) == HUB and revision not in (None, DEFAULT_REVISION) and edits in all_benchmarks():
            own = {key: value for key, value in own.items() if key != DATA_REVISION.name}
            logger.warning(
                "data_revision=%s is that of the data of edits=%s; %s reads revision %s and checks every row.",
                revision, edits, self.title, DEFAULT_REVISION,
            )  # fmt: skip
        return own

    def _why_foreign(self, path: Path) -> str:
        """Why a file cannot be one of these rows; "" if it can be."""
        if path.name == self.file or not path.is_file():
            return ""
        if path.name.removesuffix(".jsonl") in _selections():
            return "is the file of another task"
        # An own copy under another name has these fields. The file of a run's edits, however it is named, has not.
        rows = (row for _, row in read_records(DataFiles([path], {}), "file of rows"))
        if any(isinstance(row, Mapping) and set(self.fields) <= set(row) for row in rows):
            return ""
        return f"has no row with {', '.join(self.fields)}"

    def select(self, rows: Iterable[Row], where: str) -> list[Row]:
        """The published rows in their published order.

        Raises:
            EditingError: if one is missing or has another text.
        """
        selection = _selections()[self.name]
        by_key = {self._key(row, numbered="idx" in selection[0]): row for row in rows}
        chosen = []
        for entry in selection:
            key = entry.get("idx", entry["text"])
            row = by_key.get(key)
            if row is None or self.text_hash(row) != entry["text"]:
                problem = "is missing" if row is None else "has another text than the published one"
                raise EditingError(
                    f"{where}: row {key} of {self.hub_id} {self.subset} ({self.split}) {problem}; {self.name} needs "
                    f"the {len(selection)} rows that the release evaluates. {DATA_HINT}"
                )
            chosen.append(row)
        return chosen

    def text_hash(self, row: Row) -> str:
        """Hash of the letters and digits of a row: copies of a data set differ in white space and quotation marks."""
        texts = [row.get(name) for name in self.fields]
        flat = [part for text in texts for part in (text if isinstance(text, list) else [text])]
        letters = "\n".join("".join(filter(str.isalnum, str(text).lower())) for text in flat)
        return hashlib.sha256(letters.encode()).hexdigest()[:16]

    def _key(self, row: Row, numbered: bool) -> int | str:
        if not numbered:
            return self.text_hash(row)
        number = row.get("idx", row.get("index"))  # the release names it so in one of its files
        return int(number) if str(number).isdigit() else str(number)

    def _download(self, revision: str) -> Iterable[Row]:
        from datasets import load_dataset

        try:
            return load_dataset(self.hub_id, self.subset, split=self.split, revision=revision)
        except Exception as error:  # the hub client raises errors of several libraries
            raise EditingError(
                f"the Hugging Face dataset {self.hub_id} ({self.subset}, {self.split}, revision {revision}) cannot be "
                f"reached: {first_line(error)}. {DATA_HINT}"
            ) from error

    def _search(self, place: Path) -> Path:
        path = next(iter(sorted(place.rglob(self.file))), place) if place.is_dir() else place
        if not path.is_file():
            raise EditingError(f"data={place}: there is no {self.file} with the rows of {self.hub_id}. {DATA_HINT}")
        return path


@functools.cache
def _selections() -> dict[str, list[dict[str, Any]]]:
    """Name -> number (where the data set has numbers) and text hash of the published rows, in order."""
    return {
        name: [{"idx": row[0], "text": row[1]} if isinstance(row, list) else {"text": row} for row in rows]
        for name, rows in read_json(FOLDER / "rows.json").items()
    }
