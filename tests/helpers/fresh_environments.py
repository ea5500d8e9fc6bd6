"""Fresh virtual environments that see the packages of the running one, but run none of its start-up hooks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import venv
from pathlib import Path
from typing import Any

SWITCH = "LM_EVAL_EDITING_AUTOLOAD"


class Environment:
    """A fresh virtual environment without pip; ``pip`` is that of the running interpreter."""

    def __init__(self, folder: Path, sees_running_packages: bool = True) -> None:
        venv.EnvBuilder(with_pip=False, symlinks=os.name != "nt").create(folder)
        self.python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
        self.work = folder / "work"  # an empty current directory, so that nothing is importable by accident
        self.work.mkdir()
        self.site = Path(self.run("import sysconfig; print(sysconfig.get_paths()['purelib'])").stdout.strip())
        if sees_running_packages:
            # Paths named in a .pth file are searched, their own .pth files are not run.
            outer = [path for path in sys.path if Path(path).name in {"site-packages", "dist-packages"}]
            (self.site / "zz_running_environment.pth").write_text("\n".join(outer) + "\n")

    def environ(self, **variables: str) -> dict[str, str]:
        hidden = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PYTHONDONTWRITEBYTECODE", SWITCH}
        visible = {name: value for name, value in os.environ.items() if name not in hidden}
        offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "PYTHONNOUSERSITE": "1"}
        return {**visible, **offline, **variables}

    def call(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        command = [str(self.python), *arguments]
        environ = self.environ(**variables)
        return subprocess.run(command, capture_output=True, text=True, env=environ, cwd=self.work, timeout=300)

    def run(self, code: str, **variables: str) -> subprocess.CompletedProcess[str]:
        done = self.call("-c", textwrap.dedent(code), **variables)
        assert done.returncode == 0, done.stderr
        return done

    def evaluate(self, code: str, **variables: str) -> Any:
        """Run ``code`` and return the JSON value that it prints last."""
        return json.loads(self.run(code, **variables).stdout.strip().splitlines()[-1])

    def pip(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "pip", "--python", str(self.python), "--disable-pip-version-check", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, env=self.environ(), cwd=self.work, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr

    def files(self) -> set[str]:
        return {path.relative_to(self.site).as_posix() for path in self.site.rglob("*")}
