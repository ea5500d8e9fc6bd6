# Sourced by the other scripts. Finds or creates a Python environment and installs the project in it.
#
#   set_up EXTRAS     e.g. set_up demo,test,peft; afterwards $VENV is the environment, first on PATH
#
# Environment: $LM_EDIT_VENV if set (created if missing), else the active one ($VIRTUAL_ENV), else .venv in the checkout.
# Versions: constraints.txt, or the file in $LM_EDIT_CONSTRAINTS (empty: the newest versions).
# Build of torch: on a machine without a GPU the one for CPUs, which needs no gigabytes of CUDA libraries;
#   LM_EDIT_TORCH=default    whatever pip finds; LM_EDIT_TORCH=cpu: the CPU build on a machine with a GPU, too
#   LM_EDIT_TORCH_INDEX=URL  an index or mirror that has CPU builds, for pip
# Another run installs nothing unless pyproject.toml, the constraints or this file have changed.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
CONSTRAINTS="${LM_EDIT_CONSTRAINTS-$ROOT/constraints.txt}"

say() { printf '\n== %s\n' "$*"; }
fail() {
  printf 'error: %s\n' "$*" >&2
  exit 1
}

is_new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1; }

find_python() { # prints the first Python >= 3.10
  local candidate
  for candidate in ${PYTHON:+"$PYTHON"} python3 python3.13 python3.12 python3.11 python3.10 python; do
    if command -v "$candidate" >/dev/null 2>&1 && is_new_enough "$candidate"; then
      command -v "$candidate"
      return
    fi
  done
  fail "no Python 3.10 or newer found (python3 is $(python3 --version 2>&1 || true)); install one, or name it: PYTHON=/path/to/python $0"
}

choose_environment() {
  VENV="${LM_EDIT_VENV:-${VIRTUAL_ENV:-$ROOT/.venv}}"
  if [ ! -x "$VENV/bin/python" ]; then
    local python
    python="$(find_python)" || exit 1
    say "Making the environment $VENV with $python"
    "$python" -m venv "$VENV" || fail "$python could not make $VENV; on Debian and Ubuntu install the package python3-venv"
  fi
  VENV="$(cd "$VENV" && pwd -P)"
  is_new_enough "$VENV/bin/python" ||
    fail "the environment $VENV has $("$VENV/bin/python" --version 2>&1), at least 3.10 is needed; deactivate it or set LM_EDIT_VENV to another folder"
  export VIRTUAL_ENV="$VENV" PATH="$VENV/bin:$PATH"
}

fingerprint() { # prints a hash of what decides the installation, apart from the extras
  "$VENV/bin/python" - "$ROOT" "$ROOT/pyproject.toml" "$ROOT/scripts/_setup.sh" ${CONSTRAINTS:+"$CONSTRAINTS"} <<'PY'
import hashlib, pathlib, sys
root, *files = sys.argv[1:]
parts = [root.encode(), sys.version.encode(), *(pathlib.Path(file).read_bytes() for file in files)]
print(hashlib.sha256(b"\0".join(parts)).hexdigest())
PY
}

installed_from_here() { # another checkout may have been installed in the same environment since
  [ "$(cd / && "$VENV/bin/python" -c 'import os, lm_eval_editing_autoload as m; print(os.path.realpath(m.__file__))' 2>/dev/null)" \
    = "$ROOT/lm_eval_editing_autoload.py" ]
}

pip_install() {
  local quiet=-qq # errors only
  if [ -t 1 ]; then quiet=; fi
  "$VENV/bin/python" -m pip install --disable-pip-version-check $quiet ${CONSTRAINTS:+-c "$CONSTRAINTS"} "$@" ||
    fail "pip could not install $*; its message is above"
}

has_gpu() { [ -e /dev/kfd ] || nvidia-smi -L 2>/dev/null | grep -q GPU; }

