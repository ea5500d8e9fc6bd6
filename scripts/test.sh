#!/usr/bin/env bash
# Sets up an environment (see _setup.sh), then runs the linter, the type checker and the tests. Needs no network but pip's.
#
#   scripts/test.sh [pytest arguments]      e.g. scripts/test.sh tests/test_install.py -x
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_setup.sh"

set_up demo,test,peft,report,ike
cd "$ROOT"
# One thread per worker: more of them fight over the cores and make sums depend on the machine.
export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
export HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 TRANSFORMERS_OFFLINE=1

failed=()
say "ruff check"
python -m ruff check . || failed+=(ruff)
say "mypy"
python -m mypy || failed+=(mypy)
say "pytest"
python -m pytest -n 2 --dist loadgroup -q "$@" || failed+=(pytest)

if [ "${#failed[@]}" -gt 0 ]; then
  fail "failed: ${failed[*]}"
fi
