"""The table of the page "How fast": every editor alone and together, joint edits, answers, and where the time goes.

All measurements run in one process on one model. Peak memory is that of a GPU's allocator; on a CPU, whose process
never gives memory back, the other modes of ``engine.py`` measure it, each in a process of its own.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock

from measured_model import Setup, distinct_requests, load_requests, time_seconds

if TYPE_CHECKING:
    import torch

    from edit_hooks.base.editor import Editor
    from edit_hooks.deltas.delta import Delta
    from edit_hooks.inference.items import GenerateItem, ScoreItem

NO_STOP = {"early_stop_loss": 1e-9}
LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx", "cudaGraphLaunch")
WARM_UP = 16  # joint requests
QUESTION_EDITS = 64  # edits behind the questions
RATE_SIZES = {"cuda": 8192, "cpu": 1024}  # of the matrix product whose rate is the card's


@dataclass(frozen=True)
class EditorRow:
    """An editor and the settings under which it is measured.

    Attributes:
        key: name of the row among other measurements. label: the settings, in words.
        settings: over the shipped ones; those with a number of steps give way to ``--steps``.
        most_together: the largest number of edits that is measured; fewer than 64 for editors of minutes.
    """

    key: str
    editor: str
    label: str
    settings: dict[str, Any]
    most_together: int = 64


SAMPLED_21 = {"context_templates": "sampled_21", "num_steps": 20, **NO_STOP}
# With the identity as second moment: text for C would have to be sampled from random weights first.
SAMPLED_6 = {"context_templates": "sampled_6", "num_steps": 20, "second_moments": None, **NO_STOP}
EDITOR_ROWS = (
    EditorRow("rome", "rome", "21 templates, 20 steps", SAMPLED_21),
    EditorRow("memit", "memit", "6 templates, 20 steps, one request each", SAMPLED_6),
    EditorRow("ft_m", "ft_m", "as shipped", {}),
    EditorRow("grace", "grace", "50 steps", {"num_steps": 50}),
    EditorRow("adalora", "lora", "AdaLoRA, 70 steps", {"kind": "adalora", "num_steps": 70}, most_together=16),
    EditorRow("wise", "wise", "30 steps", {"num_steps": 30}, most_together=16),
    EditorRow("r_rome", "r_rome", "25 steps, 21 templates", {"context_templates": "sampled_21", "num_steps": 25}),
)
JOINT_ROW = EditorRow("memit_joint", "memit", "6 templates, 20 steps", SAMPLED_6)
SECTIONS = ("editors", "joint", "answers", "solves", "time")


class Measured(NamedTuple):
    """Seconds of a measurement, and the peak of a GPU's memory in bytes (``None`` on a CPU)."""

    seconds: float
    peak_bytes: int | None


class TimeSplit(NamedTuple):
    """Where the time of a measurement goes, by ``torch.profiler``.

    Attributes:
        operators: calls of PyTorch operators, those inside others included. operator_seconds: processor time in them.
        launches: kernels or recorded graphs that the processor starts. launch_seconds: processor time in that.
        card_seconds: time in which kernels run; ``None`` on a CPU.
    """

    operators: int
    operator_seconds: float
    launches: int
    launch_seconds: float
    card_seconds: float | None


def measured(action: Callable[[], object]) -> Measured:
    """Time an action and read its peak memory on a GPU."""
    import torch

    if not torch.cuda.is_available():
        return Measured(time_seconds(action), None)
    torch.cuda.reset_peak_memory_stats()
    seconds = time_seconds(action)
    return Measured(seconds, torch.cuda.max_memory_allocated())


def split_time(action: Callable[[], object]) -> TimeSplit:
    """Run an action under the profiler, which slows it: only shares and counts are read."""
    import torch
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    on_gpu = torch.cuda.is_available()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities) as profiler:
        time_seconds(action)
    events = [event for event in profiler.events() if not event.is_user_annotation]
    on_cpu = [event for event in events if event.device_type == DeviceType.CPU]
    operators = [event for event in on_cpu if event.name.startswith("aten::")]
    launches = [event for event in on_cpu if event.name in LAUNCHES]
    kernels = [event.time_range.elapsed_us() for event in events if event.device_type == DeviceType.CUDA]
    return TimeSplit(
        len(operators),
        sum(event.self_cpu_time_total for event in operators) / 1e6,
        len(launches),
        sum(event.self_cpu_time_total for event in launches) / 1e6,
        sum(kernels) / 1e6 if on_gpu else None,
    )


