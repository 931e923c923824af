#!/usr/bin/env bash
# `or1 selftest` in one call of under ten minutes and without a network, on a machine that need not have all of the
# project's packages: what they are missing for is reported as not possible there. The report goes to
# lab/results/gpu_selftest/ (or to --out FOLDER). lab/results/gpu.json keeps the figures of which docs/performance.md speaks.
#
#   lab/benchmarks/gpu/run.sh [--wheels FOLDER] [--out FOLDER] [--minutes N] [--throughput] [--tiny] [CHECK ...]
#
# --wheels  what the machine's Python lacks, as wheels: installed aside for this call alone. These are enough where PyTorch,
#           Triton and transformers are; from a machine with a network, for the other's Python 3.12 on x86-64:
#             pip download --no-deps --only-binary=:all: --python-version 3.12 --platform manylinux_2_28_x86_64 \
#               --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 -d FOLDER \
#               megatron-core==0.19.2 psutil==7.2.2 pydantic==2.14.4 pydantic-core==2.50.5 annotated-types==0.8.0 \
#               typing-inspection==0.4.5 typing-extensions==4.16.0
# --minutes then it ends (9). CHECK: `or1 selftest --list` names them.
# --throughput  in place of the self-test: lab/benchmarks/throughput.py (0.5B, 1.5B, 3B; a process per row, the first row
#           twice), whose figures go to lab/results/throughput.json, or to --out FOLDER.
# --tiny    on a machine without a GPU: shows only that this script and what it starts work.
#
# PYTHON names the interpreter (default python3). BENCHMARK_COMMIT says of which commit the tree is, where git cannot.
set -euo pipefail

usage() { awk 'NR > 1 && /^#/ { sub(/^# ?/, ""); print; next } NR > 1 { exit }' "$0"; }

wheels="" out="" tiny="" throughput="" minutes=9 checks=()
while (($#)); do
  case "$1" in
    --wheels) wheels=$(realpath -- "$2"); shift 2 ;;
    --out) mkdir -p -- "$2"; out=$(realpath -- "$2"); shift 2 ;;
    --minutes) minutes=$2; shift 2 ;;
    --throughput) throughput=yes; shift ;;
    --tiny) tiny=yes; shift ;;
    -h | --help) usage; exit 0 ;;
    -*) echo "run.sh: unknown argument '$1'; see --help" >&2; exit 2 ;;
    *) checks+=("$1"); shift ;;
  esac
done

cd "$(dirname "$0")/../../.."
python=${PYTHON:-python3}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
# Tiny figures say nothing: they never go where the real ones are.
if [[ -z $out ]]; then out=$([[ -n $tiny ]] && echo "$scratch/results" || echo "$PWD/lab/results/gpu_selftest"); fi

if [[ -n $wheels ]]; then
  "$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$scratch/site" "$wheels"/*.whl
  export PYTHONPATH="$scratch/site:$PYTHONPATH"
fi
if ! "$python" -c 'import megatron.core, psutil, pydantic, rich, safetensors, torch, transformers, typer, yaml' 2> "$scratch/missing"; then
  echo "run.sh: $("$python" --version) lacks something: $(tail -n 1 "$scratch/missing"); give it with --wheels (see --help)" >&2
  exit 1
fi
if [[ -z $tiny ]] && ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
  echo "run.sh: no CUDA device is visible to PyTorch; --tiny tries the script without one" >&2
  exit 1
fi

if [[ -n $throughput ]]; then
  if [[ -n $tiny || $out != "$PWD/lab/results/gpu_selftest" ]]; then export BENCHMARK_RESULTS=$out; fi
  "$python" lab/benchmarks/throughput.py ${tiny:+--tiny}
else
  "$python" -m or1_megatron.commands.app selftest --minutes "$minutes" --out "$out" "${checks[@]}"
fi
