"""Compare the verdicts of a vLLM server (``server=``) with those of this process, case by case.

    python scripts/compare_served.py --pretrained meta-llama/Llama-3.1-8B-Instruct --server http://localhost:8000/v1

Needs a GPU and the server that docs/guides/serve.md starts. Runs the tasks twice and ends with exit code 1 if fewer
than 99.5 % of the verdicts are equal: 16-bit weights round in another order there, so a few near-ties differ.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from lm_edit import load_documents

TASKS = "bake_es,bake_rq,qaedit_wild_reliability"
LEAST = 0.995


class Difference(NamedTuple):
    """A verdict that differs: task, case, metric, and its values here and on the server."""

    task: str
    case: str
    metric: str
    here: float
    there: float


def compare(here: Path, there: Path) -> tuple[int, list[Difference]]:
    """The number of verdicts that both runs have, and those that differ; a verdict is 0 or 1."""
    first, second = dict(_verdicts(here)), dict(_verdicts(there))
    shared = [key for key in first if key in second]
    return len(shared), [Difference(*key, first[key], second[key]) for key in shared if first[key] != second[key]]


def _verdicts(folder: Path) -> Iterator[tuple[tuple[str, str, str], float]]:
    for document in load_documents(folder):
        for metric, value in document.metrics.items():
            if value in (0, 1):
                yield (document.task, f"{document.doc_id} {document.case_id}", metric), float(value)


def run(args: argparse.Namespace, folder: Path, more: str) -> None:
    """One run of lm_eval, unless the folder is there."""
    if folder.exists():
        return
    options = f"pretrained={args.pretrained},editor={args.editor},dtype={args.dtype}{more}"
    words = ["--model", "edited_hf", "--model_args", options, "--tasks", args.tasks, "--limit", str(args.cases)]
    subprocess.run(["lm_eval", *words, "--log_samples", "--output_path", str(folder)], check=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pretrained", required=True)
    parser.add_argument("--server", required=True)
    parser.add_argument("--editor", default="r_rome")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tasks", default=TASKS)
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--out", type=Path, default=Path("runs/served"))
    args = parser.parse_args()
    here, there = args.out / "here", args.out / "there"
    run(args, here, "")
    run(args, there, f",server={args.server}")
    return report(*compare(here, there))


def report(number: int, differing: list[Difference]) -> int:
    """Print the share of equal verdicts and the first ones that differ; the exit code."""
    share = 1 - len(differing) / number if number else 0.0
    print(f"{number - len(differing)} of {number} verdicts are equal ({share:.2%}; at least {LEAST:.1%} are wanted)")
    for one in differing[:20]:
        print(f"{one.task}, document {one.case}, {one.metric}: {one.here:g} here, {one.there:g} on the server")
    return 0 if share >= LEAST else 1


if __name__ == "__main__":
    sys.exit(main())