def matrix_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Operations per second of a large square matrix product."""
    import torch

    size = RATE_SIZES[device.type]
    left, right = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))
    torch.mm(left, right)
    return 2 * size**3 / min(time_seconds(lambda: torch.mm(left, right)) for _ in range(5))


def made_editor(setup: Setup, row: EditorRow, engine: str = "fast") -> Editor[Any]:
    """The editor of a row, its settings resolved and its templates sampled."""
    from edit_hooks import load_editor

    settings = {**row.settings, "engine": engine}
    if setup.args.most_steps and "num_steps" in {field.name for field in dataclasses.fields(_config_class(row))}:
        settings["num_steps"] = setup.args.most_steps
    editor = load_editor(row.editor, settings)
    editor.resolve_config(setup.model, setup.tokenizer)
    return editor


def _config_class(row: EditorRow) -> Any:
    from edit_hooks import load_editor

    return load_editor(row.editor).config_class


def editor_action(
    setup: Setup, row: EditorRow, count: int, *, engine: str = "fast", joint: bool = False
) -> Callable[[], object]:
    """An action that makes edits, after calls that fill caches and record steps (of few edits, if they are joint).

    A recorded step counts after a second call, which compares it with the step itself.
    """
    from edit_hooks.modeling.device.recording import num_recordings

    editor = made_editor(setup, row, engine)
    requests = (distinct_requests if joint else load_requests)(setup.args, count)

    def action(most: int | None = None) -> object:
        return editor.edit(setup.model, setup.tokenizer, requests[:most], joint=joint)

    if engine == "fast":
        action(WARM_UP if joint else None)
        if num_recordings(setup.model):
            action(WARM_UP if joint else None)
    return action


def operations_per_edit(setup: Setup, row: EditorRow) -> float:
    """Floating-point operations of one edit; matrix products alone, of steps that are not replayed."""
    from torch.utils.flop_counter import FlopCounterMode

    from edit_hooks.modeling.device.recording import SWITCH

    action = editor_action(setup, row, 1)
    with mock.patch.dict(os.environ, {SWITCH: "0"}), FlopCounterMode(display=False) as counter:
        action()
    return float(counter.get_total_flops())


def question_jobs(
    setup: Setup, delta_of: Callable[[int], Delta | None]
) -> tuple[list[tuple[ScoreItem, Delta | None]], list[tuple[GenerateItem, Delta | None]]]:
    """Questions to be scored and to be continued, by as many tokens each, under edits taken in turn."""
    from edit_hooks.inference.items import GenerateItem, ScoreItem
    from edit_hooks.modeling.tokens import split_continuation

    args = setup.args
    score_jobs, generate_jobs = [], []
    for index, request in enumerate(load_requests(args, args.questions)):
        delta = delta_of(index % QUESTION_EDITS)
        context, continuation = split_continuation(setup.tokenizer, request.text, " " + request.target_new.strip())
        score_jobs.append((ScoreItem(tuple(context), tuple(continuation)), delta))
        generate_jobs.append((GenerateItem(tuple(context), (), args.new_tokens, ignore_end=True), delta))
    return score_jobs, generate_jobs


def low_rank_edits(setup: Setup, rank: int, modules: Sequence[str]) -> list[Delta]:
    """Random updates of a rank at some modules, so small that answers stay those of the model."""
    import torch

    from edit_hooks.deltas.delta import Delta, Factor
    from edit_hooks.modeling.architectures import is_transposed, map_shape

    deltas = []
    for _ in range(QUESTION_EDITS):
        factors = {}
        for name in modules:
            module = setup.model.get_submodule(name)
            left, right = (torch.randn(width, rank, device=setup.model.device) for width in map_shape(module))
            factors[name] = Factor(1e-6 * left, right, is_transposed(module))
        deltas.append(Delta(factors=factors))
    return deltas


def dense_edit(setup: Setup) -> Delta:
    """A random dense update of one module, on the device, so small that answers stay those of the model."""
    import torch

    from edit_hooks.deltas.delta import Delta
    from edit_hooks.modeling.architectures import architecture_of, num_layers

    name = f"{architecture_of(setup.model).rewrite_name(num_layers(setup.model) // 3)}.weight"
    weight = setup.model.get_parameter(name)
    return Delta(dense={name: 1e-6 * torch.randn(weight.shape, device=weight.device)})


def answer_times(setup: Setup, deltas: Sequence[Delta] | None) -> dict[str, float]:
    """Measure scoring and continuing all questions under edits of their own, ``None``: without any.

    Returns:
        Seconds to score and to continue them, tokens per second, and the peak memory on a GPU.
    """
    from edit_hooks.inference.batching import limits_for
    from edit_hooks.inference.decoding import generate
    from edit_hooks.inference.scoring import score

    model, limits = setup.model, limits_for(setup.model)
    score_jobs, generate_jobs = question_jobs(setup, lambda index: deltas[index] if deltas else None)
    score(model, score_jobs[:2], limits, lambda count: None)
    generate(model, setup.tokenizer, generate_jobs[:2], limits, lambda count: None)
    scored = measured(lambda: score(model, score_jobs, limits, lambda count: None))
    generated = measured(lambda: generate(model, setup.tokenizer, generate_jobs, limits, lambda count: None))
    tokens = len(generate_jobs) * setup.args.new_tokens
    peak = {} if generated.peak_bytes is None else {"peak_bytes": generated.peak_bytes}
    return {
        "scored": scored.seconds,
        "seconds": generated.seconds,
        "tokens_per_second": tokens / generated.seconds,
        **peak,
    }


def decoding(setup: Setup) -> Callable[[], object]:
    """An action that continues all questions without edits."""
    from edit_hooks.inference.batching import limits_for
    from edit_hooks.inference.decoding import generate

    model, (_, jobs) = setup.model, question_jobs(setup, lambda index: None)
    return lambda: generate(model, setup.tokenizer, jobs, limits_for(model), lambda count: None)


def plain_generate_rate(setup: Setup) -> float:
    """New tokens per second of the model's own ``generate`` without edits, all questions in one batch."""
    import torch

    _, jobs = question_jobs(setup, lambda index: None)
    width = max(len(item.context) for item, _ in jobs)
    ids = torch.tensor([[0] * (width - len(item.context)) + list(item.context) for item, _ in jobs])
    mask = torch.tensor([[0] * (width - len(item.context)) + [1] * len(item.context) for item, _ in jobs])
    number = setup.args.new_tokens

    def action() -> object:
        return setup.model.generate(
            ids.to(setup.model.device),
            attention_mask=mask.to(setup.model.device),
            min_new_tokens=number,
            max_new_tokens=number,
            do_sample=False,
            pad_token_id=0,
        )

    return len(jobs) * number / time_seconds(action)


