"""``lm-edit check-editor``: run the editor contract on tiny models."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import tempfile
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from lm_edit.cli.command import Verb, say, table

if TYPE_CHECKING:
    from edit_hooks.contract.runner import CheckResult

MARKS = {"passed": "ok", "failed": "FAIL", "exempt": "-"}


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("editor", help="an editor's name, or package.module:Class")
    parser.add_argument("--models", help="comma-separated model families; all supported ones when absent")
    parser.add_argument("--checks", help="comma-separated checks; all when absent")
    parser.add_argument("--device", default="cpu", help="device of the tiny models: cpu (default), cuda, cuda:1, ...")
    parser.add_argument("--list", action="store_true", help="list the checks and exit")
    parser.add_argument("--traceback", action="store_true", help="print the traceback of unexpected errors")


def _check(args: argparse.Namespace) -> int:
    from tqdm import tqdm

    from edit_hooks.contract.runner import choose_checks, choose_device, choose_families, run_contract

    checks = choose_checks(_split(args.checks))
    if args.list:
        table(("check", "promise"), [(check.name, check.summary) for check in checks])
        return 0
    families, device = choose_families(_split(args.models)), choose_device(args.device)
    with _surroundings(), tqdm(total=len(families) * len(checks), desc=f"Checking {args.editor}", unit="check") as bar:
        results = list(run_contract(args.editor, families, [check.name for check in checks], bar.update, device))
    _print_table(results, families)
    failed = [result for result in results if result.outcome == "failed"]
    for reason, alike in _by_reason(failed).items():
        say(f"\n{_where(alike)}: {reason}")
        if args.traceback and alike[0].details:
            print(alike[0].details)  # a traceback, in full
    if not args.traceback and any(result.details for result in failed):
        say("\n--traceback prints where the errors were raised")
    for check, reason in {result.check: result.reason for result in results if result.outcome == "exempt"}.items():
        say(f"\n{check}: exempt, {reason}")
    passed = sum(result.outcome == "passed" for result in results)
    say(f"\n{passed} passed, {len(failed)} failed, {len(results) - passed - len(failed)} exempt")
    return 1 if failed else 0


@contextlib.contextmanager
def _surroundings() -> Iterator[None]:
    """A cache for the statistics of tiny models, and no warnings about random models."""
    cache, disabled = os.environ.get("LM_EDIT_CACHE"), logging.root.manager.disable
    with tempfile.TemporaryDirectory() as folder:
        os.environ["LM_EDIT_CACHE"] = folder
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(disabled)
            os.environ.pop("LM_EDIT_CACHE")
            if cache is not None:
                os.environ["LM_EDIT_CACHE"] = cache


def _print_table(results: Sequence[CheckResult], families: Sequence[str]) -> None:
    """A row per check, a column per family."""
    outcomes = {(result.check, result.model_type): MARKS[result.outcome] for result in results}
    names = dict.fromkeys(result.check for result in results)
    table(("check", *families), [(name, *(outcomes[name, family] for family in families)) for name in names])


def _by_reason(failed: Sequence[CheckResult]) -> dict[str, list[CheckResult]]:
    """Failures by reason: an editor that raises fails every check with one reason, which is worth one line."""
    by_reason: dict[str, list[CheckResult]] = {}
    for result in failed:
        by_reason.setdefault(result.reason, []).append(result)
    return by_reason


def _where(failed: Sequence[CheckResult]) -> str:
    """Which checks failed on which families; checks that failed on the same ones together."""
    families: dict[str, list[str]] = {}
    for result in failed:
        families.setdefault(result.check, []).append(result.model_type)
    checks: dict[tuple[str, ...], list[str]] = {}
    for check, places in families.items():
        checks.setdefault(tuple(places), []).append(check)
    return "; ".join(f"{', '.join(names)} on {', '.join(places)}" for places, names in checks.items())


def _split(text: str | None) -> list[str] | None:
    return [name.strip() for name in text.split(",") if name.strip()] if text else None


VERBS: dict[str, Verb] = {
    "check-editor": Verb("check an editor, also one of your own, against the contract", _arguments, _check),
}
