"""Finished runs of measure_editors.py: files in a folder, and the lines of docs/_data/measured_editors.jsonl.

A run ends as a file in the folder of ``--out``, with the scores of all columns. ``--keep`` adds a line for it to the
file that is part of the project: settings, versions, and the score of every case in the columns of the tables. A run
that has a line is not repeated, so the measurement can be continued elsewhere.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from edit_hooks.utils.storage.files import write_atomically

KEPT = Path(__file__).resolve().parents[1] / "docs/_data/measured_editors.jsonl"
VERSION = 2  # of the records; a change makes everything be measured again
UNEDITED = "unedited"
NUM_STREAMED = 48  # cases of the part stream48: the first ones of both samples
# part -> (heading, task, metric)
SAMPLE_COLUMNS = (
    ("ES", "bake_es", "efficacy_prob"),
    ("GS", "bake_gs", "paraphrase_prob"),
    ("LS", "bake_ls", "neighborhood_prob"),
    ("RQS", "bake_rq", "reverse_qa_prob"),
    ("RJS", "bake_rj", "reverse_judgment_prob"),
    ("WILD EM", "qaedit_wild_reliability", "efficacy_wild_em"),
)
COLUMNS = {
    "single": SAMPLE_COLUMNS,
    "stream48": SAMPLE_COLUMNS,
    "stream200": (
        ("ES", "counterfact_flat_es", "efficacy_prob"),
        ("GS", "counterfact_flat_gs", "paraphrase_prob"),
        ("LS", "counterfact_flat_ls", "neighborhood_prob"),
    ),
}


Key: TypeAlias = tuple[str, str, int]  # row, part, seed


@dataclass(frozen=True)
class Row:
    """An editor with settings, as part of a group of the table."""

    group: str
    editor: str
    settings: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The name on the command line and in file names."""
        return f"{self.group}/{self.editor}" if self.group else self.editor

    @property
    def is_unedited(self) -> bool:
        """Whether this is the row of the unedited model."""
        return self.editor == UNEDITED


@dataclass
class Finished:
    """All finished runs.

    Attributes:
        kept: lines of the project's file, by row, part and seed.
        new: files of a folder, likewise.
    """

    kept: dict[Key, dict[str, Any]]
    new: dict[Key, dict[str, Any]]

    @classmethod
    def read(cls, out: Path | None, kept: Path = KEPT, limit: int | None = None) -> Finished:
        """Read the kept lines and the folder of the runs.

        Records of another version, or of another number of cases, count as missing.

        Args:
            limit: first cases of each task only; ``None``: all, as in every kept line.
        """

        def current(records: Iterable[dict[str, Any]]) -> dict[Key, dict[str, Any]]:
            wanted = [shortened(one) for one in records if one["version"] == VERSION and one["limit"] == limit]
            return {(one["row"], one["part"], one["seed"]): one for one in wanted}

        lines = kept.read_text(encoding="utf-8").splitlines() if kept.exists() else []
        files = sorted(out.glob("*.json")) if out is not None else []
        return cls(current(map(json.loads, lines)), current(json.loads(file.read_text("utf-8")) for file in files))

    def get(self, row: Row, part: str, seed: int) -> dict[str, Any] | None:
        """The record of a run, unless the row had other settings then."""
        found = [records.get((row.name, part, seed)) for records in (self.new, self.kept)]
        return next((one for one in found if one is not None and one["settings"] == dict(row.settings)), None)

    def of(self, row: Row, part: str) -> dict[int, dict[str, Any]]:
        """Seed -> record, of one part of a row."""
        seeds = sorted({seed for name, found, seed in {**self.kept, **self.new} if (name, found) == (row.name, part)})
        return {seed: record for seed in seeds if (record := self.get(row, part, seed)) is not None}

    def draws_nothing(self, row: Row, part: str) -> bool:
        """Whether four edits, likelihoods included, were the same to the last bit under two seeds."""
        trial = self.get(row, "trial", 0)
        return trial is not None and not trial["draws"]["single" if part == "single" else "stream"]

    def keep(self, rows: Iterable[Row], path: Path = KEPT) -> int:
        """Write the kept lines and those of the rows' new runs, in the order of the rows; return the number of lines.

        A kept line stays unless the same run was made again with the settings that the row has now.
        """
        known = {row.name: row for row in rows}
        chosen = []
        for key in {**self.kept, **self.new}:
            name, part, seed = key
            record = self.get(known[name], part, seed) if name in known else None
            if (line := record or self.kept.get(key)) is not None:
                chosen.append(line)
        place = {name: number for number, name in enumerate(known)}
        parts = ("trial", *COLUMNS, "seconds")
        chosen.sort(key=lambda one: (place.get(one["row"], len(place)), parts.index(one["part"]), one["seed"]))
        write_atomically(path, "".join(json.dumps(one) + "\n" for one in chosen))
        return len(chosen)


def shortened(record: dict[str, Any]) -> dict[str, Any]:
    """The record with the columns of the tables only, and one configuration for all its evaluations.

    Where the editor could use no edit of the part, there is the reason instead of a configuration.
    """
    if "runs" not in record:  # a trial, a timing, or a kept line
        return record
    short = {key: value for key, value in record.items() if key not in ("scores", "failed", "runs")}
    if record["runs"]:
        run = record["runs"][0]
        short |= {key: run[key] for key in ("editor_config", "code_fingerprint", "versions", "weights")}
        if "device" in run:  # not in files of earlier runs, all of them on the CPU
            short["device"] = run["device"]
    else:
        short["reason"] = next(iter(record["failed"].values()))
    short["warnings"] = [one["warnings"] for one in record["runs"] if one["warnings"]]
    short["scores"] = {
        heading: [None if score is None else round(score, 6) for score in record["scores"][task][metric]]
        for heading, task, metric in COLUMNS[record["part"]]
    }
    return short
