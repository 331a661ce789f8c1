#!/usr/bin/env bash
# Run episodes on code repositories, and train MODEL_PATH on their rewards.
# Options follow; --dry-run shows what would run. Variables: docs/launchers.md.
exec bash "$(dirname "$0")/launch.sh" "$(basename "$0" .sh)" "$@"
