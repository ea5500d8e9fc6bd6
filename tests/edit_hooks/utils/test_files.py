"""Files appear whole or not at all; what dead processes left is cleared away, what living ones write is not."""

import os
import signal
import subprocess
import sys

import pytest
from paths import ROOT

from edit_hooks.utils.files import remove_leftovers, replacing


def test_a_file_appears_whole_or_not_at_all(tmp_path):
    path = tmp_path / "file.json"
    with replacing(path) as temporary:
        temporary.write_text("new")
        assert not path.exists()
    assert path.read_text() == "new"
    with pytest.raises(RuntimeError), replacing(path) as temporary:
        temporary.write_text("half")
        raise RuntimeError
    assert path.read_text() == "new" and [found.name for found in tmp_path.iterdir()] == ["file.json"]


def test_leftovers_of_dead_processes_are_removed(tmp_path):
    code = (
        "import os, signal, pathlib, sys\n"
        "from edit_hooks.utils.files import replacing\n"
        "with replacing(pathlib.Path(sys.argv[1])) as temporary:\n"
        "    temporary.write_text('half')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "dead.json")], env=environment, timeout=60)
    assert done.returncode == -signal.SIGKILL and len(list(tmp_path.iterdir())) == 1
    (tmp_path / ".others.0123456789ab-1-00000000.tmp").write_text("another machine's")
    (tmp_path / ".any.tmp").write_text("not ours")
    with replacing(tmp_path / "alive.json") as temporary:
        temporary.write_text("being written")
        assert remove_leftovers(tmp_path) == 1 and temporary.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".any.tmp",
        ".others.0123456789ab-1-00000000.tmp",
        "alive.json",
    ]
    assert remove_leftovers(tmp_path / "nowhere") == 0
