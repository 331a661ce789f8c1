#!/usr/bin/env bash
# Hybrid GRPO + top-k OPD with overlap-guided hint selection, on Qwen3-4B unless HF_CKPT names another model.
#
#   bash launch/run_qwen3_4b_openclaw_topk_select.sh [further options of openclaw-rl serve, such as --dry-run]
#
# Read by the program itself: OPENCLAW_TOPK_W_RL, OPENCLAW_TOPK_W_OPD, OPENCLAW_TOPK_K, OPENCLAW_TOPK_MAX_CAND,
# OPENCLAW_TOPK_HINT_SELECTION, OPENCLAW_TOPK_SUBSET_MODE, OPENCLAW_TOPK_ADV_DIFF_CLIP, OPENCLAW_RECORD_ENABLED, PRM_M.
# Mapped here: HF_CKPT (the policy), PRM_TEACHER_HF and PRM_MODEL_PATH (teacher and judge), SAVE_CKPT (the run
# directory), REF_LOAD (a checkpoint of this program to begin from). Weight 0 switches a branch off.
set -euo pipefail

refuse() { echo "$*" >&2; exit 2; }

root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-$root/.venv/bin/python}
[ -x "$python" ] || refuse "Not installed yet: run 'make install' in $root."

policy=${HF_CKPT:-Qwen/Qwen3-4B-Instruct-2507}
options=(--method topk-select --model-name "$policy" --eps-clip 0.2 --eps-clip-high 0.28)

[ -z "${PRM_TEACHER_LOAD:-}" ] || refuse \
  "PRM_TEACHER_LOAD names a Megatron checkpoint, which cannot be loaded here: give the Hugging Face folder as PRM_TEACHER_HF."
teacher=${PRM_TEACHER_HF:-${PRM_MODEL_PATH:-}}
[ "${PRM_MODEL_PATH:-$teacher}" = "$teacher" ] || refuse \
  "PRM_MODEL_PATH and PRM_TEACHER_HF differ, and one model is judge and teacher here: give one of them, and for another judge --judge-base-url and --judge-model."
[ -z "$teacher" ] || options+=(--teacher-model-name "$teacher")

if [ -n "${REF_LOAD:-}" ]; then
  [ -f "$REF_LOAD/checkpoint.json" ] || refuse \
    "REF_LOAD is no checkpoint of this program (a Megatron one cannot be loaded here): give the Hugging Face folder as HF_CKPT."
  options+=(--resume-from-ckpt "$REF_LOAD")
fi
[ -z "${SAVE_CKPT:-}" ] || options+=(--run-dir "$SAVE_CKPT")

for variable in NUM_GPUS ACTOR_GPUS ROLLOUT_GPUS PRM_GPUS PRM_TEACHER_GPUS; do
  [ -z "${!variable:-}" ] || echo "$variable has no effect: policy, teacher and learner share one device here." >&2
done

exec "$python" "$root/run.py" "${options[@]}" "$@"
