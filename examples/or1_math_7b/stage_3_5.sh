#!/usr/bin/env bash
# 80 steps at T = 32K with groups of 64: stage 3.5 of the report. The environment it wants: examples/launch.sh. Arguments go to `or1 train`.
exec "$(dirname "$0")/../launch.sh" or1_math_7b 4 "$@"
