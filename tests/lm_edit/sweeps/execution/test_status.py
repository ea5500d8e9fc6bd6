"""What a running run does, by the progress bars in its log."""

from __future__ import annotations

import pytest
from tqdm import tqdm

from edit_hooks.lm.editing.stored_bar import StoredBar
from lm_edit.sweeps.execution.runs import LOG
from lm_edit.sweeps.execution.status import stage_of


@pytest.mark.parametrize(("done", "stage"), [(0, "Scoring under edits: 0 of 8"), (6, "Scoring under edits: 6 of 8, ")])
def test_the_last_bar_of_a_log(done, stage, tmp_path):
    with (tmp_path / LOG).open("w") as log:
        log.write("a line\nEditing with rome: 100%|##########| 3/3 [00:01<00:00]\n")
        bar = tqdm(total=8, desc="Scoring under edits", unit="prompt", file=log, mininterval=0)
        bar.update(done)
        bar.refresh()
        log.flush()
        found = stage_of(tmp_path)
        bar.close()
    assert found.startswith(stage) and found.endswith(" left") == bool(done)


def test_a_log_without_bars(tmp_path):
    assert stage_of(tmp_path) == ""
    (tmp_path / LOG).write_text("loading 50% of nothing\n")
    assert stage_of(tmp_path) == ""


def test_the_time_left_of_edits_is_that_of_their_bar(tmp_path, capfd):
    with StoredBar(9, "Editing with grace", quiet=False) as bar:
        bar.computed(3)
        bar._bar.refresh()
        (tmp_path / LOG).write_text(capfd.readouterr().err)
        assert stage_of(tmp_path) == "Editing with grace: 0 of 9, 0 s left"
