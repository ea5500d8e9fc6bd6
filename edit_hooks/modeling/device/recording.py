"""Recorded steps: thousands of launches that are made once and replayed as one (CUDA graphs).

A step of an edit alone waits for its launches: 4,200 of them take 124 ms on an H100 (ROME with 21 templates, the shape
of Llama 3 8B), where a plain loop's step that was recorded takes 21 ms. A recorded step works on the tensors that it
was recorded with. Another edit of the same shapes copies its own into them (:meth:`Recording.load`) and replays.

A recording is right only if the step reads nothing from the host that changes. Steps that let the host wait are not
recorded, and every recording is tried: its first replay, and the first one with other contents, must agree with the
step itself. ``LM_EDIT_RECORD_STEPS=0`` in the environment turns recording off.
"""

from __future__ import annotations

import contextlib
import os
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Protocol

import torch
from torch import nn

from edit_hooks.modeling.memory import free_bytes, graph_bytes
from edit_hooks.utils.errors import first_line
from edit_hooks.utils.logs import get_logger

log = get_logger("lm_eval.edited_hf")

SWITCH = "LM_EDIT_RECORD_STEPS"
# Of a model; the recordings that were not used for longest are dropped.
MOST_RECORDINGS, MOST_BYTES = 8, 2**32  # of tensors; the memory that their graphs share comes on top
# Of results, in norms: kernels that add in any order differ by rounding, which Adam enlarges where gradients are tiny.
# A replay that reads wrong tensors differs by about 1.
TOLERANCE = 0.05
# Other threads of the process (data loaders, NCCL's watchdog) may call CUDA while a step is recorded.
MODE = "thread_local"
WAITED = "called a synchronizing CUDA operation"  # PyTorch's warning
COPIES = 4  # of its tensors: itself, the contents before and after a trial, gradients

Step = Callable[[], None]


class Recorder(Protocol):
    """What records a step."""

    def is_available(self, device: torch.device) -> bool:
        """Whether steps on a device can be recorded."""

    def capture(self, model: nn.Module, step: Step) -> Step:
        """Run a step once, record it, and return the function that replays it.

        Raises:
            Exception: whatever keeps the step from being recorded.
        """


class CudaRecorder:
    """Recordings as CUDA graphs; those of a model share their memory, as no two run at the same time.

    They are recorded on one stream, since PyTorch gives the memory of a stream to that stream only.
    """

    def __init__(self) -> None:
        self._places: weakref.WeakKeyDictionary[nn.Module, _Place] = weakref.WeakKeyDictionary()

    def is_available(self, device: torch.device) -> bool:
        return device.type == "cuda" and torch.cuda.is_available()

    def capture(self, model: nn.Module, step: Step) -> Step:
        device = next(model.parameters()).device
        with torch.cuda.device(device):
            place = self._places.get(model)
            if place is None or place.device != device:
                place = self._places[model] = _Place(device)
            own, graph, pool = torch.cuda.current_stream(), torch.cuda.CUDAGraph(), place.current_pool()
            # The run before the capture is on its stream, so that workspaces of libraries are there already.
            place.stream.wait_stream(own)
            try:
                with torch.cuda.stream(place.stream), _waiting_is_refused():
                    step()
            finally:  # also after an error: what it launched still writes into the tensors that are set back now
                own.wait_stream(place.stream)
            try:
                with torch.cuda.graph(graph, pool=pool, stream=place.stream, capture_error_mode=MODE):
                    before = torch.cuda.memory_reserved(device)
                    step()
                    num_bytes = torch.cuda.memory_reserved(device) - before
            except BaseException:
                torch.cuda.set_stream(own)  # the scope above stays on its stream if the capture became invalid
                _forget_capture(place, pool)
                raise
            place.keep(graph, num_bytes)
        return graph.replay


