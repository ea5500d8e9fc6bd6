"""A stand-in for ``python -m lm_eval``: writes result files in a fraction of a second, for tests of schedulers.

Its scores are a function of the settings, so that sweeps can be compared. Every start and end is a line of a file.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

MAIN = """
import hashlib, json, os, sys, time
from pathlib import Path

arguments = sys.argv[2:]
options = dict(zip(arguments[::2], arguments[1::2]))
args = json.loads(options["--model_args"])
log = Path(os.environ["FAKE_LOG"])
content = [args, options["--tasks"], options.get("--metadata"), options.get("--limit")]
name = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def note(what):
    with log.open("a") as file:
        shares = [os.environ.get(key) for key in ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")]
        file.write(json.dumps([what, name, *shares, os.getpid()]) + "\\n")


note("start")
print("evaluating", args, flush=True)
time.sleep(float(os.environ.get("FAKE_SECONDS", "0.05")))
if args.get("editor") in os.environ.get("FAKE_FAILING", "").split(","):
    print("the last words of", args["editor"])
    sys.exit(3)
folder = Path(options["--output_path"]) / "fake"
folder.mkdir(parents=True, exist_ok=True)
tasks = options["--tasks"].split(",")
scores = {task: int(hashlib.sha256((name + task).encode()).hexdigest()[:6], 16) / 16**6 for task in tasks}
results = {
    "results": {task: {"alias": task, "efficacy_prob,none": score} for task, score in scores.items()},
    "configs": {task: {"task": task} for task in tasks},
    "versions": {task: 1.0 for task in tasks},
    "config": {"model_args": args, "edited_hf": {key: args.get(key) for key in ("editor", "mode")}},
    "n-samples": {task: {"original": 10, "effective": 2} for task in tasks},
    "total_evaluation_time_seconds": "6.0",
    "date": 1.7e9,
}
if args.get("editor") in os.environ.get("FAKE_REFUSING", "").split(","):
    for task in tasks[: int(os.environ.get("FAKE_REFUSED_TASKS", "9"))]:
        reasons = {"the edit has no relation id": 2, "other": 1}
        results["results"][task] |= {"efficacy_prob,none": None, "efficacy_prob_n,none": 0}
        results["results"][task] |= {"efficacy_prob_failed,none": 2}
        results["results"][task] |= {"unscored,none": 2, "unscored_reason,none": json.dumps(reasons)}
for task in tasks:
    results["results"][task]["edit,none"] = json.dumps({"edits": 2, "failed": 0, "seconds_per_edit": 1.5})
(folder / "results_2026-01-01T00-00-00.000000.json").write_text(json.dumps(results))
for number, task in enumerate(tasks):
    if number == 0 or "FAKE_TORN" not in os.environ:
        rows = [json.dumps({"doc_id": doc, "efficacy_prob": scores[task]}) for doc in range(2)]
        (folder / f"samples_{task}_2026-01-01T00-00-00.000000.jsonl").write_text("\\n".join(rows) + "\\n")
note("end")
"""


def install(folder: Path) -> dict[str, str]:
    """Write the package; return the variables under which ``python -m lm_eval`` is this one."""
    package = folder / "lm_eval"
    package.mkdir(parents=True)
    real = importlib.util.find_spec("lm_eval")
    assert real and real.origin
    # All but the command is the real package, which workers of clusters import.
    (package / "__init__.py").write_text(f"__path__.append({str(Path(real.origin).parent)!r})\n", encoding="utf-8")
    (package / "__main__.py").write_text(MAIN, encoding="utf-8")
    return {"FAKE_LOG": str(folder / "executions.jsonl")}


def executions(variables: dict[str, str]) -> list[list[Any]]:
    """The lines so far: ``start`` or ``end``, identity of the run, threads, GPUs, process."""
    log = Path(variables["FAKE_LOG"])
    return [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()] if log.is_file() else []
