#!/usr/bin/env bash
# Serve Qwen3-4B, or HF_CKPT, from the SGLang servers of slime, which trains all its weights from hints.
# Options follow; --dry-run also shows slime's command line. Variables: docs/launchers.md, docs/slime.md.
exec bash "$(dirname "$0")/launch.sh" "$(basename "$0" .sh)" "$@"
