"""Time of answers behind demonstrations, as a ratio to the plain reference path measured in the same run.

    python scripts/perf/demonstrations.py                  # IKE on the demo model, minutes on two CPU cores
    python scripts/perf/demonstrations.py --cases 8 --reference-cases 1 --pretrained /path/or/hub-id --device cuda

Every question of a case stands behind the same 32 demonstrations of IKE. The engine runs what prompts have in common
once; the reference path runs every prompt alone and in full. Both answer the likelihood questions of BAKE (two
candidates each) and free questions of QAEdit; seconds are those of answering, without loading. The last line is
machine-readable:

    DEMONSTRATIONS scored=<ratio of seconds per case> generated=<ratio>
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

TASKS = {"scored": ["bake_es", "bake_gs", "bake_ls", "bake_rq", "bake_rj"], "generated": ["qaedit_wild"]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=4, help="cases that the engine answers")
    parser.add_argument("--reference-cases", type=int, default=1, help="cases that the reference path answers")
    parser.add_argument("--editor", default="ike")
    parser.add_argument("--pretrained")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()

    import torch
    from lm_eval.tasks import TaskManager

    import lm_eval_tasks

    torch.set_num_threads(args.threads)
    metadata = {"population": "all"}  # no question of the unedited model
    manager = TaskManager(metadata=metadata, include_path=lm_eval_tasks.__path__[0], include_defaults=False)
    seconds: dict[tuple[str, str], float] = {}
    for engine, cases in (("reference", args.reference_cases), ("fast", args.cases)):
        lm = load(args, engine)
        answer(lm, manager, ["bake_es"], 1)  # loads the sentence embeddings
        for kind, tasks in TASKS.items():
            seconds[engine, kind] = answer(lm, manager, tasks, cases) / cases
            print(f"{engine} {kind}: {seconds[engine, kind]:.2f} s per case over {cases} cases", flush=True)
    ratios = {kind: seconds["reference", kind] / seconds["fast", kind] for kind in TASKS}
    print("DEMONSTRATIONS " + " ".join(f"{kind}={ratio:.1f}" for kind, ratio in ratios.items()))
    return 0


def load(args: argparse.Namespace, engine: str) -> Any:
    """The model under the editor."""
    from edit_hooks.lm.model import EditedHFLM

    model = {name: getattr(args, name) for name in ("pretrained", "dtype", "device") if getattr(args, name)}
    return EditedHFLM(**model, editor=args.editor, mode="single", engine=engine, store="off")


def answer(lm: Any, manager: Any, tasks: list[str], cases: int) -> float:
    """Seconds of an evaluation of the first cases of tasks."""
    import lm_eval

    began = time.perf_counter()
    lm_eval.simple_evaluate(model=lm, tasks=tasks, task_manager=manager, limit=cases, bootstrap_iters=0)
    return time.perf_counter() - began


if __name__ == "__main__":
    sys.exit(main())
