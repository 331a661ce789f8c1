#!/usr/bin/env bash
# Serve Qwen3-4B, or HF_CKPT, and train all its weights from scores, and the best of several hints on the likeliest tokens.
# Options follow; --dry-run shows what would run. Variables: docs/launchers.md.
exec bash "$(dirname "$0")/launch.sh" "$(basename "$0" .sh)" "$@"
