"""Run the contract of an editor over model families."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from edit_hooks.base.registry import editor_class
from edit_hooks.contract.checks import CHECKS, Check
from edit_hooks.contract.subject import ContractViolation, Subject
from edit_hooks.contract.tiny_models import ALL_MODEL_TYPES
from edit_hooks.utils.errors import EditingError, near_misses

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
) -> Iterator[CheckResult]:
    """Results of the checks, family by family.

    Args:
        editor: name or ``package.module:Class``.
        model_types: families; all when absent.
        checks: names of checks; all when absent.
        progress: called after every check.

    Raises:
        EditingError: for an unknown editor, family or check.
    """
    exemptions = editor_class(editor).contract_exemptions
    checks_to_run = choose_checks(checks)
    for model_type in choose_families(model_types):
        subject = Subject(editor, model_type)
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
    """Model families by name; all without names."""
    if names is None:
        return list(ALL_MODEL_TYPES)
    _require_known("model family", names, ALL_MODEL_TYPES)
    return list(names)


def _run(check: Check, subject: Subject) -> CheckResult:
    try:
        check.run(subject)
    except ContractViolation as violation:
        return CheckResult(check.name, subject.model_type, "failed", str(violation))
    except Exception as error:  # an editor under test may raise anything
        reason = f"{type(error).__name__}: {error}"
        return CheckResult(check.name, subject.model_type, "failed", reason, traceback.format_exc())
    return CheckResult(check.name, subject.model_type, "passed")


def _require_known(what: str, names: Sequence[str], known: Sequence[str]) -> None:
    for name in names:
        if name not in known:
            raise EditingError(f"unknown {what} {name!r}.{near_misses(name, known)} Accepted: {', '.join(known)}.")
