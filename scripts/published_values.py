"""Write lm_edit/leaderboard/published.json: numbers printed in papers, with the columns of ours that they belong to.

    python scripts/published_values.py FOLDER            # FOLDER has the printed tables, one CSV file each

Which entry a cell belongs to, how far its definition agrees with ours and what differs is in
docs/_data/published_tables.yaml. Cells of entries that agree in nothing, and those that belong to several columns, are
left out. Numbers alone are written, with paper, table, row and column of each.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

ROOT = Path(__file__).resolve().parents[1]
MAP = ROOT / "docs/_data/published_tables.yaml"
TARGET = ROOT / "lm_edit" / "leaderboard" / "published.json"

PAPERS = {"bird": "BIRD", "bake": "BAKE (TMLR)", "wild": "WILD", "evk": "EVK", "thinkedit": "ThinkEdit"}
# One pattern of our tasks and one of our metrics for every printed column. Those of a table are tried in this order.
BAKE = {"bird_t3": "bake_", "bird_t4": "bake_j_", "bake_t5_concept": "bake_concept_"}
BAKE_COLUMNS = {
    "ES": ("es", "efficacy_(?!magnitude)"),
    "EM": ("es", "efficacy_magnitude"),
    "GS": ("gs", "paraphrase_(?!magnitude)"),
    "PS": ("gs", "paraphrase_(?!magnitude)"),
    "PM": ("gs", "paraphrase_magnitude"),
    "LS": ("ls", "neighborhood_(?!magnitude)"),
    "NS": ("ls", "neighborhood_(?!magnitude)"),
    "NM": ("ls", "neighborhood_magnitude"),
    "RQS": ("rq.*", "reverse_qa_(?!magnitude)"),
    "RQM": ("rq", "reverse_qa_magnitude"),
    "RJS": ("rj", "reverse_judgment_(?!magnitude)"),
    "RJM": ("rj", "reverse_judgment_magnitude"),
    "S": ("s", "edit_score_"),
}
EVK_COLUMNS = {
    "cf_eff": ("counterfact_es", "efficacy_prob"),
    "cf_gen": ("counterfact_gs", "paraphrase_prob"),
    "cf_spe": ("counterfact_ls", "neighborhood_prob"),
    "cf_flu": ("counterfact_fluency", "ngram_entropy"),
    "cf_consis": ("counterfact_consistency", "reference_score"),
    "zsre_eff": ("zsre_memit_efficacy", "efficacy_"),
    "zsre_gen": ("zsre_memit_paraphrase", "paraphrase_"),
    "zsre_spe": ("zsre_memit_specificity", "neighborhood_"),
    "evk_ES": ("counterfact_evk_es", "evk_es"),
    "evk_TS": ("counterfact_evk_ts", "evk_ts"),
}
THINKEDIT_COLUMNS = {
    "IFR": ("knowgic", "ifr_sampled"),
    "CKP": ("knowgic", "ckp_sampled"),
    "efficacy": ("knowgic_es", "efficacy_prob"),
    **{f"IFR_{length}": ("knowgic", f"ifr_{length}_sampled") for length in range(1, 6)},
}
KINDS = {
    "rel": ("reliability", "efficacy"),
    "gen": ("generalization", "paraphrase"),
    "loc": ("locality", "neighborhood"),
}
WILD_KIND = {"wild_t1": "rel", "wild_t11": "loc", "wild_t12": "gen"}
WILD_MODELS = {"llama2_7b_chat": "Llama-2-7b-chat", "mistral_7b": "Mistral-7b", "llama3_8b": "Llama-3-8b"}
GRID_EDITORS = ("FT-M", "ROME", "MEMIT", "GRACE", "WISE")
GRID_TASKS = {
    ("teacher forcing", "ground truth length"): "tf",
    ("autoregressive", "ground truth length"): "ar_gold",
    ("autoregressive", "natural stop criteria"): "ar_natural",
}
GRID_INPUTS = {"context-free": "question_only", "context-guided": "qa_inst"}
GRID_METRICS = {"match ratio": "match", "LLM-as-a-Judge": "judge", "exact match": "em"}
STREAMS = {"wild_t9": "1000 edits", "wild_t12": "1000 edits", "wild_t14": "1000 edits", "evk_t1": "1000 edits"}
# Whether these edits are made alone or one after another is not stated.
STREAMS |= {"thinkedit_t5_t6": "21 edits", "thinkedit_appendix_chains": "21 edits"}
UNEDITED = {"(base)", "Pre-edited"}
# Averages over editors are no rows of a leaderboard.
AVERAGES = {"Avg", "Avg.", "Average"}


class Place(NamedTuple):
    """Where a printed value belongs: its row, and patterns of our task and metric."""

    model: str
    editor: str
    task: str
    metric: str


def place_of(table: str, row: Mapping[str, str], column: str) -> Place | None:
    """The place of a printed column, by the form of its table; ``None`` for other columns."""
    model, editor = row.get("model", ""), row.get("editor") or row.get("method") or row.get("technique") or ""
    if table in BAKE or table in ("bake_t3", "bake_t9"):
        name = column.removeprefix("QJ_").removeprefix("J_")
        prefix = column.removesuffix(name)
        folder = {"QJ_": "bake_", "J_": "bake_j_"}.get(prefix) or BAKE[table]
        task, metric = BAKE_COLUMNS[name]
        return Place(model, editor, folder + task, metric)
    if table == "evk_t1" and column in EVK_COLUMNS:
        return Place(model, editor, *EVK_COLUMNS[column])
    if table.startswith("thinkedit_") and column in THINKEDIT_COLUMNS:
        repeated = table == "thinkedit_appendix_chains" and not column.startswith("IFR_")
        return None if repeated else Place(model, editor, *THINKEDIT_COLUMNS[column])
    if column in GRID_EDITORS and "input" in row:
        cell = GRID_TASKS[row["gen_strategy"], row["truncation"]]
        task = f"qaedit_grid_{GRID_INPUTS[row['input']]}_{cell}"
        return Place("Llama-3-8b", column, task, grid_column(row["input"], cell, GRID_METRICS[row["metric"]]))
    if table == "wild_t1":
        return Place("Llama-2-7b-chat", editor, "qaedit_wild_reliability", "efficacy_wild")
    found = re.fullmatch(
        r"(?:(zsre|cf|qaedit)|(llama2_7b_chat|mistral_7b|llama3_8b))_(?:(rel|gen|loc)_)?(syn|wild)", column
    )
    if found is None:
        return None
    _, named_model, kind, protocol = found.groups()
    word, probe = KINDS[kind or WILD_KIND[table]]
    return Place(
        WILD_MODELS.get(named_model, model),
        editor,
        rf"{task_prefix(found[1], row, table)}_{protocol}(_ar)?_{word}",
        f"{probe}_wild" if protocol == "wild" else f"{probe}_(?!wild)",
    )


def grid_column(given: str, cell: str, metric: str) -> str:
    """The pattern of the column of a cell of WILD's grid."""
    is_alone = GRID_INPUTS[given] == "question_only"
    if cell == "ar_natural":
        return f"efficacy_{'gen' if is_alone else 'wild'}_{metric}"
    form = metric if (cell, metric) == ("tf", "match") else f"{cell.removesuffix('_gold')}_{metric}"
    return f"efficacy_{'' if is_alone else 'qa_'}{form}"


