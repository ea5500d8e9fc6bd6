"""`lm-edit check-editor`: the table, the exit status, and errors before any model is built."""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Iterator

import pytest

from edit_hooks.base.registry import EDITORS, editor_class
from edit_hooks.contract.checks import CHECKS
from edit_hooks.contract.runner import CheckResult
from lm_edit.cli.contract import _where
from lm_edit.cli.main import main


@pytest.fixture(autouse=True)
def unchanged_process() -> Iterator[None]:
    before = (logging.root.manager.disable, os.environ.get("LM_EDIT_CACHE"), list(sys.path))
    yield
    assert (logging.root.manager.disable, os.environ.get("LM_EDIT_CACHE"), sys.path) == before


def test_a_sound_editor_exits_with_zero(capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["check-editor", "broken_editors:Sound", "--models", "gpt2,llama", "--checks", "restore,save"])
    lines = capsys.readouterr().out.splitlines()
    assert status == 0
    assert [line.split() for line in lines[:3]] == [
        ["check", "gpt2", "llama"],
        ["restore", "ok", "ok"],
        ["save", "ok", "ok"],
    ]
    assert lines[-1] == "4 passed, 0 failed, 0 exempt"


def test_a_defect_exits_with_one_and_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["check-editor", "broken_editors:Effect", "--models", "gpt2", "--checks", "save,effect"])
    out = capsys.readouterr().out
    assert status == 1
    assert "effect on gpt2: the answer to" in out
    assert out.splitlines()[-1] == "1 passed, 1 failed, 0 exempt"


def test_an_unexpected_error_shows_its_traceback_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["check-editor", "broken_editors:GradientsOff", "--models", "gpt2", "--checks", "gradients_off"]
    assert main(words) == 1
    out = capsys.readouterr().out
    assert "Traceback" not in out and "--traceback prints where" in out
    assert re.search(r"AssertionError: .*\(.*broken_editors\.py, line \d+\)", out)
    assert main([*words, "--traceback"]) == 1
    assert "assert torch.is_grad_enabled()" in capsys.readouterr().out


def test_checks_that_fail_alike_share_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["check-editor", "broken_editors:Diverges", "--models", "gpt2", "--checks", "effect,save,generation"]
    assert main(words) == 1
    out = capsys.readouterr().out
    (line,) = (line for line in out.splitlines() if line.startswith("effect") and " on " in line)
    assert line.startswith("effect, save, generation on gpt2: EditingError: the update of transformer.h.1.mlp.c_proj")
    assert "is not finite" in line and "dense/" not in out


def test_exemptions_are_printed_with_their_reason(capsys: pytest.CaptureFixture[str]) -> None:
    ((check, reason),) = editor_class("kn").contract_exemptions.items()
    assert main(["check-editor", "kn", "--models", "gpt2", "--checks", f"{check},save"]) == 0
    out = capsys.readouterr().out
    assert f"{check}: exempt, {reason}" in out and out.splitlines()[-1] == "1 passed, 0 failed, 1 exempt"


@pytest.mark.parametrize("editor", EDITORS)
def test_exemptions_name_checks_and_give_reasons(editor: str) -> None:
    for check, reason in editor_class(editor).contract_exemptions.items():
        assert check in {known.name for known in CHECKS} and len(reason.split()) > 3


def test_the_list_of_checks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check-editor", "rome", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["check", *(check.name for check in CHECKS)]
    assert all(len(line.split()) > 4 for line in lines[1:])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["romme"], "unknown editor 'romme'. Did you mean 'rome'"),
        (["nowhere:Editor"], "nowhere"),
        (["rome", "--models", "gpt3"], "unknown model family 'gpt3'. Did you mean 'gptj' or 'gpt2'"),
        (["rome", "--device", "gpu"], "device 'gpu' cannot be used"),
        (["rome", "--device", "cuda:99"], "device 'cuda:99' cannot be used"),
        (["rome", "--checks", "restor"], "unknown check 'restor'. Did you mean 'restore'"),
    ],
)
def test_bad_words_are_explained(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check-editor", *words]) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_a_reason_names_the_checks_and_families_that_failed_by_it() -> None:
    """Not every check that is named failed on every family that is."""
    pairs = [("restore", "gpt2"), ("effect", "gpt2"), ("store", "gpt2"), ("store", "llama"), ("restore", "llama")]
    failed = [CheckResult(check, family, "failed", "no") for check, family in pairs]
    assert _where(failed) == "restore, store on gpt2, llama; effect on gpt2"
