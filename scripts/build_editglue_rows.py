"""Write lm_eval_tasks/general_ability/data/rows.json from copies of the released row files.

Usage: python scripts/build_editglue_rows.py FOLDER

FOLDER holds sst2.jsonl, mrpc.jsonl, cola.jsonl, rte.jsonl, nli.jsonl and mmlu.jsonl: the rows of the pickles in
glue_eval/dataset of AlphaEdit's release in their order, one JSON object per line. The release keeps the first 10 rows
for few-shot prompts and evaluates the next 100.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from edit_hooks.utils.json_io import read_rows
from lm_eval_tasks.general_ability import editglue, rows

FIRST, NUM_ROWS = 10, 100
TASKS = (editglue.SST2, editglue.MRPC, editglue.COLA, editglue.RTE, editglue.NLI, editglue.MMLU)


def main(folder: Path) -> None:
    lines = []
    for source in (task.source for task in TASKS):
        released = read_rows(folder / f"{source.name}.jsonl", "file of rows")
        entries = []
        for _, row in released[FIRST : FIRST + NUM_ROWS]:
            number = row.get("idx", row.get("index"))
            entries.append(source.text_hash(row) if number is None else [int(number), source.text_hash(row)])
        lines.append(f' "{source.name}": {json.dumps(entries, separators=(",", ":"))}')
    (rows.FOLDER / "rows.json").write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