class _Place:
    """Where the steps of a model are recorded: a stream, and the memory that the graphs share.

    The memory ends with the last graph in it: PyTorch refuses to record into it again.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.stream = device, torch.cuda.Stream()
        self._pool: Any = None
        self._num_graphs = self._num_bytes = 0

    def current_pool(self) -> Any:
        """The pool of the graphs that exist, or a new one."""
        if not self._num_graphs:
            self._pool = torch.cuda.graph_pool_handle()
        return self._pool

    def keep(self, graph: torch.cuda.CUDAGraph, num_bytes: int) -> None:
        """Count a graph while it exists, and the memory by which it made the pool larger."""
        self._num_graphs += 1
        self._count(num_bytes)
        weakref.finalize(graph, self._leave).atexit = False

    def _leave(self) -> None:
        self._num_graphs -= 1
        if not self._num_graphs:  # the memory of single graphs stays in the pool for the others
            self._count(-self._num_bytes)

    def _count(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        graph_bytes[self.device] += num_bytes


def _forget_capture(place: _Place, pool: Any) -> None:
    """Undo a capture that became invalid, where PyTorch does not.

    Before 2.13 its allocator goes on as if the capture were under way, and gives no memory back. Its generator of
    random numbers does so, too, and refuses to draw and to replay, until a later capture ends well.
    """
    for name in ("_cuda_endAllocateToPool", "_cuda_endAllocateCurrentStreamToPool"):  # since 2.8, before
        with contextlib.suppress(AttributeError, RuntimeError, TypeError):  # RuntimeError: there is nothing to undo
            getattr(torch._C, name)(place.device.index, pool)
    nothing = torch.cuda.graph(torch.cuda.CUDAGraph(), stream=place.stream, capture_error_mode=MODE)
    with contextlib.suppress(RuntimeError), nothing:
        torch.zeros(1, device=place.device)


@contextlib.contextmanager
def _waiting_is_refused() -> Iterator[None]:
    """Scope that ends with RuntimeError if an operation inside let the host wait for the device.

    PyTorch warns of such operations; it could raise at once, but in other threads of the process too.
    """
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)
    # not by a word of it: the mode itself warns that it does not detect all synchronizing operations
    if any(str(warning.message).startswith(WAITED) for warning in caught):
        raise RuntimeError("the step reads from the device, which lets the host wait")


RECORDER: Recorder = CudaRecorder()


@dataclass
class Recording:
    """A recorded step and the tensors it works on.

    Attributes:
        tensors: all tensors that it reads or writes, except for those of the model. results: some of them.
        graph: replays the step; the tensors must be there.
        is_tried: whether a replay with other contents has agreed with the step.
    """

    tensors: list[torch.Tensor]
    results: list[torch.Tensor]
    graph: Step
    is_tried: bool = False

    def replay(self) -> None:
        """Run the step. Who keeps this method keeps the tensors, also when the recording was dropped."""
        self.graph()

    @property
    def size(self) -> int:
        """Bytes of the tensors."""
        return _num_bytes(self.tensors)

    def load(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copy the contents of other tensors, in the same order and of the same shapes."""
        for own, other in zip(self.tensors, tensors, strict=True):
            if own is not other:
                own.copy_(other)


_recordings: weakref.WeakKeyDictionary[nn.Module, OrderedDict[Hashable, Recording]] = weakref.WeakKeyDictionary()
# Kind of steps -> why it is not recorded for a model.
_refused: weakref.WeakKeyDictionary[nn.Module, dict[str, str]] = weakref.WeakKeyDictionary()
# The smallest size, in bytes, that did not fit when it was recorded.
_too_large: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()


def num_recordings(model: nn.Module) -> int:
    """How many recorded steps of a model are kept."""
    return len(_recordings.get(model, ()))


def refusals(model: nn.Module) -> dict[str, str]:
    """Kinds of steps whose recording failed for a model, and why."""
    return dict(_refused.get(model, {}))


def records(model: nn.Module, device: torch.device, kind: str) -> bool:
    """Whether steps of a kind are recorded for a model.

    They are not where other code takes part in its passes, whose state a recording would freeze: hooks, forwards of
    wrappers, autocast, several devices. Tensors made in inference mode could not be loaded outside of it.
    """
    if os.environ.get(SWITCH, "1") == "0" or kind in _refused.get(model, ()) or not RECORDER.is_available(device):
        return False
    if torch.is_inference_mode_enabled():
        return False
    is_plain = not any(
        module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__ for module in model.modules()
    )
    on_one_device = {tensor.device for tensor in (*model.parameters(), *model.buffers())} == {device}
    return is_plain and on_one_device and not torch.is_autocast_enabled(device.type)


