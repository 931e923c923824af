"""Times the conversion of a random model of a real shape, both ways, beside ``cp -r`` and fsync of the same bytes.

    python benchmarks/convert.py --scratch FOLDER [--shape 7B] [--rounds 3]

FOLDER needs three times the model's bytes (copy, checkpoint and the folder made of it are deleted when they are not
needed any more). A command is timed from start to exit, after its source has been dropped from the page cache. Peak
anonymous memory is the sum of RssAnon over the command and its descendants, read every 20 ms.
"""

from __future__ import annotations

import argparse
import filecmp
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

from result import ROOT, figure, write_result

from or1_megatron.convert.hf_folder import TensorInfo, WeightFile, index_json, packed
from or1_megatron.weights.families import family_of

SHAPES = {  # of the DeepSeek-R1-Distill-Qwen models
    "tiny": {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "vocab_size": 4096},
    "1.5B": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "vocab_size": 151936},
    "7B": {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "vocab_size": 152064},
}
HEADS = {"tiny": (4, 2), "1.5B": (12, 2), "7B": (28, 4)}
GIB = 1 << 30


def make_model(folder: Path, shape: str) -> int:
    """Write a bf16 model of random bytes in files of 4 GiB at most; return its size in bytes."""
    heads, groups = HEADS[shape]
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "dtype": "bfloat16",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        **SHAPES[shape],
    }
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    shapes = family_of(config).shapes(config)
    files = packed([TensorInfo(name, "BF16", size) for name, size in shapes.items()], 4 * GIB)
    noise = os.urandom((64 << 20) + 1)  # an odd length: its repetitions do not align with rows
    for file in files:
        _fill(folder / file.name, file, noise)
    if len(files) > 1:
        (folder / "model.safetensors.index.json").write_text(index_json(files))
    return sum(file.size_bytes for file in files)


def _fill(path: Path, file: WeightFile, noise: bytes) -> None:
    with path.open("wb") as out:
        out.write(file.header())
        left = file.size_bytes - len(file.header())
        while left:
            left -= out.write(noise[:left])
        out.flush()
        os.fsync(out.fileno())


def forget(folder: Path) -> None:
    """Drop a folder's files from the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def copy_s(source: Path, target: Path) -> float:
    """Return the seconds of ``cp -r`` and of an fsync of every file."""
    forget(source)
    started_s = time.perf_counter()
    subprocess.run(["cp", "-r", str(source), str(target)], check=True)
    for path in [*target.rglob("*"), target]:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    return time.perf_counter() - started_s


def run(source: Path, script: str, *arguments: str) -> tuple[float, int]:
    """Return seconds from start to exit, and peak anonymous memory of the command and its descendants in bytes."""
    forget(source)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    started_s = time.perf_counter()
    command = [sys.executable, str(ROOT / "tools" / "convert" / script), *arguments]
    process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
    peak = 0
    while process.poll() is None:
        peak = max(peak, sum(map(_anonymous, _family(process.pid))))
        time.sleep(0.02)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} failed")
    return time.perf_counter() - started_s, peak


def _family(pid: int) -> list[int]:
    """Return the pids of a process and its descendants."""
    found = [pid]
    for parent in found:
        for children in Path(f"/proc/{parent}/task").glob("*/children"):
            try:
                found += map(int, children.read_text().split())
            except OSError:
                continue
    return found


def _anonymous(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


def same(a: Path, b: Path) -> bool:
    """Return whether two folders hold the same files, byte for byte."""
    names = sorted(path.name for path in a.iterdir())
    return names == sorted(path.name for path in b.iterdir()) and not any(filecmp.cmpfiles(a, b, names, False)[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scratch", type=Path, required=True)
    parser.add_argument("--shape", choices=SHAPES, default="7B")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    scratch = arguments.scratch / "convert"
    shutil.rmtree(scratch, ignore_errors=True)
    hf, megatron, back, copy = (scratch / name for name in ("hf", "megatron", "back", "copy"))
    size = make_model(hf, arguments.shape)
    there, again, peaks, exact = [], [], [], True
    for number in range(arguments.rounds):
        copied_s = copy_s(hf, copy)
        shutil.rmtree(copy)
        there_s, there_bytes = run(hf, "hf_to_megatron.py", "--hf", str(hf), "--out", str(megatron))
        copied_again_s = copy_s(megatron, copy)
        shutil.rmtree(copy)
        again_s, again_bytes = run(megatron, "megatron_to_hf.py", "--megatron", str(megatron), "--out", str(back))
        exact = exact and same(hf, back)
        shutil.rmtree(megatron)
        shutil.rmtree(back)
        there.append(copied_s / there_s)
        again.append(copied_again_s / again_s)
        peaks.append((there_bytes, again_bytes))
        print(f"{number}: cp {copied_s:.1f} s, to Megatron {there_s:.1f} s", end="; ")
        print(f"cp {copied_again_s:.1f} s, to HF {again_s:.1f} s", flush=True)
    shutil.rmtree(scratch)
    figures = {
        "to Megatron, speed / cp -r with fsync": figure(statistics.median(there), at_least=0.6),
        "to HF, speed / cp -r with fsync": figure(statistics.median(again), at_least=0.6),
        "to Megatron, peak anonymous memory": figure(max(p[0] for p in peaks) / GIB, "GiB", at_most=2.0),
        "to HF, peak anonymous memory": figure(max(p[1] for p in peaks) / GIB, "GiB", at_most=2.0),
        "there and back the same files, byte for byte": figure(exact),
    }
    settings = {"shape": arguments.shape, "dtype": "bfloat16", "GB": size / 1e9, "rounds": arguments.rounds}
    print(write_result("convert", figures, settings))
    for name, entry in figures.items():
        print(name, entry)


if __name__ == "__main__":
    main()
