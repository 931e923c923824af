"""Print the figures of a run that README.md beside this file judges: medians from step 2 on, accuracies, faults.

python lab/benchmarks/gpu/first_run/show.py RUN
"""

import json
import statistics
import sys
from pathlib import Path

KEYS = (
    *("time/step", "time/roll_out", "time/update", "time/score", "time/hand_off", "time/other", "rollout/tokens_per_s"),
    *("handoff/transfer_s", "handoff/bytes", "handoff/probe_max_abs_diff", "mismatch/mean_abs", "mismatch/max_abs"),
)

run = Path(sys.argv[1])
rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
steps = [row for row in rows if "time/roll_out" in row]
print(f"=> {len(steps)} steps; first: {steps[0]['time/step']:.1f} s")
for key in KEYS:
    if values := [row[key] for row in steps[1:] or steps if key in row]:
        print(f"=> {key}: {statistics.median(values):.4g}, largest {max(values):.4g}")
print("=> evaluation/accuracy:", *(f"{row['evaluation/accuracy']:.3f}" for row in rows if "evaluation/accuracy" in row))
print("=> faults:", (run / "faults.jsonl").read_text().strip()[-1000:] if (run / "faults.jsonl").exists() else "none")
