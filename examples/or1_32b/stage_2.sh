#!/usr/bin/env bash
# 370 steps at T = 24K; the released model is that of step 1000. The environment it wants: examples/launch.sh. Arguments go to `or1 train`.
exec "$(dirname "$0")/../launch.sh" or1_32b 2 "$@"
