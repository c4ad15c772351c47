#!/usr/bin/env bash
# Shows on a GPU machine, one H200 say, what training on SGLang does there. Prints figures as they
# come, one JSON object a line; what fails is said in a line of its own, and the next part begins.
#
#   benchmarks/h200.sh                    all parts, about half an hour
#   benchmarks/h200.sh rollouts lora      some of: rollouts lora full sync sync_1.5b sync_7b
#
# $OUT (by default runs/h200) holds all figures in figures.jsonl, and in PART.log all that was said.
# Further settings, from the environment:
#   LAUNCH   arguments of the server, for example --attention-backend fa3
#   MODELS   where random models are kept: 20 GB, on a fast disk
#   MODEL    the tiny model's folder; by default it is made on first use
#   SECONDS_A_PART   limit of each part
#   PYTHON   the interpreter; SERVER_PYTHON that of an environment with SGLang, if it is another
#   SMALL    1: sizes for a CPU, to try the script itself
set -uo pipefail
cd "$(dirname "$0")/.."

OUT=${OUT:-runs/h200}
LAUNCH=${LAUNCH---attention-backend triton --sampling-backend pytorch}
MODELS=${MODELS:-${TMPDIR:-/tmp}/agentrl-models}
MODEL=${MODEL:-}
PYTHON=${PYTHON:-python3}
SECONDS_A_PART=${SECONDS_A_PART:-590}
export PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false PYTHONPATH="$PWD:$PWD/benchmarks${PYTHONPATH:+:$PYTHONPATH}"
mkdir -p "$OUT"
runs=$(mktemp -d)
trap 'rm -rf "$runs"' EXIT

options=(--launch="$LAUNCH" --models "$MODELS")
[ -n "${SERVER_PYTHON:-}" ] && options+=(--python "$SERVER_PYTHON")
[ "${SMALL:-}" = 1 ] && options+=(--device cpu --small)
bare=(--launch="$LAUNCH --disable-cuda-graph")
tiny=(--model "$MODEL" --output "$runs" --memory 0.1)

part() {  # NAME SCRIPT ARGUMENTS…
  local name=$1 began=$SECONDS rc
  shift
  # The limit ends the script as Ctrl-C would, so that it ends its server.
  timeout --signal=INT --kill-after=30 "$SECONDS_A_PART" "$PYTHON" "benchmarks/$1" "${options[@]}" "${@:2}" 2>&1 |
    tee "$OUT/$name.log" | grep --line-buffered '^{"name"' | tee -a "$OUT/figures.jsonl"
  rc=${PIPESTATUS[0]}
  if [ "$rc" -ne 0 ]; then
    failed+=("$name")
    echo "--- $name ended with $rc; its last lines:"
    grep -v '^{"name"' "$OUT/$name.log" | tail -n 25
  fi
  echo "--- $name: $((SECONDS - began)) s"
}

failed=()
for name in ${*:-rollouts lora full sync sync_1.5b sync_7b}; do
  case $name in
    rollouts) part rollouts sglang_rollouts.py ;;
    sync) part sync sglang_sync.py --shapes 0.5b ;;
    # A server starts sooner without CUDA graphs, and nothing here is measured that they make faster.
    sync_1.5b) part sync_1.5b sglang_sync.py --shapes 1.5b --cases full lora "${bare[@]}" ;;
    sync_7b) part sync_7b sglang_sync.py --shapes 7b --cases full lora "${bare[@]}" ;;
    lora) part lora sglang_train.py --lora 16 --steps 50 "${tiny[@]}" ;;
    full) part full sglang_train.py --goal 0.9 "${tiny[@]}" ;;
    *) echo "no part $name" && failed+=("$name") ;;
  esac
done
[ ${#failed[@]} -eq 0 ] || { echo "failed: ${failed[*]}"; exit 1; }
