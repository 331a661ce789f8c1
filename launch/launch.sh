#!/usr/bin/env bash
# Runs a script of this folder by its name: launch.sh NAME [options]. The scripts call it.
set -euo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-$root/.venv/bin/python}
[ -x "$python" ] || { echo "Not installed yet: run 'make install' in $root." >&2; exit 2; }
exec "$python" -m openclaw_rl launch "$@"