def solve_times(setup: Setup) -> tuple[float, float]:
    """Seconds of the first solve with a second moment of the keys' width, which factorizes it, and of the next."""
    import torch

    from edit_hooks.locate.moments.solve import SecondMoment
    from edit_hooks.modeling.architectures import architecture_of, map_shape

    model = setup.model
    width = map_shape(model.get_submodule(architecture_of(model).rewrite_name(0)))[1]
    moment = SecondMoment(torch.diag(torch.linspace(1, 2, width)))
    keys_EF = torch.randn(16, width, device=model.device)
    first, later = (time_seconds(lambda: moment.solve(keys_EF, "float64")) for _ in range(2))
    return first, later


def adapter_cases(setup: Setup) -> Iterator[tuple[str, Callable[[], list[Delta] | None]]]:
    """The kinds of edits under which questions are answered, and what makes them."""
    from edit_hooks.modeling.architectures import architecture_of, num_layers

    arch, layers = architecture_of(setup.model), num_layers(setup.model)
    middle = [arch.rewrite_name(layers // 3)]
    five = [arch.rewrite_name(layer) for layer in range(layers // 6, layers // 6 + min(5, layers - layers // 6))]
    yield "no edit", lambda: None
    yield "one dense edit", lambda: [dense_edit(setup)] * QUESTION_EDITS
    yield "rank 1 in one module", lambda: low_rank_edits(setup, 1, middle)
    yield f"rank 16 in {len(five)} modules", lambda: low_rank_edits(setup, 16, five)
    yield "rank 64 in one module", lambda: low_rank_edits(setup, 64, middle)
