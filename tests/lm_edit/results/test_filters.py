"""Conditions of ``--only``: one syntax in ``results show``, ``leaderboard`` and ``figure``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from command_line import run_verb
from result_files import write_run
from result_rows import frame, row

from edit_hooks import EditingError
from lm_edit.results.filters import filter_rows


def editors(*conditions: str) -> list[str]:
    others = [row(name, "t", "m", 1.0) for name in ("one", "two", "one, two")]
    rows = frame(row("rome", "t", "m", 1.0, seed=1.0), *others)
    return list(filter_rows(rows, conditions)["editor"])


def test_conditions_on_one_field_are_alternatives_and_those_on_several_all_hold() -> None:
    assert editors("seed=1") == ["rome"]
    assert editors("editor=rome,absent") == editors("editor=rome", "editor=absent") == ["rome"]
    assert editors("editor=rome,one", "seed=0") == ["one"]
    assert editors("limit=", "judge=", "editor=one") == ["one"]  # rows without a value


def test_a_text_with_commas_is_one_value_where_some_row_has_it() -> None:
    assert editors("editor=one, two") == ["one, two"]
    assert editors("editor=one,two") == ["one", "two"]
    assert editors("editor=one, two", "editor=one,two") == ["one", "two", "one, two"]


@pytest.mark.parametrize(
    ("condition", "message"),
    [
        ("editor", r"FIELD=VALUE\[,VALUE\] is needed"),
        ("=rome", r"FIELD=VALUE\[,VALUE\] is needed"),
        ("editr=rome", r"no such field. Did you mean 'editor' or .* Accepted: run, "),
        ("editor=r_rome", r"leaves no result; editor is one of: one, one, two, rome, two. Did you mean 'rome'"),
    ],
)
def test_other_conditions_are_refused(condition: str, message: str) -> None:
    with pytest.raises(EditingError, match=message):
        editors(condition)


@pytest.mark.parametrize("verb", ["results show", "leaderboard", "figure case_answers"])
@pytest.mark.parametrize(("value", "code", "message"), [("memit,ft_m", 0, ""), ("rme", 2, "Did you mean 'rome'?")])
def test_verbs_share_the_syntax(verb: str, value: str, code: int, message: str, tmp_path: Path, capsys: Any) -> None:
    pytest.importorskip("scipy", reason="the leaderboard extra is not installed")
    for editor in ("memit", "ft_m", "rome"):
        write_run(tmp_path / "runs" / editor, "bake_rq", editor=editor)
    options = {
        "results show": [],
        "leaderboard": ["--resamples", "9", "-o", str(tmp_path / "site")],
        "figure case_answers": ["--case", "0", "-o", str(tmp_path / "table.md")],
    }[verb]
    words = [*verb.split(), str(tmp_path / "runs"), *options]
    assert run_verb([*words, "--only", f"editor={value}"]) == code
    printed = capsys.readouterr()
    assert message in printed.err
    files = (tmp_path / "site" / "leaderboard.md", tmp_path / "table.md")
    written = printed.out + "".join(path.read_text(encoding="utf-8") for path in files if path.is_file())
    assert ("memit" in written, "ft_m" in written) == ((True, True) if code == 0 else (False, False))
    assert "rome" not in written
