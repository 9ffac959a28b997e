"""The capstone's MFU beside that of a training loop in one file, on one GPU, in the same run.

    python assessment/capstone_beside_one_file.py

The loop is as short as such loops are: no mesh, no FSDP, no DTensor; autocast, torch.compile,
a fused optimizer. Then the capstone trains the same model with the same batch, on a mesh of
1 × 1 × 1. What lies between the two is what the machinery costs.
"""

import importlib.util
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F

HERE = Path(__file__).resolve().parent
STEPS, TIMED = 30, 20
CHANGES = [
    "model.layers=16", "model.hidden=2048", "model.heads=16", "model.sequence=2048",
    "mesh.dp=1", "mesh.tp=1", "train.batch=16", "train.micro=16", f"train.steps={STEPS}",
    "train.lr=3e-4", "train.log=10", "train.recompute=false", "train.compile=true",
    'train.precision="bf16"', "checkpoint.every=0",
]  # fmt: skip


def capstone():
    """The finished program, as a module."""
    spec = importlib.util.spec_from_file_location("capstone", HERE / "capstone.py")
    module = sys.modules["capstone"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def one_file(program, config) -> float:
    """Train in one process, with the capstone's layers as plain modules; tokens per second."""
    torch.manual_seed(0)
    blocks = torch.nn.ModuleDict(
        {str(number): program.Block(config) for number in range(config.layers)}
    )
    model = program.GPT()
    model.embedding = torch.nn.Embedding(config.vocabulary, config.hidden)
    model.blocks, model.norm = blocks, torch.nn.LayerNorm(config.hidden)
    model.head = torch.nn.Linear(config.hidden, config.vocabulary, bias=False)
    model.cuda().compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, fused=True)
    stream = program.Stream(config)
    for step in range(STEPS):
        if step == STEPS - TIMED:
            torch.cuda.synchronize()
            start = time.perf_counter()
        rows = stream.next(0).cuda(non_blocking=True)
        with torch.autocast("cuda", torch.bfloat16):
            logits = model(rows[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip)
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.synchronize()
    return TIMED * config.batch * config.sequence / (time.perf_counter() - start)


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("this program compares two ways to train on a GPU, and there is no GPU here")
    program = capstone()
    config = program.read_config(str(HERE / "capstone.toml"), CHANGES)
    name = torch.cuda.get_device_name()
    peaks = [peak * 1e12 for known, peak in program.PEAKS.items() if known in name]
    if not peaks:
        sys.exit(f"the peak of this GPU is not known: add {name} to PEAKS in capstone.py")
    alone = one_file(program, config)
    torch.cuda.empty_cache()
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=1"]
    command += [str(HERE / "capstone.py"), str(HERE / "capstone.toml"), *CHANGES]
    with tempfile.TemporaryDirectory() as empty:  # where no older checkpoint lies
        done = subprocess.run(command, cwd=empty, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"the capstone failed:\n{done.stderr[-2000:]}")
    speeds = re.findall(r"≈([\d,]+) tokens/s", done.stdout)
    ours = float(speeds[-1].replace(",", ""))
    for label, speed in (("one file", alone), ("capstone", ours)):
        mfu = speed * program.flops_per_token(config) / peaks[0]
        print(f"{label}  ≈{speed:,.0f} tokens/s  MFU ≈{mfu:.1%}")
    print(f"capstone / one file ≈{ours / alone:.2f}")


if __name__ == "__main__":
    main()
