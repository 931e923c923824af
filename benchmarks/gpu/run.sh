#!/usr/bin/env bash
# All that one GPU can show, in one call of under ten minutes and without a network: the fused head, a policy with our own
# layers, offload, the handoff's transports, and the tests that are marked gpu. Results go to benchmarks/results/ (or --out FOLDER), from
# which `python benchmarks/performance.py` draws docs/performance.md.
#
#   benchmarks/gpu/run.sh [--wheels FOLDER] [--out FOLDER] [--tiny]
#
# --wheels  what the machine's Python lacks, as wheels: installed aside for this call alone. These are enough where PyTorch,
#           Triton and transformers are; from a machine with a network, for the other's Python 3.12 on x86-64:
#             pip download --no-deps --only-binary=:all: --python-version 3.12 --platform manylinux_2_28_x86_64 \
#               --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 -d FOLDER \
#               megatron-core==0.16.1 psutil==7.2.2 pydantic==2.14.3 pydantic-core==2.50.4 annotated-types==0.8.0 \
#               typing-inspection==0.4.5 typing-extensions==4.16.0 \
#               pytest==9.2.0 pluggy==1.7.0 iniconfig==2.3.1 pygments==2.21.0
# --tiny    tiny sizes, on a machine without a GPU: shows only that this script and what it starts work.
#
# PYTHON names the interpreter (default python3). BENCHMARK_COMMIT says of which commit the tree is, where git cannot.
set -euo pipefail

usage() { awk 'NR > 1 && /^#/ { sub(/^# ?/, ""); print; next } NR > 1 { exit }' "$0"; }

wheels="" out="" tiny=()
while (($#)); do
  case "$1" in
    --wheels) wheels=$(realpath -- "$2"); shift 2 ;;
    --out) mkdir -p -- "$2"; out=$(realpath -- "$2"); shift 2 ;;
    --tiny) tiny=(--tiny); shift ;;
    -h | --help) usage; exit 0 ;;
    *) echo "run.sh: unknown argument '$1'; known: --wheels FOLDER, --out FOLDER, --tiny" >&2; exit 2 ;;
  esac
done

cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
export PYTHONUNBUFFERED=1 PYTHONWARNINGS=ignore HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
# Tiny figures say nothing: they never go where the real ones are.
if [[ -z $out ]]; then out=$([[ ${#tiny[@]} -gt 0 ]] && echo "$scratch/results" || echo "$PWD/benchmarks/results"); fi
export BENCHMARK_RESULTS="$out"

if [[ -n $wheels ]]; then
  "$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$scratch/site" "$wheels"/*.whl
  export PYTHONPATH="$scratch/site:$PYTHONPATH"
fi
if ! "$python" -c 'import megatron.core, psutil, pydantic, pytest, safetensors, torch, transformers, yaml' 2> "$scratch/missing"; then
  echo "run.sh: $("$python" --version) lacks something: $(tail -n 1 "$scratch/missing"); give it with --wheels (see --help)" >&2
  exit 1
fi
if [[ ${#tiny[@]} -eq 0 ]] && ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
  echo "run.sh: no CUDA device is visible to PyTorch; --tiny tries the script without one" >&2
  exit 1
fi

readonly END_S=580 # of this call: the parts' limits add up to more, for most end well before theirs
failed=()
summary=()
part() { # name, limit in seconds, command...
  local name=$1 limit=$2 started=$SECONDS status=0
  shift 2
  local left=$((END_S - SECONDS))
  ((limit = limit < left ? limit : left))
  echo "== $name: $*"
  if ((limit < 5)); then
    status="not started: no time left"
  else
    timeout --kill-after 10 "$limit" "$@" || status=$?
    [[ $status == 124 || $status == 137 ]] && status="stopped after $limit s"
  fi
  [[ $status == 0 ]] && status="done" || failed+=("$name")
  summary+=("$(printf '%-8s %4d s  %s' "$name" $((SECONDS - started)) "$status")")
}

part head 210 "$python" benchmarks/gpu/head.py "${tiny[@]}"
part offload 100 "$python" benchmarks/gpu/offload.py "${tiny[@]}"
part handoff 60 "$python" benchmarks/gpu/handoff.py "${tiny[@]}"
part policy 240 "$python" benchmarks/gpu/policy.py "${tiny[@]}"
part tests 180 "$python" -m pytest -q -m gpu tests/gpu

echo "== results in $out"
printf '%s\n' "${summary[@]}"
if ((${#failed[@]})); then
  echo "run.sh: not done: ${failed[*]}" >&2
  exit 1
fi
