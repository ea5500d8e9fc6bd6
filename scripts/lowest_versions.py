"""Print the lowest versions that pyproject.toml allows, as constraints for pip.

    python scripts/lowest_versions.py > lowest.txt      (Python 3.11 or later)
    LM_EDIT_CONSTRAINTS=lowest.txt bash scripts/test.sh

The tools of the extra `test` have the versions of constraints.txt: their results depend on these, and users do not run
them.
"""

from __future__ import annotations

import re
from pathlib import Path

import tomllib

TOOLS = ("test", "dev")
NAME = re.compile(r"[A-Za-z0-9_.-]+")
LOWEST = re.compile(r"([A-Za-z0-9_.-]+)>=([0-9.]+)")


def lowest_versions(pyproject: str) -> dict[str, str]:
    """The lowest version of each direct requirement that has one."""
    project = tomllib.loads(pyproject)["project"]
    extras = [each for name, each in project["optional-dependencies"].items() if name not in TOOLS]
    requirements = [text for each in (project["dependencies"], *extras) for text in each]
    return dict(match.groups() for match in map(LOWEST.match, requirements) if match)


def tool_versions(pyproject: str, constraints: str) -> list[str]:
    """The lines of a constraints file about direct requirements of the tools, except those with a lowest version."""
    extras = tomllib.loads(pyproject)["project"]["optional-dependencies"]
    found = [NAME.match(text) for name in TOOLS for text in extras.get(name, ())]
    tools = {match[0] for match in found if match} - set(lowest_versions(pyproject))
    named = ((NAME.match(line), line) for line in constraints.splitlines())
    return [line for match, line in named if match and match[0] in tools]


if __name__ == "__main__":
    root = Path(__file__).parents[1]
    pyproject, constraints = (root.joinpath(name).read_text("utf-8") for name in ("pyproject.toml", "constraints.txt"))
    lowest = [f"{name}=={version}" for name, version in lowest_versions(pyproject).items()]
    print("\n".join([*lowest, *tool_versions(pyproject, constraints)]))
