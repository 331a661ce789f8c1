#!/bin/sh
# Install a wheel into a new environment, outside the source tree, and use what it installs.
set -eu
wheel=$(realpath "$1")
constraints=$(realpath constraints.txt)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
"${PYTHON:-python3}" -m venv "$scratch/env"
"$scratch/env/bin/python" -m pip install -q --disable-pip-version-check -c "$constraints" "$wheel"
cd "$scratch"
"$scratch/env/bin/openclaw-rl" --version
"$scratch/env/bin/openclaw-rl" serve --dry-run >/dev/null
"$scratch/env/bin/openclaw-rl" completion bash | bash -n
# Templates, phrases, questions and personas are loaded from the package.
"$scratch/env/bin/python" -c '
from importlib.resources import files
from openclaw_rl.evals.personas.persona import load

load("brief")
for name in ("dashboard/report.html.j2", "judge/reader/phrases/en.toml", "evals/data/questions.jsonl"):
    assert (files("openclaw_rl") / name).is_file(), name
'
echo "The wheel works."
