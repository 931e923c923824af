#!/usr/bin/env bash
# 1,000 steps at T = 16K. The environment it wants: examples/launch.sh. Arguments go to `or1 train`.
exec "$(dirname "$0")/../launch.sh" or1_math_7b 2 "$@"
