"""On a GPU: the contract, edits, streams and answers as on the CPU and as of the reference engine, and their memory.

Skipped without one. Needs no lm-eval (`pytest --noconftest` runs it where that is not installed).
"""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from edit_runs import edits, flat, quick_settings, readings

from edit_hooks import Delta
from edit_hooks.base.job import EditJob
from edit_hooks.base.registry import EDITORS, editor_class
from edit_hooks.contract import batch_checks
from edit_hooks.contract.runner import run_contract
from edit_hooks.contract.subject import EDIT_REQUESTS, Subject, distance
from edit_hooks.contract.tiny_models import build_model
from edit_hooks.lm.editing.cost import GIB, measured
from edit_hooks.lm.editing.stream import EditStream, Guard
from edit_hooks.lm.options.plan import EditPlan, chunked
from edit_hooks.modeling.fingerprint.identity import model_identity
from edit_hooks.store.store import Store

DEVICE = torch.device("cuda", 0)
# CI has no GPU; devices are pretended in tests/contract/test_*_devices.py.
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

ON_THE_MODEL = [name for name in EDITORS if editor_class(name).writes != ("context",)]
OF_BOTH_ENGINES = ["rome", "memit", "pmet", "ft_m", "lora", "mend", "grace", "wise", "kn"]
READ = ["memit", "ft_m", "grace", "wise", "melo", "defer"]
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])

# In nats. In 16 bits, logits of 8 and more are 0.06 apart, and every layer rounds; a wrong edit makes whole nats.
SAME_ANSWER = {torch.float32: 1e-3, torch.bfloat16: 0.25}

subject_of = functools.cache(Subject)


@pytest.mark.parametrize("model_type", ["gpt2", "llama", "gemma3_text"])
@pytest.mark.parametrize("editor", EDITORS)
def test_contract(editor: str, model_type: str) -> None:
    results = list(run_contract(editor, [model_type], device=DEVICE))
    failed = [f"{result.check}: {result.reason}\n{result.details}" for result in results if result.outcome == "failed"]
    assert not failed, "\n".join(failed)


# -- edits -------------------------------------------------------------------------------------------------------------

# Updates are float32, and so are the second moments and the networks behind some of them: sums in another order differ
# by 1e-7, which the solves amplify to 1e-5. A wrong token, mask or step makes more than 1e-2.
SAME_EDIT = 1e-4


# Masks of dropout are drawn on the device of the model: the same distribution, other numbers.
NO_DROPOUT = [("lora", {"kind": kind, "dropout": 0.0}) for kind in ("lora", "adalora")]


@pytest.mark.parametrize(("editor", "more"), [*((name, {}) for name in EDITORS if name != "lora"), *NO_DROPOUT])
def test_edits_are_those_of_the_cpu(editor: str, more: dict[str, object]) -> None:
    here, there = (subject_of(editor, "llama", torch.float64, device) for device in (torch.device("cpu"), DEVICE))
    expected, found = (edits(subject, subject.model, more) for subject in (here, there))
    kinds = ["independent"] * 3 + [f"step {number} of a stream" for number in (1, 2)]
    differences = {
        f"{number}, {kind}": distance(*both)
        for number, (kind, *both) in enumerate(zip(kinds, found, expected, strict=True))
    }
    assert max(differences.values()) < SAME_EDIT, differences


@each_dtype
@pytest.mark.parametrize("editor", OF_BOTH_ENGINES)
def test_engines_make_the_same_edits(editor: str, dtype: torch.dtype) -> None:
    subject = subject_of(editor, "llama", dtype, DEVICE)
    fast, reference = (
        subject.make(**quick_settings(subject), engine=engine).edit(subject.model, subject.tokenizer, EDIT_REQUESTS)
        for engine in ("fast", "reference")
    )
    if dtype == torch.float32:
        differences = list(map(distance, fast, reference))
        assert max(differences) < 1e-3, differences
    for request, *both in zip(EDIT_REQUESTS, fast, reference, strict=True):
        one, other = (subject.target_nll(delta, request) for delta in both)
        assert one == pytest.approx(other, abs=SAME_ANSWER[dtype]), request.text


# -- streams -----------------------------------------------------------------------------------------------------------


