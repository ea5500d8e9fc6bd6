#!/usr/bin/env bash
# Sets up an environment (see _setup.sh) and runs two benchmarks on a small real model with the embedded sample data.
#
#   scripts/quickstart.sh [lm_eval arguments]      e.g. scripts/quickstart.sh --model_args editor=memit --limit 20
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_setup.sh"

set_up demo
cd "$ROOT"

# Of repeated options lm_eval uses the last value, except --tasks, whose values it combines.
output="results/quickstart"
tasks=(--tasks bake_rq,qaedit_wild)
previous=""
for argument in "$@"; do
  case "$argument" in
    --output_path=*) output="${argument#*=}" ;;
    --tasks | --tasks=* | -t) tasks=() ;;
  esac
  case "$previous" in --output_path | -o) output="$argument" ;; esac
  previous="$argument"
done
started="$(mktemp)"
trap 'rm -f "$started"' EXIT

command=(lm_eval --model edited_hf ${tasks[@]+"${tasks[@]}"} --limit 6 --output_path "$output" --log_samples "$@")
say "${command[*]}"
"${command[@]}"

written() { find "$output" -name "$1" -newer "$started" 2>/dev/null | sort; }
say "Results (scores, configuration, versions):"
written '*results_*.json'
say "Samples (one line per case: prompts, raw answers, verdicts, edit diagnostics):"
written '*samples_*.jsonl'
