"""Both commands end a user error with its message and exit code 2; library users get the exception."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

import lm_eval
import pytest
from lm_eval._cli.harness import HarnessCLI
from paths import ROOT
from warm_python import run_warm

import lm_eval_editing_autoload
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.settings.options import parse_editor_args
from lm_edit.cli.main import VERBS, main

lm_eval_editing_autoload.install()  # as the .pth file does in an installed environment


def fail_with(error: BaseException) -> argparse.Namespace:
    def func(_args: argparse.Namespace) -> None:
        raise error

    return argparse.Namespace(func=func)


def test_lm_eval_prints_the_message_alone(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LM_EDIT_DEBUG", raising=False)
    with pytest.raises(SystemExit) as ended:
        HarnessCLI().execute(fail_with(EditingError("bad \x1b[31minput")))
    assert ended.value.code == 2 and ended.value.__suppress_context__
    assert capsys.readouterr().err == "lm_eval: bad \\x1b[31minput\n"


def test_other_processes_of_a_run_name_their_rank(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "3")
    with pytest.raises(SystemExit):
        HarnessCLI().execute(fail_with(EditingError("bad input")))
    assert capsys.readouterr().err == "lm_eval (rank 3): bad input\n"


@pytest.mark.parametrize("error", [ValueError("other"), KeyError("x"), KeyboardInterrupt(), SystemExit(3)])
def test_other_exceptions_of_lm_eval_are_untouched(error: BaseException) -> None:
    with pytest.raises(type(error)) as caught:
        HarnessCLI().execute(fail_with(error))
    assert caught.value is error


def test_the_traceback_comes_back_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LM_EDIT_DEBUG", "1")
    with pytest.raises(EditingError):
        HarnessCLI().execute(fail_with(EditingError("bad input")))
    with pytest.raises(EditingError):
        main(["editors", "rom"])


def parsed(monkeypatch: pytest.MonkeyPatch, option: str, value: str) -> argparse.Namespace:
    monkeypatch.setattr(sys, "argv", ["lm_eval", "--model", "edited_hf", "--tasks", "bake_es", option, value])
    return HarnessCLI().parse_args()


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("context_templates:['{}']", {"context_templates": ["{}"]}),
        (
            'context_templates:["{}", "A man, old. {}"];lr:0.3',
            {"context_templates": ["{}", "A man, old. {}"], "lr": 0.3},
        ),
        ("{lr:0.3;layers:[1,2]}", {"lr": 0.3, "layers": [1, 2]}),
    ],
)
def test_braces_in_the_settings_of_an_editor(text: str, settings: dict[str, object], monkeypatch) -> None:
    options = parsed(monkeypatch, "--model_args", f"editor=r_rome,editor_args={text},dtype=float32").model_args
    assert options.keys() == {"editor", "editor_args", "dtype"}
    assert parse_editor_args(options["editor_args"]) == settings


def test_json_is_read_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    json_args = '{"editor_args": {"context_templates": ["{}"]}}'
    assert parsed(monkeypatch, "--model_args", json_args).model_args["editor_args"] == {"context_templates": ["{}"]}
    with pytest.raises(ValueError, match="Invalid JSON"):
        parsed(monkeypatch, "--model_args", " {'editor': 'rome'}")


def test_library_users_get_the_exception() -> None:
    with pytest.raises(EditingError, match="Did you mean 'rome'"):
        lm_eval.simple_evaluate(model="edited_hf", model_args="editor=rom", tasks=["arc_easy"])


def test_lm_edit_reports_files_that_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def write(_args: argparse.Namespace) -> int:
        raise OSError(28, "No space left on device", "/full/x\x1b")

    monkeypatch.setitem(VERBS, "demo", VERBS["demo"]._replace(run=write))
    assert main(["demo"]) == 2
    assert capsys.readouterr().err.startswith("lm-edit demo: /full/x\\x1b: No space left on device")


# The stock tasks take seconds to index, and no mistake here is about them.
NO_STOCK_TASKS = (
    "import lm_eval.tasks.manager as manager; create = manager.TaskManager.__init__; "
    "manager.TaskManager.__init__ = lambda self, *a, **k: create(self, *a, **{**k, 'include_defaults': False}); "
)


def call(module: str, *arguments: str, before: str = "") -> subprocess.CompletedProcess[str]:
    """Run a command as users do; our start-up module is imported first, as an installed ``.pth`` file does."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    for name in ("LM_EVAL_EDITING_AUTOLOAD", "LM_EDIT_DEBUG"):
        environment.pop(name, None)
    code = (
        f"import runpy, sys, lm_eval_editing_autoload; {before}sys.argv = sys.argv[1:]; "
        "runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)"
    )
    return run_warm(["-c", code, module, *arguments], env=environment, cwd=Path.cwd())


def test_the_command_lm_eval() -> None:
    options = ["--model", "edited_hf", "--model_args", "editor=rom", "--include_path", str(ROOT / "lm_eval_tasks")]
    done = call("lm_eval", *options, "--tasks", "bake_rq", before=NO_STOCK_TASKS)
    assert "lm_eval: unknown editor 'rom'. Did you mean 'rome' or 'r_rome'?" in done.stderr
    assert done.returncode == 2 and "Traceback" not in done.stderr


def test_the_command_lm_edit(tmp_path: Path) -> None:
    done = call("lm_edit.cli.main", "validate", str(tmp_path / "missing.jsonl"))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("lm-edit validate: the file of edits") and "Traceback" not in done.stderr
