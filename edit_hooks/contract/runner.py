"""Run the contract of an editor over model families."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from edit_hooks.base.registry import editor_class
from edit_hooks.contract.checks import CHECKS, Check
from edit_hooks.contract.family_configs import FAMILY_CONFIGS
from edit_hooks.contract.subject import ContractViolation, Subject
from edit_hooks.contract.tiny_models import ALL_MODEL_TYPES
from edit_hooks.utils.errors import EditingError, near_misses
from edit_hooks.utils.plugins import is_own

Outcome = Literal["passed", "failed", "exempt"]


@dataclass(frozen=True)
class CheckResult:
    """Outcome of one check on one model family.

    Attributes:
        reason: why it failed, or why the editor is exempt.
        details: traceback of an unexpected error.
    """

    check: str
    model_type: str
    outcome: Outcome
    reason: str = ""
    details: str = ""


def run_contract(
    editor: str,
    model_types: Sequence[str] | None = None,
    checks: Sequence[str] | None = None,
    progress: Callable[[], object] = lambda: None,
    device: torch.device | str = "cpu",
) -> Iterator[CheckResult]:
    """Results of the checks, family by family.

    Args:
        editor: name or ``package.module:Class``.
        model_types: families; all when absent.
        checks: names of checks; all when absent.
        progress: called after every check.
        device: of the tiny models.

    Raises:
        EditingError: for an unknown editor, family or check, or a device that is not there.
    """
    exemptions = editor_class(editor).contract_exemptions
    checks_to_run = choose_checks(checks)
    chosen_device = choose_device(device)
    for model_type in choose_families(model_types):
        subject = Subject(editor, model_type, device=chosen_device)
        for check in checks_to_run:
            if check.name in exemptions:
                yield CheckResult(check.name, model_type, "exempt", exemptions[check.name])
            else:
                yield _run(check, subject)
            progress()


def choose_checks(names: Sequence[str] | None) -> list[Check]:
    """Checks by name, in the contract's order; all without names."""
    if names is None:
        return list(CHECKS)
    _require_known("check", names, [check.name for check in CHECKS])
    return [check for check in CHECKS if check.name in names]


def choose_families(names: Sequence[str] | None) -> list[str]:
    """Model families by name; without names those on which the tests run every editor."""
    if names is None:
        return list(ALL_MODEL_TYPES)
    _require_known("model family", names, (*ALL_MODEL_TYPES, *FAMILY_CONFIGS))
    return list(names)


def choose_device(device: torch.device | str) -> torch.device:
    """A device that exists here.

    Raises:
        EditingError: for a word that names no device, a GPU that torch does not see, or Metal, which lacks float64.
    """
    try:
        return torch.empty(0, dtype=torch.float64, device=device).device
    except (RuntimeError, AssertionError, TypeError):  # CUDA's errors where torch has none are assertions
        raise EditingError(
            f"device {str(device)!r} cannot be used. Accepted: cpu, and cuda, cuda:1, ... where torch sees GPUs; it "
            f"sees {torch.cuda.device_count()} here."
        ) from None


def _run(check: Check, subject: Subject) -> CheckResult:
    try:
        check.run(subject)
    except ContractViolation as violation:
        return CheckResult(check.name, subject.model_type, "failed", str(violation))
    except Exception as error:  # an editor under test may raise anything
        reason = f"{type(error).__name__}: {error}{_place(error, subject)}"
        return CheckResult(check.name, subject.model_type, "failed", reason, traceback.format_exc())
    return CheckResult(check.name, subject.model_type, "passed")


def _place(error: Exception, subject: Subject) -> str:
    """The innermost line of the editor's file that raised, for the message; errors with advice need none."""
    if isinstance(error, EditingError):
        return ""
    files = {
        inspect.getsourcefile(cls) for cls in subject.editor_class.__mro__ if not is_own(cls) and cls is not object
    }
    frames = traceback.extract_tb(error.__traceback__)
    frame = next((frame for frame in reversed(frames) if frame.filename in files), frames[-1])
    return f" ({frame.filename}, line {frame.lineno})"


def _require_known(what: str, names: Sequence[str], known: Sequence[str]) -> None:
    for name in names:
        if name not in known:
            raise EditingError(f"unknown {what} {name!r}.{near_misses(name, known)} Accepted: {', '.join(known)}.")
