#!/usr/bin/env bash
# Serve MODEL_PATH, and train all its weights from scores and hints.
# Options follow; --dry-run shows what would run. Variables: docs/launchers.md.
exec bash "$(dirname "$0")/launch.sh" "$(basename "$0" .sh)" "$@"
