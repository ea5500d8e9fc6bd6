"""A benchmark made as CONTRIBUTING.md describes: a copy of the template under another name."""

from __future__ import annotations

import re
from pathlib import Path

from paths import ROOT

TEMPLATE = ROOT / "docs" / "templates" / "benchmark"


def copy_template(folder: Path, name: str, module: str) -> Path:
    """Copy the template to ``folder/name`` with its names replaced.

    Args:
        name: name of the benchmark, lower case with underscores.
        module: import path of the copied folder.
    """
    title = "".join(part.capitalize() for part in name.split("_"))
    words = {"my_benchmark": name, "MY_BENCHMARK": name.upper(), "MyBenchmark": title, "my-benchmark": name}
    for path in sorted(TEMPLATE.rglob("*")):
        if path.is_dir() or "__pycache__" in path.parts:
            continue
        text = path.read_text(encoding="utf-8").replace("lm_eval_tasks.my_benchmark", module)
        text = re.sub("|".join(words), lambda match: words[match[0]], text)
        copy = folder / name / str(path.relative_to(TEMPLATE)).replace("my_benchmark", name)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(text, encoding="utf-8")
    return folder / name
