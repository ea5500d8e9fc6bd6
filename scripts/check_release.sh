#!/usr/bin/env bash
# Sets up an environment (see _setup.sh), builds the wheel and the source distribution in dist/, and runs what they
# install: in fresh environments, from an empty folder, without the checkout.
#
#   scripts/check_release.sh [version]     also checks that files, changelog and citation are of this version
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_setup.sh"

set_up demo,test,peft,quantized,report,leaderboard,slurm,ray,inspect,ike # as test.sh, so that one set-up serves both
cd "$ROOT"
if [ -n "${1:-}" ]; then
  grep -q "^version = \"$1\"$" pyproject.toml || fail "pyproject.toml has another version than $1"
  grep -q "^version: $1$" CITATION.cff || fail "CITATION.cff has another version than $1"
  grep -qE "^## \[$1\] - [0-9]{4}-[0-9]{2}-[0-9]{2}$" CHANGELOG.md || fail "CHANGELOG.md has no dated section [$1]"
fi

say "Building dist/"
rm -rf dist
python -m hatchling build -t sdist -t wheel -d dist
say "Installing and running what was built"
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 python -m pytest -q -m slow tests/end_to_end/test_release.py tests/end_to_end/test_install.py
ls -l dist
