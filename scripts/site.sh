#!/usr/bin/env bash
# Sets up an environment (see _setup.sh), builds the documentation site and checks its links. Only pip needs the network.
#
#   scripts/site.sh [folder]                             default: site/
#   DOCS_NOTEBOOKS=all scripts/site.sh                   also executes the notebooks, about four minutes (first: one of them)
#   DOCS_REPOSITORY=https://<address of the files>       makes links to files that are no pages
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_setup.sh"

choose_environment
"$VENV/bin/python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
  fail "Sphinx 9 needs Python 3.11 or newer; the environment $VENV has $("$VENV/bin/python" --version 2>&1)"
installed_from_here || set_up demo,leaderboard,report,ike # ike: the plan field_3k, whose dry run a page shows, checks its embedder
cd "$ROOT"
readarray -t needed < <("$VENV/bin/python" -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["dependency-groups"]["docs"], sep="\n")')
"$VENV/bin/python" - "${needed[@]}" <<'PY' || { say "Installing what builds the site" && pip_install "${needed[@]}"; }
import importlib.metadata, sys
from packaging.requirements import Requirement
for requirement in map(Requirement, sys.argv[1:]):
    try:
        version = importlib.metadata.version(requirement.name)
    except importlib.metadata.PackageNotFoundError:
        sys.exit(1)
    if version not in requirement.specifier:
        sys.exit(1)
PY

out="${1:-site}"
say "Building $out"
[ ! -e "$out/.buildinfo" ] || rm -rf -- "$out" # a built site: pages that are gone would stay
"$VENV/bin/python" -m sphinx -W --keep-going -q -b html docs "$out"
"$VENV/bin/python" scripts/check_site.py "$out"
