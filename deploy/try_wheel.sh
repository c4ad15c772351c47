#!/usr/bin/env bash
# Tries a wheel as a user has it: in an environment of its own, outside the checkout.
#
#   deploy/try_wheel.sh dist/agentrl_toolkit-0.2.0-py3-none-any.whl
#
# Installs it, makes the starter project and trains it, trains the demo, and a real model for a step
# of a recipe. STEPS (by default 3) limits each training. About ten minutes on two cores. SBOM=FILE
# is the list of what the wheel brings, with licences; it needs cyclonedx-py.
set -euo pipefail

wheel=$(readlink -f "$1")
checkout=$(cd "$(dirname "$0")/.." && pwd)
steps=${STEPS:-3}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet "$wheel"
[ -z "${SBOM:-}" ] ||
  cyclonedx-py environment --gather-license-texts --output-file "$SBOM" "$work/venv/bin/python"
export PATH="$work/venv/bin:$PATH"
cp -r "$checkout/datasets" "$checkout/recipes" "$work"
cd "$work"

python - "$checkout" <<'CODE'
import sys
import agentrl
assert not agentrl.__file__.startswith(sys.argv[1]), agentrl.__file__
print("agentrl", agentrl.__version__, "from", agentrl.__file__)
CODE
agentrl docs | head -n 1
agentrl docs assistants | head -n 1
agentrl tools list --file shelf:calculator
agentrl init starter
(cd starter && agentrl train -c run.yaml "trainer.total_steps=$steps")
agentrl train --dataset datasets/arithmetic_train.parquet --val-dataset datasets/arithmetic_val.parquet \
  --model tiny --output runs/demo "trainer.total_steps=$steps" trainer.val_before_train=false
agentrl report runs/demo > report.txt
agentrl model get smollm2
head -n 8 recipes/facts/val.jsonl > few.jsonl
agentrl train -c recipes/facts/run.yaml data.val=few.jsonl data.batch_size=2 rollout.n=4 \
  trainer.total_steps=1 trainer.val_before_train=false
echo "the wheel works: $(basename "$wheel")"