@torch.no_grad()
def recording_of(
    model: nn.Module,
    kind: str,
    key: Hashable,
    step: Step,
    tensors: list[torch.Tensor],
    results: list[torch.Tensor],
) -> Recording | None:
    """The recording of a step, loaded with the contents of its tensors; ``None`` if it cannot be recorded or kept.

    Args:
        kind: of step; after a failure the model's steps of this kind are not recorded any more.
        key: everything besides shapes and weights that the step depends on.
        step: works on ``tensors`` in place.
        results: those of them that it changes, in which a replay must agree with the step.
    """
    key = (kind, key, _weights_key(model), torch.get_float32_matmul_precision(), _shapes(tensors))
    known = _recordings.setdefault(model, OrderedDict())
    recording = known.get(key)
    if recording is None and not _fits(model, tensors):
        return None
    try:
        if recording is None:
            recording = _recorded(model, step, tensors, results)
        elif not recording.is_tried:
            _try(recording, step, tensors, results)
            recording.is_tried = True
    except torch.OutOfMemoryError:
        _too_large[model], recording = _num_bytes(tensors), None
        log.info("A step of %s is not recorded: its memory is short.", type(model).__name__)
    except Exception as error:  # of any kind: a model's own code runs inside
        # behind the error of a step, the end of its capture raises another
        errors = [one for one in (error.__context__, error) if one is not None]
        _refused.setdefault(model, {})[kind] = "; ".join(map(first_line, errors))
        _recordings.clear()  # of all kinds: a capture that failed may have left a state in which none replays
        log.warning("Steps of %s are not recorded for %s: %s", kind, type(model).__name__, _refused[model][kind])
        return None
    if recording is None:  # here the exception is gone, and with it the frames that hold tensors
        release_memory()
        return None
    known[key] = recording
    known.move_to_end(key)
    while len(known) > 1 and (len(known) > MOST_RECORDINGS or sum(one.size for one in known.values()) > MOST_BYTES):
        known.popitem(last=False)
    recording.load(tensors)
    return recording


def release_memory() -> None:
    """Free what the allocator of a GPU and the recordings of all models hold, where memory is short."""
    _recordings.clear()
    torch.cuda.empty_cache()


def _fits(model: nn.Module, tensors: Sequence[torch.Tensor]) -> bool:
    """Whether a recording, and the copies while it is made and tried, take at most a quarter of the free memory."""
    free, size = free_bytes(tensors[0].device), _num_bytes(tensors)
    return (free is None or COPIES * size <= free // 4) and size < _too_large.get(model, size + 1)


def _num_bytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _recorded(model: nn.Module, step: Step, tensors: list[torch.Tensor], results: list[torch.Tensor]) -> Recording:
    with _kept(tensors):
        recording = Recording(tensors, results, RECORDER.capture(model, step))
    _try(recording, step, tensors, results)
    return recording


def _try(recording: Recording, step: Step, tensors: list[torch.Tensor], results: list[torch.Tensor]) -> None:
    """Replay a recording and run the step itself on the same contents, which stay.

    Raises:
        RuntimeError: their results differ.
    """
    with _kept(tensors) as set_back:
        recording.load(tensors)
        recording.replay()
        found = [tensor.clone() for tensor in recording.results]
        set_back()
        step()
        differences = [_difference(*pair) for pair in zip(found, results, strict=True)]
    if not max(differences) <= TOLERANCE:
        raise RuntimeError(f"a replay differs from its step by {max(differences):.2g}")


@contextlib.contextmanager
def _kept(tensors: list[torch.Tensor]) -> Iterator[Step]:
    """Scope after which tensors have their contents again, also after an error: the caller goes on from these.

    Yields:
        A function that sets them back earlier.
    """
    before = [tensor.clone() for tensor in tensors]

    def set_back() -> None:
        for tensor, own in zip(tensors, before, strict=True):
            tensor.copy_(own)

    try:
        yield set_back
    finally:
        set_back()


def _difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Of their norms; where a number is not finite, it must not be in both."""
    is_finite = expected.isfinite()
    if not torch.equal(found.isfinite(), is_finite):
        return torch.inf
    found, expected = (tensor.masked_fill(~is_finite, 0).double() for tensor in (found, expected))
    return float((found - expected).norm() / expected.norm().clamp(min=1e-6))


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors in sequences, named tuples and dataclasses, each once, in order."""
    found: dict[int, torch.Tensor] = {}

    def collect(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            found.setdefault(id(value), value)
        elif isinstance(value, list | tuple):
            for entry in value:
                collect(entry)
        elif is_dataclass(value):
            for field in fields(value):
                collect(getattr(value, field.name))

    collect(value)
    return list(found.values())


def _weights_key(model: nn.Module) -> Hashable:
    """Where the weights are: a recording reads them there."""
    return tuple(tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers()))


def _shapes(tensors: Sequence[torch.Tensor]) -> Hashable:
    return tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors)
