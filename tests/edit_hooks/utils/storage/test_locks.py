"""Locks between processes."""

from __future__ import annotations

import logging
import subprocess
import sys

from edit_hooks.utils.storage.locks import locked


def test_a_lock_waits_for_its_holder_and_says_so(tmp_path, caplog):
    path = tmp_path / "folder" / "a.lock"
    hold = (
        "import sys\nfrom pathlib import Path\nfrom edit_hooks.utils.storage.locks import locked\n"
        f"with locked(Path({str(path)!r})):\n    print('held', flush=True)\n    sys.stdin.read()\n"
    )
    with subprocess.Popen([sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline().strip() == b"held"

        class EndHolder(logging.Handler):
            """Ends the holder as soon as the wait is announced; killed, it releases its lock like any process."""

            def emit(self, record: logging.LogRecord) -> None:
                if "somebody holds it" in record.getMessage():
                    holder.kill()

        handler = EndHolder()
        logging.getLogger("edit_hooks").addHandler(handler)
        try:
            with locked(path, waiting="somebody holds it"):
                assert holder.wait(10) != 0
        finally:
            logging.getLogger("edit_hooks").removeHandler(handler)
    caplog.clear()
    with locked(path, waiting="somebody holds it"):
        assert "somebody holds it" not in caplog.text


def test_a_folder_that_takes_no_file_costs_the_lock_and_not_the_run(tmp_path, caplog):
    (tmp_path / "file").write_text("no folder", encoding="utf-8")
    entered = False
    with caplog.at_level(logging.WARNING), locked(tmp_path / "file" / "a.lock"):
        entered = True
    assert entered and "cannot write to" in caplog.text
