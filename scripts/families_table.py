"""Write docs/_data/families.yaml: the self-check of a tiny model of every family.

    python scripts/families_table.py            # all families
    python scripts/families_table.py smollm3    # some of them; the others keep their rows

The models are built from configurations with random weights, so the table shows what the code of a family supports.
"""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

import yaml
from tqdm import tqdm

from edit_hooks.contract.family_configs import FAMILY_CONFIGS
from edit_hooks.contract.tiny_models import ALL_MODEL_TYPES, build_model
from edit_hooks.self_check.run import self_check, summary

FILE = Path(__file__).resolve().parents[1] / "docs" / "_data" / "families.yaml"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = [*ALL_MODEL_TYPES, *FAMILY_CONFIGS]
    parser.add_argument("families", nargs="*", choices=[*known, []], help="model types")
    names = parser.parse_args().families or known
    logging.disable(logging.WARNING)
    rows = yaml.safe_load(FILE.read_text(encoding="utf-8")) if FILE.is_file() else {}
    for name in tqdm(names):
        model = build_model(name)
        rows[name] = summary(model, self_check(model))
    text = yaml.safe_dump({name: rows[name] for name in sorted(known) if name in rows}, sort_keys=False, width=120)
    FILE.write_text(f"# Written by scripts/families_table.py; tests/contract/test_families.py checks it.\n{text}")


if __name__ == "__main__":
    main()
