#!/usr/bin/env bash
# Submit another script's server to the Ray cluster at RAY_ADDRESS: run_ray.sh run_qwen3_4b_openclaw_rl_lora [options].
# Options follow; --dry-run shows what would run. Variables: docs/launchers.md.
exec bash "$(dirname "$0")/launch.sh" "$(basename "$0" .sh)" "$@"
