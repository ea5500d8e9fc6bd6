"""Files are read, and lines are printed, in one place each: no other code parses, opens or logs on its own."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

from paths import ROOT

PACKAGES = ("edit_hooks", "judges", "lm_eval_tasks", "lm_edit")
METHODS = {"read_text", "read_bytes", "open"}
FUNCTIONS = {"open", "safe_open", "load_file"}
PARSERS = {("json", "load"), ("json", "loads"), ("yaml", "load"), ("yaml", "safe_load"), ("tomllib", "load")}

# file -> why it reads on its own
ALLOWED = {
    "edit_hooks/assets/demo_model.py": "writes a block at a time what a package ships",
    "edit_hooks/assets/gguf_file.py": "the first bytes of a file that transformers reads",
    "edit_hooks/assets/minilm.py": "a file of an installed package",
    "edit_hooks/contract/checks.py": "a round trip in memory",
    "edit_hooks/contract/tiny_models.py": "a tokenizer trained in memory",
    "edit_hooks/base/artifacts/trained_artifact.py": "a checked artifact, tensor by tensor",
    "edit_hooks/in_context/memory_artifact.py": "the configuration of a model in memory",
    "edit_hooks/locate/moments/null_space.py": "a cache; damage is logged and computed again",
    "edit_hooks/locate/moments/stored_matrices.py": "a cache; damage is logged and computed again",
    "edit_hooks/modeling/fingerprint/generation_settings.py": "a round trip in memory",
    "edit_hooks/modeling/memory.py": "the kernel's figures of free memory",
    "edit_hooks/modeling/tensors.py": "the reader of tensors",
    "edit_hooks/store/answer_cache.py": "rows of a cache whose checksums are compared",
    "edit_hooks/training/trainer.py": "the state that the trainer wrote",
    "edit_hooks/modeling/fingerprint/identity.py": "bytes to be hashed",
    "edit_hooks/store/layout.py": "compares the marker's bytes",
    "edit_hooks/utils/storage/files.py": "the reader of text",
    "lm_eval_tasks/report/printing/anomalies.py": "the summary of edits inside the results of this run",
    "edit_hooks/utils/storage/hashing.py": "source code of this package",
    "edit_hooks/utils/storage/pinned_file.py": "downloads, and the digest that it wrote beside one",
    "edit_hooks/utils/storage/sqlite_cache.py": "the first bytes of a database",
    "judges/model/verdict_store.py": "rows of a cache whose checksums are compared",
    "judges/model/writer.py": "rows of a cache whose checksums are compared",
    "lm_eval_tasks/report/printing/printed_table.py": "a cell of the table in memory",
    "lm_eval_tasks/report/model_parts.py": "a round trip in memory",
    "lm_eval_tasks/report/run_facts.py": "a round trip in memory",
    "lm_eval_tasks/startup/saving.py": "cuts a file that this run wrote",
    "judges/backends/openai.py": "a reply of bounded size; faults become a reason",
    "lm_edit/judged_results/replay.py": "a round trip in memory",
    "lm_edit/cli/main.py": "redirects standard output",
    "lm_edit/figures/evk/evk_map.py": "vectors of lm-edit embed, without torch",
    "lm_edit/sweeps/execution/kept_process.py": "logs of runs, and messages between its two processes",
    "lm_edit/sweeps/execution/runs.py": "logs and locks of runs",
    "lm_edit/sweeps/checking/tasks.py": "words in the task files of lm-eval",
    "lm_edit/stats.py": "headers of a cache; damage is logged and skipped",
    "lm_edit/imports/npz_file.py": "the reader of statistics of other projects; no array of objects",
    "lm_edit/imports/torch_file.py": "the reader of plain tensors of torch.save; nothing is executed",
}


@functools.cache
def calls(path: Path) -> list[ast.Call]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [node for node in ast.walk(tree) if isinstance(node, ast.Call)]


def sources() -> Iterator[Path]:
    return (path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py")))


def name_of(call: ast.Call) -> tuple[str, str]:
    """Owner and name of the called function, as in ``("json", "loads")``."""
    if isinstance(call.func, ast.Attribute):
        owner = call.func.value.id if isinstance(call.func.value, ast.Name) else ""
        return owner, call.func.attr
    return "", call.func.id if isinstance(call.func, ast.Name) else ""


def test_files_of_users_are_read_by_the_readers() -> None:
    readers = set()
    for path in sources():
        for call in calls(path):
            is_method, (owner, name) = isinstance(call.func, ast.Attribute), name_of(call)
            if name in (METHODS if is_method else FUNCTIONS) or (owner, name) in PARSERS:
                readers.add(path.relative_to(ROOT).as_posix())
    assert readers - ALLOWED.keys() == set(), "use edit_hooks.utils.storage or modeling.tensors"
    assert ALLOWED.keys() - readers == set(), "these no longer read: drop them from the list"


def test_loggers_come_from_get_logger() -> None:
    own = {path.name for path in sources() if ("logging", "getLogger") in map(name_of, calls(path))}
    assert own == {"logs.py", "training.py", "saving.py"}  # the second sets a level, the third reads lm-eval's messages


def test_verbs_print_through_say() -> None:
    modules = [path for path in sources() if "cli" in path.parts]
    counts = {path.name: sum(name_of(call) == ("", "print") for call in calls(path)) for path in modules}
    printing = {name for name, count in counts.items() if count}
    # The building block, the errors, a traceback in full, and the rows of a Markdown table.
    assert printing == {"command.py", "main.py", "contract.py", "judging.py"} and counts["contract.py"] == 1
