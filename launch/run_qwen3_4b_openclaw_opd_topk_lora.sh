#!/usr/bin/env bash
# Serve Qwen3-4B, or HF_CKPT, and train an adapter from hints, on the likeliest tokens.
# Options follow; --dry-run shows what would run. Variables: docs/launchers.md.
exec bash "$(dirname "$0")/launch.sh" "$(basename "$0" .sh)" "$@"
