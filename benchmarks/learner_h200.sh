#!/usr/bin/env bash
# Shows on a GPU machine, one H200 say, what the learner's updates cost there. Prints figures as they
# come, one JSON object a line; what fails is said in a line of its own, and the next part begins.
#
#   benchmarks/learner_h200.sh             all parts
#   benchmarks/learner_h200.sh 0.5b long   some of: kernels 0.5b 1.5b 1.5b-recompute 7b-lora long
#                                          shared offload ranks (which is in none but its own call)
#
# $OUT (by default runs/learner_h200) holds all figures in figures.jsonl, and in PART.log all that
# was said. Further settings, from the environment:
#   MODELS   where random models are kept: 20 GB, on a fast disk
#   ARMS     of hand, trl, agentrl: what is run beside the learner; by default hand and agentrl
#   MORE     further arguments of learner.py, for example --compile never
#   RANKS    GPUs of the part ranks, by default 2
#   SECONDS_A_PART   limit of each part
#   PYTHON   the interpreter
#   SMALL    1: sizes for a CPU, to try the script itself
set -uo pipefail
cd "$(dirname "$0")/.."

OUT=${OUT:-runs/learner_h200}
MODELS=${MODELS:-${TMPDIR:-/tmp}/agentrl-models}
PYTHON=${PYTHON:-python3}
SECONDS_A_PART=${SECONDS_A_PART:-590}
RANKS=${RANKS:-2}
export PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false PYTHONPATH="$PWD:$PWD/benchmarks${PYTHONPATH:+:$PYTHONPATH}"
mkdir -p "$OUT"

options=(--models "$MODELS")
read -ra arms <<<"${ARMS:-hand agentrl}"
read -ra more <<<"${MORE:-}"
small=() kernels=()
if [ "${SMALL:-}" = 1 ]; then
  # Options given last win.
  small=(--shape small --trajs 4 --group 2 --prompt 20 --mean 40 --tokens 256 --long 256 --steps 1)
  kernels=(--tiny --repetitions 1)
fi

part() {  # NAME SCRIPT ARGUMENTS…
  local name=$1 began=$SECONDS rc
  shift
  timeout --signal=INT --kill-after=30 "$SECONDS_A_PART" "$PYTHON" "benchmarks/$1" "${@:2}" 2>&1 |
    tee "$OUT/$name.log" | grep --line-buffered '^{"name"' | tee -a "$OUT/figures.jsonl"
  rc=${PIPESTATUS[0]}
  if [ "$rc" -ne 0 ]; then
    failed+=("$name")
    echo "--- $name ended with $rc; its last lines:"
    grep -v '^{"name"' "$OUT/$name.log" | tail -n 25
  fi
  echo "--- $name: $((SECONDS - began)) s"
}

update() {  # NAME ARGUMENTS…
  part "$1" learner.py "${options[@]}" --arms "${arms[@]}" "${@:2}" "${more[@]}" "${small[@]}"
}

failed=()
for name in ${*:-kernels 0.5b 1.5b 1.5b-recompute 7b-lora long shared offload}; do
  case $name in
    kernels) part kernels learner_kernels.py "${kernels[@]}" ;;
    0.5b) update 0.5b --shape 0.5b ;;
    1.5b) update 1.5b --shape 1.5b ;;
    1.5b-recompute) update 1.5b-recompute --shape 1.5b --recompute ;;
    # Without recompute the activations of 32 k tokens are more than the memory.
    7b-lora) update 7b-lora --shape 7b --lora 32 --recompute ;;
    long) update long --case long --shape 7b --lora 32 --recompute --steps 2 ;;
    shared) update shared --case shared --shape 0.5b ;;
    offload)
      for what in none optimizer all; do
        update "offload-$what" --shape 1.5b --recompute --offload "$what" --arms agentrl --steps 2
      done ;;
    ranks) update ranks --shape 0.5b --ranks "$RANKS" --arms agentrl ;;
    *) echo "no part $name" && failed+=("$name") ;;
  esac
done
[ ${#failed[@]} -eq 0 ] || { echo "failed: ${failed[*]}"; exit 1; }
