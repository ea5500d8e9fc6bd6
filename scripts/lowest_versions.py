"""Print the lowest versions that pyproject.toml allows, as constraints for pip.

    python scripts/lowest_versions.py > lowest.txt      (Python 3.11 or later)
    LM_EDIT_CONSTRAINTS=lowest.txt bash scripts/test.sh

The tools of the extra `test` are left out: their results depend on their versions, and users do not run them.
"""

from __future__ import annotations

import re
from pathlib import Path

import tomllib

TOOLS = ("test", "dev")
LOWEST = re.compile(r"([A-Za-z0-9_.-]+)>=([0-9.]+)")


def lowest_versions(pyproject: str) -> dict[str, str]:
    """The lowest version of each direct requirement that has one."""
    project = tomllib.loads(pyproject)["project"]
    extras = [each for name, each in project["optional-dependencies"].items() if name not in TOOLS]
    requirements = [text for each in (project["dependencies"], *extras) for text in each]
    return dict(match.groups() for match in map(LOWEST.match, requirements) if match)


if __name__ == "__main__":
    text = (Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    for name, version in lowest_versions(text).items():
        print(f"{name}=={version}")
