#!/usr/bin/env bash
# Measure what a model or a checkpoint can do: --model-path, --eval-tasks.
# Options follow; --dry-run shows what would run. Variables: docs/launchers.md.
exec bash "$(dirname "$0")/launch.sh" "$(basename "$0" .sh)" "$@"
