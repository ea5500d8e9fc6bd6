#!/usr/bin/env bash
# Sets up an environment (see _setup.sh), then runs linter, formatter, import contracts, type checker and tests. Only pip
# needs the network.
#
#   scripts/test.sh [pytest arguments]      e.g. scripts/test.sh tests/judges -x
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_setup.sh"

set_up demo,test,peft,quantized,report,leaderboard,slurm,ray,inspect,ike
cd "$ROOT"
# One thread per worker: more of them fight over the cores and make sums depend on the machine.
export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
export HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 TRANSFORMERS_OFFLINE=1

failed=()
types="$(mktemp)"
trap 'rm -f "$types"' EXIT
python -m mypy >"$types" 2>&1 & # the slowest check, beside the others
checker=$!
say "ruff check"
python -m ruff check . || failed+=("ruff check")
say "ruff format"
python -m ruff format --check . || failed+=("ruff format")
say "import-linter"
lint-imports || failed+=(import-linter)
say "mypy"
wait "$checker" || failed+=(mypy)
cat "$types"
say "pytest"
# One worker per file: fixtures of a module (a wheel, a loaded model) are made once. In the order of collection: the long
# files come first.
python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -q "$@" || failed+=(pytest)

if [ "${#failed[@]}" -gt 0 ]; then
  fail "failed: $(IFS=,; echo "${failed[*]}")"
fi
