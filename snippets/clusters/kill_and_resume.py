"""A rank is killed at a random moment, and the run ends with the bits it would have had anyway.

Under torchrun this is a training program that saves every K steps and, in a new life, goes on
from what it finds. Started with plain python it is the operator and the accident: one run in
peace, then one in which it kills a random rank, from outside, at a random moment. The steps
computed twice are counted and held to K; weights and losses are compared bit for bit.

    --times N    kill in N runs, one after the other (1)
    --seed S     another choice of ranks and moments (by default, a new one each time)
"""

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn  # not left to torch: imported after init, it keeps the group alive

RANKS, STEPS, EVERY, ROWS, WIDTH = 2, 40, 6, 16, 32


def join() -> int:
    """Join the group of this life; its number, from 0."""
    life = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    # torchrun keeps one store through all lives, with the addresses of the dead in it
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.PrefixStore(f"life {life}", dist.TCPStore(address, port, is_master=False))
    rank, n = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    timeout = timedelta(seconds=300)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=n, timeout=timeout)
    return life


# --8<-- [start:save]
def save(path: Path, step: int, weights: list[torch.Tensor], losses: list[float]) -> None:
    """All that step + 1 depends on, under its name as a whole or not at all."""
    random_states = [torch.empty_like(torch.get_rng_state()) for _ in range(RANKS)]
    dist.all_gather(random_states, torch.get_rng_state())  # each rank draws its own dropout
    if dist.get_rank() == 0:
        state = {"step": step, "weights": weights, "losses": losses, "random": random_states}
        temporary = path.with_suffix(".tmp")
        with temporary.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)


# --8<-- [end:save]


# --8<-- [start:train]
def train(folder: Path, life: int) -> None:
    rank, path = dist.get_rank(), folder / "checkpoint.pt"
    torch.manual_seed(0)
    weights = [torch.randn(WIDTH, WIDTH) / WIDTH**0.5, torch.randn(WIDTH, 1) / WIDTH**0.5]
    weights += [torch.zeros_like(w) for w in weights]  # and their momenta
    torch.manual_seed(1 + rank)
    done, losses = 0, []
    if path.exists():
        state = torch.load(path, weights_only=True)
        done, weights, losses = state["step"], state["weights"], state["losses"]
        torch.set_rng_state(state["random"][rank])
    log = (folder / f"life.{life}").open("w", buffering=1) if rank == 0 else None
    if log:
        log.write(f"{done}\n")

    for step in range(done + 1, STEPS + 1):
        data = torch.Generator().manual_seed(step * RANKS + rank)  # the step finds its rows
        x = torch.randn(ROWS, WIDTH, generator=data)
        layers = [w.requires_grad_() for w in weights[:2]]
        hidden = torch.nn.functional.dropout(torch.tanh(x @ layers[0]), 0.2)
        loss = ((hidden @ layers[1] - x.sin().sum(1, keepdim=True)) ** 2).mean()
        gradients = torch.autograd.grad(loss, layers)
        packed = torch.cat([*(g.flatten() for g in gradients), loss.detach()[None]])
        dist.all_reduce(packed)
        packed /= RANKS
        *flat, mean = packed.split([w.numel() for w in layers] + [1])
        with torch.no_grad():
            for w, momentum, g in zip(layers, weights[2:], flat, strict=True):
                momentum.mul_(0.9).add_(g.view_as(w))
                w.sub_(0.02 * momentum)
        weights = [w.detach() for w in weights]
        losses.append(mean.item())
        time.sleep(0.03)  # a larger model
        if log:
            log.write(f"{step}\n")  # this step is complete
        if step % EVERY == 0:
            save(path, step, weights, losses)
    everybodys = [torch.empty_like(weights[0]) for _ in range(RANKS)]
    dist.all_gather(everybodys, weights[0])
    assert all(torch.equal(weights[0], other) for other in everybodys)
    rows = [torch.empty_like(x) for _ in range(RANKS)]
    dist.all_gather(rows, x)
    assert not torch.equal(*rows)  # and not because all saw the same
    if rank == 0:
        torch.save({"weights": weights, "losses": losses}, folder / "result.pt")


# --8<-- [end:train]


# --8<-- [start:accident]
def ranks_of(torchrun: int) -> dict[int, int]:
    """Process numbers of the ranks that torchrun has started (Linux: /proc says)."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError, KeyError):
            if int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1]) == torchrun:
                pairs = (entry / "environ").read_bytes().split(b"\0")
                variables = dict(pair.split(b"=", 1) for pair in pairs if b"=" in pair)
                found[int(variables[b"RANK"])] = int(entry.name)  # KeyError: not a rank yet
    return found


def run(folder: Path, chance: random.Random | None) -> int:
    """Run torchrun to its end, killing one rank if given dice; its exit status."""
    folder.mkdir()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={RANKS}", "--max-restarts=2", __file__, str(folder)]
    said = (folder / "stderr").open("w")
    own = {"OMP_NUM_THREADS": "1", "TMPDIR": str(folder)}  # there are torchrun's logs
    torchrun = subprocess.Popen(command, stderr=said, env=os.environ | own)
    try:
        if chance:
            victim, at = chance.randrange(RANKS), chance.randint(1, STEPS - 10)
            ranks: dict[int, int] = {}
            while len(ranks) < RANKS or last_line(folder / "life.0") < at:
                assert torchrun.poll() is None
                if len(ranks) < RANKS:
                    ranks = ranks_of(torchrun.pid)
                time.sleep(0.005)
            time.sleep(chance.uniform(0, 0.06))  # into a step, an update or a save
            os.kill(ranks[victim], signal.SIGKILL)
        return torchrun.wait(timeout=600)
    finally:
        torchrun.terminate()  # nothing to do where it has ended; else it ends its ranks
        torchrun.wait()
        said.close()


# --8<-- [end:accident]


def last_line(log: Path) -> int:
    lines = log.read_text().split("\n")[:-1] if log.exists() else []
    return int(lines[-1]) if lines else 0


def operate(times: int, seed: int) -> None:
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory() as name:
        assert run(Path(name, "peace"), None) == 0
        peace = torch.load(Path(name, "peace", "result.pt"))
        print(f"in peace: {STEPS} steps, a save every {EVERY}", flush=True)
        for number in range(times):
            folder = Path(name, f"killed.{number}")
            assert run(folder, chance) == 0, (folder / "stderr").read_text()
            reached = last_line(folder / "life.0")
            first = int((folder / "life.1").read_text().split()[0])
            twice = f"steps computed twice ≈{reached - first}, at most {EVERY}"
            print(f"killed after step ≈{reached}: on from step ≈{first}, {twice}", flush=True)
            assert 0 <= reached - first <= EVERY and first % EVERY == 0
            assert not (folder / "life.2").exists()  # one accident, one restart
            result = torch.load(folder / "result.pt")
            assert result["losses"] == peace["losses"] and len(peace["losses"]) == STEPS
            assert all(map(torch.equal, result["weights"], peace["weights"]))
    print("weights and all losses, bit for bit those of the run in peace: True")


def main() -> None:
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        train(Path(sys.argv[1]), join())
        return dist.destroy_process_group()
    parser = argparse.ArgumentParser()
    parser.add_argument("--times", type=int, default=1)
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4)))
    args = parser.parse_args()
    if not Path("/proc/self/stat").exists():
        sys.exit("kill_and_resume.py finds the ranks of torchrun in /proc: it needs Linux")
    operate(args.times, args.seed)


if __name__ == "__main__":
    main()
