# Shared by the scripts beside it; sourced, not run. Finds or makes a Python environment and installs the project in it.
#
#   set_up EXTRAS     e.g. set_up demo,test,peft; afterwards $VENV is the environment, first on PATH
#
# The environment: $LM_EDIT_VENV if set (made when missing), else the active one ($VIRTUAL_ENV), else .venv of the checkout.
# The versions: constraints.txt, or another file named by $LM_EDIT_CONSTRAINTS (empty: the newest that pip finds).
# A second run installs nothing while pyproject.toml, the constraints and this file are unchanged.

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

fingerprint() { # of all that decides what is installed
  "$VENV/bin/python" - "$ROOT" "$1" "$ROOT/pyproject.toml" "$ROOT/scripts/_setup.sh" ${CONSTRAINTS:+"$CONSTRAINTS"} <<'PY'
import hashlib, pathlib, sys
root, extras, *files = sys.argv[1:]
parts = [root.encode(), extras.encode(), sys.version.encode(), *(pathlib.Path(file).read_bytes() for file in files)]
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

install_project() {
  local torch
  "$VENV/bin/python" -m pip --version >/dev/null 2>&1 || "$VENV/bin/python" -m ensurepip >/dev/null ||
    fail "the environment $VENV has no pip"
  # First and alone: with an exact version pip can take a CPU build that the user's configuration offers; a range in
  # another package's requirements could select the newest build with its CUDA libraries.
  torch="$([ -z "$CONSTRAINTS" ] || grep -E '^torch==' "$CONSTRAINTS" || true)"
  if [ -n "$torch" ]; then
    say "Installing $torch (the first time takes minutes)"
    command -v nvidia-smi >/dev/null 2>&1 ||
      echo "No NVIDIA GPU found. If pip fetches CUDA libraries, point it to PyTorch's CPU-only index to save the space."
    pip_install "$torch"
  fi
  say "Installing lm-eval-editing[$1] and what it needs"
  pip_install -e "$ROOT[$1]"
}

set_up() {
  local stamp want
  [ -z "$CONSTRAINTS" ] || [ -f "$CONSTRAINTS" ] || fail "LM_EDIT_CONSTRAINTS names $CONSTRAINTS, which is not a file"
  choose_environment
  stamp="$VENV/.lm-eval-editing-${1//,/-}"
  want="$(fingerprint "$1")"
  if [ "$(cat "$stamp" 2>/dev/null)" = "$want" ] && installed_from_here; then
    say "Environment $VENV is up to date"
    return
  fi
  install_project "$1"
  printf '%s\n' "$want" >"$stamp"
}
