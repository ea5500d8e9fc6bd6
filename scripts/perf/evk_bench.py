"""Time and memory of EVK-Bench's 2,000 x 3 instances under one edit.

    python scripts/perf/evk_bench.py --data counterfact-edit.json --prompts counterfact_flat   # the demo model
    python scripts/perf/evk_bench.py --data multi_counterfact.json --prompts counterfact --pretrained /path/or/hub-id

The edit is a random rank-one update, loaded from a file, so that only the benchmark is measured: both models read every
instance once. Prints seconds, seconds of processor time, and how much memory the run needs above the loaded model; the
last line is machine-readable.
"""

from __future__ import annotations

import argparse
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

TASK = "counterfact_evk_es"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="file with the prompts")
    parser.add_argument("--prompts", default="counterfact", help="benchmark that reads it")
    parser.add_argument("--num-prompts", type=int, default=2000)
    parser.add_argument("--pretrained")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()

    import lm_eval
    import torch
    from lm_eval.tasks import TaskManager

    from edit_hooks.lm.model import EditedHFLM

    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as folder:
        model = {name: getattr(args, name) for name in ("pretrained", "dtype", "device") if getattr(args, name)}
        edit = Path(folder) / "edit.safetensors"
        random_edit(EditedHFLM(**model, mode="none", store="off")).save(edit)
        lm = EditedHFLM(**model, load_edit=str(edit), store="off")
        lm.load()
        settings = {"data": args.data, "evk_prompts": args.prompts, "evk_num_prompts": args.num_prompts}
        manager = TaskManager(metadata={**settings, "load_edit": str(edit)}, include_path=str(tasks_folder()))
        loaded, began, cpu = peak_mebibytes(), time.perf_counter(), time.process_time()
        results = lm_eval.simple_evaluate(model=lm, tasks=[TASK], task_manager=manager, bootstrap_iters=0)
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    values = results["results"][TASK]
    print(f"evk_es {values['evk_es,none']:.4f} over {values['evk_es_n,none']} prompts")
    print(
        f"EVK prompts={values['evk_es_n,none']} seconds={seconds:.0f} processor={cpu:.0f} threads={args.threads} "
        f"peak={peak_mebibytes():.0f}MiB loaded={loaded:.0f}MiB"
    )
    return 0


def random_edit(lm: Any) -> Any:
    """A rank-one update in the middle of the model; only shapes are read, no weights."""
    import torch

    from edit_hooks import Delta, Factor
    from edit_hooks.modeling.architectures import architecture_of, is_transposed, map_shape, num_layers

    outline = lm.outline
    name = architecture_of(outline).rewrite_name(num_layers(outline) // 2)
    module = outline.get_submodule(name)
    generator = torch.Generator().manual_seed(0)
    left, right = (0.2 * torch.randn(width, 1, generator=generator) for width in map_shape(module))
    return Delta(factors={name: Factor(left, right, is_transposed(module))}, meta={"editor": "random"})


def tasks_folder() -> Path:
    """Folder of the tasks."""
    import lm_eval_tasks

    return Path(lm_eval_tasks.__path__[0])


def peak_mebibytes() -> float:
    """Largest memory of the process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    sys.exit(main())
