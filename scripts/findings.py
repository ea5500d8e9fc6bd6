"""Findings of the papers on the demo model: run them, and make the tables of docs/explain/findings.md.

    python scripts/findings.py --out results/findings            # runs what is missing: hours on two CPU cores
    python scripts/findings.py --out results/findings --summary  # adds the finished runs to docs/_data/findings.json
    python scripts/findings.py                                   # prints the tables of that file, which the site shows

scripts/findings.yaml lists findings, runs, rows and differences. Every run is one evaluation in this process and ends
as one JSON file with the score of every case; finished files are never computed again.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from measure_editors import commit, evaluate

ROOT = Path(__file__).resolve().parents[1]
PLAN = ROOT / "scripts" / "findings.yaml"
SUMMARY = ROOT / "docs/_data/findings.json"


class Estimate(NamedTuple):
    """A mean over cases, its standard error (sample standard deviation / sqrt(n)), and n."""

    mean: float
    error: float | None
    number: int

    @classmethod
    def of(cls, values: Sequence[float | None]) -> Estimate | None:
        """The estimate from the scored cases; ``None`` without any."""
        scored = [value for value in values if value is not None]
        if not scored:
            return None
        number = len(scored)
        mean = math.fsum(scored) / number
        if number < 2:
            return cls(mean, None, number)
        variance = math.fsum((value - mean) ** 2 for value in scored) / (number - 1)
        return cls(mean, math.sqrt(variance / number), number)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, summarize or print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder of the runs; without it, the tables are printed")
    parser.add_argument("--findings", nargs="+", help="names of findings; default: all")
    parser.add_argument("--runs", nargs="+", help="names of runs; default: all")
    parser.add_argument("--limit", type=int, help="first cases of each task only, to try the command")
    parser.add_argument("--summary", action="store_true", help="add the finished runs to docs/_data/findings.json")
    args = parser.parse_args(arguments)
    plan = yaml.safe_load(PLAN.read_text(encoding="utf-8"))
    runs = {run for finding in plan.values() for run in finding["runs"]}
    for option, names, known in (("--findings", args.findings, plan.keys()), ("--runs", args.runs, runs)):
        if unknown := set(names or ()) - known:
            parser.error(f"{option}: no {', '.join(sorted(unknown))}; there are {', '.join(sorted(known))}")
    if args.out is None:
        print("\n\n".join(f"{name}\n\n{tables(name)}" for name in plan))
        return 0
    if args.summary:
        kept = json.loads(SUMMARY.read_text(encoding="utf-8")) if SUMMARY.exists() else {}
        summary = {
            name: merged(finding, kept.get(name, {}), summarize(finding, args.out / name))
            for name, finding in plan.items()
        }
        SUMMARY.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
        return 0
    for name, finding in plan.items():
        for run, options in finding["runs"].items():
            if (not args.findings or name in args.findings) and (not args.runs or run in args.runs):
                execute(args.out / name / f"{run}.json", options, finding["tasks"], args.limit)
    return 0


def execute(path: Path, options: Mapping[str, Any], tasks: Sequence[str], limit: int | None) -> None:
    """Run one evaluation unless its file exists."""
    if path.exists():
        return
    print(f"{path.parent.name}: {path.stem}", flush=True)
    record = evaluate(dict(options), list(tasks), {}, limit) | {"commit": commit(), "limit": limit}
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".part")
    partial.write_text(json.dumps(record, default=str, indent=1), encoding="utf-8")
    partial.replace(path)


def summarize(finding: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Estimates of the rows and of the differences by run, and the circumstances of the runs."""
    runs: dict[str, Any] = {}
    scores_of: dict[str, dict[str, Sequence[float | None]]] = {}
    for run in finding["runs"]:
        path = folder / f"{run}.json"
        if not path.exists():
            continue
        record = json.loads(path.read_text(encoding="utf-8"))
        if not record["runs"]:
            raise SystemExit(f"{path}: no edit could be made: {next(iter(record['failed'].values()))}")
        evaluated = record["runs"][0]
        scores = {key: record["scores"][task][column] for key, (_, task, column) in finding["rows"].items()}
        scores_of[run] = scores
        runs[run] = {
            "rows": {key: Estimate.of(values) for key, values in scores.items()},
            "differences": {
                name: Estimate.of(differences(scores[first], scores[second]))
                for name, (first, second) in finding["differences"].items()
            },
            "commit": record["commit"],
            "limit": record["limit"],
            "options": evaluated["options"],
            "versions": evaluated["versions"],
            "weights": evaluated["weights"],
        }
    for run, base in finding.get("against", {}).items():
        if {run, base} <= runs.keys():
            compared = {
                key: Estimate.of(differences(scores_of[run][key], scores_of[base][key])) for key in finding["rows"]
            }
            runs[run]["against"] = {"run": base, "rows": compared}
    return runs