wants_cpu_build() {
  case "${LM_EDIT_TORCH:-}" in
    cpu) return 0 ;;
    default) return 1 ;;
    "") [ "$(uname -s)" = Linux ] && ! has_gpu ;; # elsewhere pip finds builds without CUDA
    *) fail "LM_EDIT_TORCH is '$LM_EDIT_TORCH'; accepted are cpu and default (whatever pip finds)" ;;
  esac
}

has_torch() { # an installed version that satisfies the requirement
  "$VENV/bin/python" - "$1" 2>/dev/null <<'PY'
import importlib.metadata, sys
from pip._vendor.packaging.requirements import Requirement
requirement = Requirement(sys.argv[1])
sys.exit(not requirement.specifier.contains(importlib.metadata.version(requirement.name), prereleases=True))
PY
}

pip_finds_cpu_build() { # as an index in the user's configuration, or a cache of wheels, may offer
  "$VENV/bin/python" -m pip install --disable-pip-version-check -qq --dry-run --report - ${CONSTRAINTS:+-c "$CONSTRAINTS"} "$1" 2>/dev/null |
    "$VENV/bin/python" -c '
import json, sys
found = [entry["metadata"] for entry in json.load(sys.stdin)["install"]]
torch = [entry["version"] for entry in found if entry["name"] == "torch"]
cuda = [entry["name"] for entry in found if entry["name"].startswith(("nvidia-", "cuda-"))]
sys.exit(not torch or bool(cuda) or "+cu" in torch[0])' 2>/dev/null
}

install_torch() { # REQUIREMENT; first and alone, so that no range in another requirement chooses another build
  if has_torch "$1"; then return; fi
  say "Installing $1 (the first time takes minutes)"
  if ! wants_cpu_build; then
    pip_install "$1"
    return
  fi
  echo "CPU build (no GPU found, or LM_EDIT_TORCH=cpu). LM_EDIT_TORCH=default installs what pip finds."
  if [ -n "${LM_EDIT_TORCH_INDEX:-}" ]; then
    pip_install --extra-index-url "$LM_EDIT_TORCH_INDEX" "$1"
  elif pip_finds_cpu_build "$1"; then
    pip_install "$1"
  else
    pip_install uv # knows where PyTorch keeps its builds
    "$VENV/bin/python" -m uv pip install --quiet --python "$VENV/bin/python" --torch-backend cpu "$1" ||
      fail "no CPU build of $1 could be installed; name an index that has one with LM_EDIT_TORCH_INDEX=URL, or take the build with CUDA libraries with LM_EDIT_TORCH=default"
  fi
}

install_project() {
  local torch
  "$VENV/bin/python" -m pip --version >/dev/null 2>&1 || "$VENV/bin/python" -m ensurepip >/dev/null ||
    fail "the environment $VENV has no pip"
  torch="$([ -z "$CONSTRAINTS" ] || grep -E '^torch==' "$CONSTRAINTS" || true)"
  install_torch "${torch:-$(sed -n 's/^ *"\(torch>=[^"]*\)",$/\1/p' "$ROOT/pyproject.toml")}"
  say "Installing lm-eval-editing[$1] and what it needs"
  pip_install -e "$ROOT[$1]"
}

is_set_up() { # EXTRAS FINGERPRINT: an earlier run installed these extras or more
  local stamp extra
  for stamp in "$VENV"/.lm-eval-editing-*; do
    for extra in ${1//,/ }; do
      case "-${stamp##*/.lm-eval-editing-}-" in *-"$extra"-*) ;; *) continue 2 ;; esac
    done
    if [ "$(cat "$stamp" 2>/dev/null)" = "$2" ] && installed_from_here; then return; fi
  done
  return 1
}

set_up() {
  local want
  [ -z "$CONSTRAINTS" ] || [ -f "$CONSTRAINTS" ] || fail "LM_EDIT_CONSTRAINTS names $CONSTRAINTS, which is not a file"
  choose_environment
  want="$(fingerprint)"
  if is_set_up "$1" "$want"; then
    say "Environment $VENV is up to date"
    return
  fi
  install_project "$1"
  printf '%s\n' "$want" >"$VENV/.lm-eval-editing-${1//,/-}"
}