def task_prefix(dataset: str | None, row: Mapping[str, str], table: str) -> str:
    name = dataset or row.get("dataset") or "qaedit"
    return {"cf": "counterfact(_flat)?", "COUNTERFACT": "counterfact(_flat)?"}.get(name, name.lower())


def values_of(folder: Path, entry: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The printed values of an entry that belong to exactly one column of ours."""
    for claim in entry.get("cells", ()):
        table = claim["table"]
        with (folder / f"{table}.csv").open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
        for row in rows:
            if not all(matches(row[key], accepted) for key, accepted in claim.get("rows", {}).items()):
                continue
            for column in claim.get("columns") or list(row):
                place = place_of(table, row, column) if is_number(row[column]) else None
                if place is None or place.editor in AVERAGES:
                    continue
                tasks = [task for task in entry["tasks"] if re.fullmatch(place.task, task)]
                metrics = [metric for metric in entry["columns"] if re.match(place.metric, metric)]
                if len(tasks) == len(metrics) == 1:
                    yield {
                        "table": table,
                        "model": place.model,
                        "editor": place.editor,
                        "regime": regime(table, place.editor),
                        "column": column,
                        "task": tasks[0],
                        "metric": metrics[0],
                        "value": round(float(row[column]) / scale(table), 6),
                    }


def regime(table: str, editor: str) -> str:
    return "unedited" if editor in UNEDITED else STREAMS.get(table, "single edits")


def scale(table: str) -> float:
    """Printed values are 100 times ours but in WILD and ThinkEdit."""
    return 1.0 if table.startswith(("wild", "thinkedit")) else 100.0


def is_number(text: str) -> bool:
    return re.fullmatch(r"[+-]?\d+(\.\d+)?", text) is not None


def matches(value: str, accepted: Any) -> bool:
    return value not in accepted["not"] if isinstance(accepted, dict) else value in accepted


def collect(folder: Path) -> dict[str, Any]:
    """The whole file: values by row of a printed table, and what differs by entry."""
    differences: list[str] = []
    rows: dict[tuple[str, ...], dict[str, Any]] = {}
    for benchmark in yaml.safe_load(MAP.read_text(encoding="utf-8")).values():
        for entry in benchmark["tables"]:
            if entry["agreement"] == "none":
                continue
            for value in values_of(folder, entry):
                if entry["differs"] not in differences:
                    differences.append(entry["differs"])
                key = (value["table"], value["model"], value["editor"], value["regime"])
                row = rows.setdefault(
                    key, {**dict(zip(("table", "model", "editor", "regime"), key, strict=True)), "values": []}
                )
                note = differences.index(entry["differs"])
                facts = [value["column"], entry["agreement"], note, entry.get("data", "hub")]
                row["values"].append([value["task"], value["metric"], value["value"], *facts])
    return {"papers": PAPERS, "differs": differences, "rows": [rows[key] for key in sorted(rows)]}


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of the printed tables")
    data = collect(parser.parse_args(arguments).folder)
    rows = ",\n".join(f"  {json.dumps(row, ensure_ascii=False)}" for row in data["rows"])
    head = {name: data[name] for name in ("papers", "differs")}
    TARGET.write_text(
        f'{json.dumps(head, ensure_ascii=False, indent=1)[:-2]},\n "rows": [\n{rows}\n ]\n}}\n', encoding="utf-8"
    )
    print(f"{sum(len(row['values']) for row in data['rows'])} values in {len(data['rows'])} rows: {TARGET}")


if __name__ == "__main__":
    main()