def merged(finding: Mapping[str, Any], kept: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """The runs of an earlier summary, which may be from another machine, and the new ones, in the order of the plan."""
    return {run: new.get(run, kept.get(run)) for run in finding["runs"] if run in new or run in kept}


def differences(first: Sequence[float | None], second: Sequence[float | None]) -> list[float | None]:
    """Case by case; ``None`` where one of the two has no score."""
    return [a - b if a is not None and b is not None else None for a, b in zip(first, second, strict=True)]


def tables(name: str) -> str:
    """The tables of a finding from the kept numbers."""
    plan = yaml.safe_load(PLAN.read_text(encoding="utf-8"))
    return render(plan[name], json.loads(SUMMARY.read_text(encoding="utf-8")).get(name, {}))


def render(finding: Mapping[str, Any], runs: Mapping[str, Any]) -> str:
    """The tables of rows and of differences, and a line about the runs."""
    if not runs:
        return "No run of this finding is finished."
    header = [f"| | {' | '.join(f'`{run}`' for run in runs)} |", f"|---|{'---|' * len(runs)}"]
    rows = [
        f"| {label.replace(' | ', ', ')} | {' | '.join(cell(run['rows'][key]) for run in runs.values())} |"
        for key, (label, *_) in finding["rows"].items()
    ]
    compared = [
        f"| {name} | {' | '.join(cell(run['differences'][name], sign='+') for run in runs.values())} |"
        for name in finding["differences"]
    ]
    lines = [*header, *rows, "", "Differences, case by case:", "", *header, *compared, ""]
    return "\n".join([*lines, *between_runs(finding, runs), circumstances(runs)])


def between_runs(finding: Mapping[str, Any], runs: Mapping[str, Any]) -> list[str]:
    """The table of differences between runs, if any are compared."""
    pairs = {run: record["against"] for run, record in runs.items() if "against" in record}
    if not pairs:
        return []
    titles = [f"`{run}` minus `{against['run']}`" for run, against in pairs.items()]
    rows = [
        f"| {label.replace(' | ', ', ')} | {' | '.join(cell(one['rows'][key], sign='+') for one in pairs.values())} |"
        for key, (label, *_) in finding["rows"].items()
    ]
    return [f"| | {' | '.join(titles)} |", f"|---|{'---|' * len(pairs)}", *rows, ""]


def cell(estimate: Sequence[Any] | None, sign: str = "") -> str:
    """Mean ± standard error, or a dash."""
    if estimate is None:
        return "-"
    mean, error, number = estimate
    return f"{mean:{sign}.3f} ± {error:.3f}" if error is not None else f"{mean:{sign}.3f} (n = {number})"


def circumstances(runs: Mapping[str, Any]) -> str:
    """Numbers of cases, commits and versions."""
    numbers = sorted({estimate[2] for run in runs.values() for estimate in run["rows"].values() if estimate})
    limits = sorted({str(run["limit"]) for run in runs.values() if run["limit"] is not None})
    commits = sorted({str(run["commit"])[:8] + str(run["commit"])[40:] for run in runs.values()})
    versions = sorted({f"{name} {number}" for run in runs.values() for name, number in run["versions"].items()})
    limited = f" (limit {', '.join(limits)})" if limits else ""
    span = f"{numbers[0]} to {numbers[-1]}" if numbers[0] != numbers[-1] else str(numbers[0])
    return f"Cases per cell: {span}{limited}. Commits {', '.join(commits)}; {', '.join(versions)}."


if __name__ == "__main__":
    sys.exit(main())
