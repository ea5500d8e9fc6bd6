"""Memory and seconds per step of a long stream on a tiny model, killed and resumed; see README.md."""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from edit_hooks import EditRequest, load_editor
from edit_hooks.base.registry import editor_class
from edit_hooks.contract.subject import contract_settings
from edit_hooks.contract.tiny_models import build_model, build_tokenizer
from edit_hooks.lm.editing.stream import EditStream, Guard
from edit_hooks.lm.options.plan import EditPlan, chunked
from edit_hooks.modeling.fingerprint.identity import model_identity
from edit_hooks.store.store import Store

PAGE = os.sysconf("SC_PAGE_SIZE")
# What makes the edits of a tiny model quick.
QUICK = {"context_templates": ["{}"], "num_steps": 1, "layers": [1]}
HOMES = ("Velm", "Karsk", "Rome", "Paris", "Kyoto", "Lisbon", "London")
OF_EDITORS: dict[str, dict[str, Any]] = {"memit": {"carry_keys": True}}


class Section(NamedTuple):
    """A part of the steps.

    Attributes:
        seconds: of the processor, median per step. memory: of the process at the end. state: tensors carried to the
            next step.
    """

    last_step: int
    seconds: float
    memory: int
    state: int

    def __str__(self) -> str:
        numbers = (
            f"{1e3 * self.seconds:7.2f} ms/step {self.memory / 2**20:8.1f} MiB {self.state / 2**10:9.1f} KiB carried"
        )
        return f"after {self.last_step:6d} steps: {numbers}"


def requests(count: int) -> list[EditRequest]:
    """As many facts with subjects of their own; memories merge neighbors only if their targets agree."""
    return [
        EditRequest(prompt="The home of {} is", subject=f"Person {number}", target_new=HOMES[number % len(HOMES)])
        for number in range(count)
    ]


def stream_of(editor_name: str, settings: dict[str, Any], facts: list[EditRequest], store: Path | None) -> EditStream:
    """A stream of one fact per step on a tiny Llama."""
    model, tokenizer = build_model("llama"), build_tokenizer("byte_bpe_bos")
    config = {**contract_settings(editor_class(editor_name)), **settings}
    plan = EditPlan(chunked([(fact,) for fact in facts], 1, cumulative=True), cumulative=True)
    return EditStream(
        model,
        tokenizer,
        load_editor(editor_name, config),
        plan,
        None if store is None else Store(store),
        model_identity(model, tokenizer),
        Guard(max_norm_ratio=float("inf"), max_loss_increase=float("inf")),
        quiet=True,
        measure_edits=False,
    )


def measure(stream: EditStream, num_sections: int, kill_at: int | None = None) -> list[Section]:
    """Make all steps.

    Args:
        kill_at: end the process by SIGKILL after this many steps.
    """
    num_steps = len(stream.plan.groups)
    sections: list[Section] = []
    seconds: list[float] = []
    began = time.process_time()

    def after(step: int, _runtime_part: object) -> None:
        nonlocal began
        now = time.process_time()
        seconds.append(now - began)
        if (step + 1) % max(num_steps // num_sections, 1) == 0:
            memory = PAGE * int(Path("/proc/self/statm").read_text().split()[1])
            sections.append(Section(step + 1, statistics.median(seconds), memory, stream.carried_bytes))
            seconds.clear()
        if step + 1 == kill_at:
            sys.stdout.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        began = time.process_time()

    stream.visit(after)
    return sections


def quick_settings(editor: str) -> dict[str, Any]:
    """Those of :data:`QUICK` that the editor has, and of :data:`OF_EDITORS`."""
    known = contract_settings(editor_class(editor))
    return {**{name: value for name, value in QUICK.items() if name in known}, **OF_EDITORS.get(editor, {})}


def resumes(editor: str, whole: EditStream, kill_at: int) -> bool:
    """Whether a process that is killed after a step, and another one that resumes, reach the weights of ``whole``."""
    num_steps = kill_at + max(kill_at // 4, 1)
    facts = [group[0] for group in whole.plan.groups[:num_steps]]
    with tempfile.TemporaryDirectory() as folder:
        options = ["--editor", editor, "--steps", str(num_steps), "--store", folder, "--kill-at", str(kill_at)]
        killed = subprocess.run([sys.executable, __file__, *options], stdout=subprocess.DEVNULL)
        if killed.returncode != -signal.SIGKILL:
            raise RuntimeError(f"the process to be killed ended with {killed.returncode}")
        resumed = stream_of(editor, quick_settings(editor), facts, Path(folder))
        resumed.make()
    return resumed.final_state == whole.state_after(num_steps - 1)


def record_of(args: argparse.Namespace, editor: str, stream: EditStream, sections: list[Section]) -> dict[str, Any]:
    """The measurement of one editor, JSON-able."""
    record: dict[str, Any] = {
        "editor": editor,
        "settings": quick_settings(editor),
        "sections": [section._asdict() for section in sections],
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "versions": {name: version(name) for name in ("torch", "transformers")},
        "cores": os.cpu_count(),
    }
    if args.check_resume:
        record |= {"killed_at": args.check_resume, "resumed": resumes(editor, stream, args.check_resume)}
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--editor", default="alphaedit")
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--sections", type=int, default=10)
    parser.add_argument("--store", type=Path, help="keep the steps there, and resume from it; default: a temporary one")
    parser.add_argument("--kill-at", type=int, help="end by SIGKILL after this many steps; run again to resume")
    parser.add_argument(
        "--check-resume", type=int, help="also: end a process after this many steps, resume, compare the weights"
    )
    parser.add_argument("--results", type=Path, help="JSON file; the measurement replaces that of the editor in it")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        facts, store = requests(args.steps), args.store or Path(folder)
        stream = stream_of(args.editor, quick_settings(args.editor), facts, store)
        sections = measure(stream, args.sections, args.kill_at)
    for section in sections:
        print(section)
    half = sections[len(sections) // 2 :]
    growth = [max(part) / min(part) - 1 for part in zip(*((s.seconds, s.memory) for s in half), strict=True)]
    print(f"LONG_STREAM seconds=+{growth[0]:.1%} memory=+{growth[1]:.1%} state={stream.final_state}")
    if args.results or args.check_resume:
        record = record_of(args, args.editor, stream, sections)
        print("resumed:", record.get("resumed"))
    if args.results:
        kept = json.loads(args.results.read_text()) if args.results.exists() else {}
        args.results.write_text(json.dumps({**kept, args.editor: record}, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
