"""Kills a rank at a random moment, and compares the resumed run with an undisturbed run.

Under torchrun, this is a training program that saves every K steps and resumes from the newest
checkpoint after a restart. Started with plain python, it is the operator. The operator starts
one undisturbed run, and then a run in which it kills a random rank from outside at a random
moment. It counts the steps that were computed twice, which are at most K, and compares the
weights and losses of both runs bit for bit.

    --times N    kill a rank in N runs, one after the other (1)
    --seed S     the seed for the ranks and moments (by default, a new seed each time)
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
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.nn  # imported here: an import after init would keep the group alive

RANKS, STEPS, EVERY, ROWS, WIDTH = 2, 40, 6, 16, 32


def join() -> int:
    """Join the process group of this life. Return the number of the life, from 0."""
    life = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    # torchrun uses one store in all lives, and it has the addresses of the killed ranks
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.PrefixStore(f"life {life}", dist.TCPStore(address, port, is_master=False))
    rank, n = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    timeout = timedelta(seconds=300)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=n, timeout=timeout)
    return life


# --8<-- [start:save]
def save(path: Path, step: int, weights: list[torch.Tensor], losses: list[float]) -> None:
    """Save everything on which step + 1 depends. Replace the file as a whole or not at all."""
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
    weights += [torch.zeros_like(w) for w in weights]  # momenta
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
        data = torch.Generator().manual_seed(step * RANKS + rank)  # the step sets the rows
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
        time.sleep(0.03)  # a larger model would need this time
        if log:
            log.write(f"{step}\n")  # this step is complete
        if step % EVERY == 0:
            save(path, step, weights, losses)
    all_weights = [torch.empty_like(weights[0]) for _ in range(RANKS)]
    dist.all_gather(all_weights, weights[0])
    assert all(torch.equal(weights[0], other) for other in all_weights)
    rows = [torch.empty_like(x) for _ in range(RANKS)]
    dist.all_gather(rows, x)
    assert not torch.equal(*rows)  # the weights are not equal because of equal rows
    if rank == 0:
        torch.save({"weights": weights, "losses": losses}, folder / "result.pt")


# --8<-- [end:train]


def ranks_of(torchrun: int) -> dict[int, int]:
    """Pids of the ranks that torchrun has started, by rank (from /proc, so only on Linux)."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError, KeyError):
            if int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1]) == torchrun:
                pairs = (entry / "environ").read_bytes().split(b"\0")
                variables = dict(pair.split(b"=", 1) for pair in pairs if b"=" in pair)
                found[int(variables[b"RANK"])] = int(entry.name)  # KeyError: not yet a rank
    return found


def run(folder: Path, generator: random.Random | None) -> int:
    """Run torchrun to its end. With a generator, kill one rank. Return the exit status."""
    folder.mkdir()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={RANKS}", "--max-restarts=2", __file__, str(folder)]
    errors = (folder / "stderr").open("w")
    own = {"OMP_NUM_THREADS": "1", "TMPDIR": str(folder)}  # for torchrun's logs
    torchrun = subprocess.Popen(command, stderr=errors, env=os.environ | own)
    try:
        if generator:
            victim, at = generator.randrange(RANKS), generator.randint(EVERY + 1, STEPS - 10)
            ranks: dict[int, int] = {}
            while len(ranks) < RANKS or last_line(folder / "life.0") < at:
                assert torchrun.poll() is None
                if len(ranks) < RANKS:
                    ranks = ranks_of(torchrun.pid)
                time.sleep(0.005)
            time.sleep(generator.uniform(0, 0.06))  # in a step, an update or a save
            os.kill(ranks[victim], signal.SIGKILL)
        return torchrun.wait(timeout=600)
    finally:
        torchrun.terminate()  # if it still runs, it ends its ranks
        torchrun.wait()
        errors.close()


def last_line(log: Path) -> int:
    lines = log.read_text().split("\n")[:-1] if log.exists() else []
    return int(lines[-1]) if lines else 0


def check_interrupted_save(folder: Path) -> None:
    """A save that ends in the middle of the file leaves the previous checkpoint as it was."""

    def write_half(state: dict, file) -> None:
        file.write(b"half")
        raise KeyboardInterrupt

    path = folder / "checkpoint.pt"
    path.write_bytes(b"the previous checkpoint")
    with (
        mock.patch.multiple(dist, all_gather=mock.DEFAULT, get_rank=lambda: 0),
        mock.patch.object(torch, "save", write_half),
        contextlib.suppress(KeyboardInterrupt),
    ):
        save(path, 1, [], [])
    assert path.read_bytes() == b"the previous checkpoint"


def operate(times: int, seed: int) -> None:
    generator = random.Random(seed)
    with tempfile.TemporaryDirectory() as name:
        check_interrupted_save(Path(name))
        assert run(Path(name, "undisturbed"), None) == 0
        assert not Path(name, "undisturbed", "life.1").exists()  # no rank was killed
        expected = torch.load(Path(name, "undisturbed", "result.pt"))
        print(f"undisturbed: {STEPS} steps, a save after every {EVERY}", flush=True)
        for number in range(times):
            folder = Path(name, f"killed.{number}")
            assert run(folder, generator) == 0, (folder / "stderr").read_text()
            reached = last_line(folder / "life.0")
            first, *again = map(int, (folder / "life.1").read_text().split())
            twice = f"≈{reached - first} steps computed twice, at most {EVERY}"
            resumed = f"resumed from step ≈{first}"
            print(f"killed after step ≈{reached}: {resumed}, {twice}", flush=True)
            assert EVERY <= first <= reached <= first + EVERY and first % EVERY == 0
            assert again == list(range(first + 1, STEPS + 1))
            assert not (folder / "life.2").exists()  # one kill, one restart
            result = torch.load(folder / "result.pt")
            assert result["losses"] == expected["losses"] and len(expected["losses"]) == STEPS
            assert all(map(torch.equal, result["weights"], expected["weights"]))
    print("weights and all losses are bit for bit those of the undisturbed run")


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