@each_dtype
@pytest.mark.parametrize("editor", ON_THE_MODEL)
def test_a_stream_resumes_from_the_store(editor: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Bit for bit as one that was not interrupted; loaded steps come from the CPU."""
    subject = subject_of(editor, "llama", dtype, DEVICE)
    size = 2 if subject.capabilities.supports_joint else 1
    first, _ = run_stream(subject, 2, size, Store(tmp_path))
    resumed, computed = run_stream(subject, 4, size, Store(tmp_path))
    unbroken, _ = run_stream(subject, 4, size, None)
    assert computed and min(computed) == len(first.deltas), "the first steps were made again"
    states = [[report.step.state_after for report in stream.reports] for stream in (resumed, unbroken)]
    differences = list(map(distance, resumed.deltas, unbroken.deltas))
    assert states[0] == states[1] and max(differences) == 0.0, differences
    checksums = [[delta.checksum() for delta in stream.deltas] for stream in (resumed, unbroken)]
    assert checksums[0] == checksums[1]


def run_stream(subject: Subject, num_edits: int, size: int, store: Store | None) -> tuple[EditStream, list[int]]:
    """A stream in steps of a size; and the number of earlier steps behind every step that was computed."""
    groups = chunked([(request,) for request in EDIT_REQUESTS[:num_edits]], size, cumulative=True)
    editor = subject.make(**quick_settings(subject))
    computed: list[int] = []
    compute = editor.compute

    def counted(job: EditJob) -> list[Delta]:
        computed.append(len(job.history))
        return compute(job)

    editor.compute = counted
    model, tokenizer = subject.model, subject.tokenizer
    stream = EditStream(
        model,
        tokenizer,
        editor,
        EditPlan(groups, cumulative=True),
        store,
        model_identity(model, tokenizer),
        Guard(),
        quiet=True,
    )
    stream.make()
    return stream, computed


# -- memory ------------------------------------------------------------------------------------------------------------


def test_the_peak_is_that_of_the_scope() -> None:
    """With what was held before it, and without an earlier peak."""
    model = build_model("llama").to(DEVICE)
    weights = [*model.parameters(), *model.buffers()]
    torch.empty(GIB, dtype=torch.uint8, device=DEVICE)
    held = torch.cuda.memory_allocated(DEVICE)
    with measured(model) as cost:
        torch.empty(GIB // 2, dtype=torch.uint8, device=DEVICE)
    assert cost.memory.peak_memory_gib == pytest.approx(held / GIB + 0.5, abs=1e-5)
    assert cost.memory.model_memory_gib == pytest.approx(sum(one.nbytes for one in weights) / GIB, abs=1e-5)


@pytest.mark.parametrize("editor", ON_THE_MODEL)
def test_steps_of_a_stream_have_their_peak(editor: str, tmp_path: Path) -> None:
    """Above the weights, below the gigabyte that was there before; a loaded step has that of its computation."""
    subject = subject_of(editor, "llama", torch.float32, DEVICE)
    torch.empty(GIB, dtype=torch.uint8, device=DEVICE)
    held = torch.cuda.memory_allocated(DEVICE) / GIB
    first, _ = run_stream(subject, 2, 1, Store(tmp_path))
    for cost in (report.cost for report in first.reports):
        assert 0 < cost.model_memory_gib < cost.peak_memory_gib < held + 1
    again, _ = run_stream(subject, 2, 1, Store(tmp_path))
    assert [report.cost for report in again.reports] == [report.cost for report in first.reports]


# -- answers -----------------------------------------------------------------------------------------------------------


@functools.cache
def an_edit(editor: str, dtype: torch.dtype = torch.float32) -> Delta:
    """Made on the CPU, as one from the store is there."""
    subject = Subject(editor, "llama", dtype)
    (delta,) = subject.make(**quick_settings(subject)).edit(subject.model, subject.tokenizer, EDIT_REQUESTS[:1])
    return delta


@pytest.mark.parametrize("editor", READ)
def test_answers_are_those_of_the_cpu(editor: str) -> None:
    """In float64 (norms compute in float32): scores, texts and states."""
    found, expected = (
        readings(subject.model, subject.tokenizer, an_edit(editor, torch.float64))
        for device in (DEVICE, torch.device("cpu"))
        for subject in [subject_of(editor, "llama", torch.float64, device)]
    )
    for kind, answers in expected.items():
        assert flat(found[kind]) == pytest.approx(flat(answers), rel=1e-6, abs=1e-6), kind


@each_dtype
@pytest.mark.parametrize("editor", READ)
def test_engines_give_the_same_answers(editor: str, dtype: torch.dtype) -> None:
    """Texts in float32 only: 16-bit logits tie, where the greedy token is a matter of rounding; see the next test."""
    subject, tolerance = subject_of(editor, "llama", dtype, DEVICE), SAME_ANSWER[dtype]
    fast, reference = (
        readings(subject.model, subject.tokenizer, an_edit(editor), engine) for engine in ("fast", "reference")
    )
    logprobs = [[answer.logprob for answer in found["scores"]] for found in (fast, reference)]
    assert logprobs[0] == pytest.approx(logprobs[1], abs=tolerance)
    assert flat(fast["states"]) == pytest.approx(flat(reference["states"]), abs=min(tolerance, 0.02))  # cosines
    if dtype == torch.float32:
        assert flat(fast["texts"]) == flat(reference["texts"])
        assert flat(fast["scores"]) == pytest.approx(flat(reference["scores"]), abs=tolerance)


@pytest.mark.parametrize("editor", READ)
def test_batches_in_bfloat16(editor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of several edits answer as each alone, and write tokens that are the best ones of a full pass."""
    monkeypatch.setattr(batch_checks, "TOLERANCE", SAME_ANSWER[torch.bfloat16])
    subject = subject_of(editor, "llama", torch.bfloat16, DEVICE)
    batch_checks.check_rows(subject)
    batch_checks.check_generation(subject)
