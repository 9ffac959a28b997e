"""Makes six mistakes with collectives, and shows what each of four tools reports.

Two ranks make every mistake once without a tool and once with TORCH_DISTRIBUTED_DEBUG=DETAIL.
The skipped call is also tried with a monitored_barrier before it. After each mistake, the
program reads Flight Recorder, which stores the last 2,000 collectives of a rank, with gloo as
with NCCL. The records of two ranks show more than the error does, because they contain the
Python stack of each call.

The ranks are forked, so torch is imported once. Linux and macOS only.
"""

import os
import pickle
import re
import signal
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

os.environ["TORCH_FR_BUFFER_SIZE"] = "2000"  # the default; 0 turns it off
import torch
import torch._inductor.codecache  # stacks need it: import it once, not in 12 ranks
import torch.distributed as dist

TIMEOUT = timedelta(seconds=6)


# --8<-- [start:mistakes]
def reduce_loss(value: torch.Tensor) -> None:
    dist.all_reduce(value)


def reduce_count(value: torch.Tensor) -> None:
    dist.all_reduce(value)


def skipped(rank: int) -> float:
    loss = torch.full((4,), float(rank + 1))
    if rank == 0:  # rank 1 has a bad batch, and continues with the next one
        reduce_loss(loss)
    return loss[0].item()


def different_operation(rank: int) -> float:
    loss = torch.full((4,), float(rank + 1))
    reduce_loss(loss) if rank == 0 else dist.broadcast(loss, src=0)
    return loss[0].item()


def more_elements(rank: int) -> float:
    loss = torch.full((4 + 2 * rank,), float(rank + 1))
    reduce_loss(loss)
    return loss[0].item()


def more_dimensions(rank: int) -> float:
    loss = torch.full((2, 2) if rank else (4,), float(rank + 1))
    reduce_loss(loss)
    return loss.flatten()[0].item()


def different_type(rank: int) -> float:
    loss = torch.full((4,), rank + 1, dtype=torch.int32 if rank else torch.float32)
    reduce_loss(loss)
    return float(loss[0])


def swapped(rank: int) -> float:
    loss, count = torch.full((4,), float(rank + 1)), torch.full((4,), 100.0)
    calls = [(reduce_loss, loss), (reduce_count, count)]
    for call, value in calls if rank == 0 else reversed(calls):
        call(value)
    return loss[0].item()


# --8<-- [end:mistakes]


# --8<-- [start:recorder]
def recorded() -> list[tuple]:
    """The collectives of this rank: operation, shapes, types, and the calling function."""
    from torch._C._distributed_c10d import _dump_fr_trace  # private; torch's tools use it

    entries = pickle.loads(_dump_fr_trace(True, True, False))["entries"]
    mine = []
    for entry in entries:
        calls = [f["name"] for f in entry["frames"] if f["filename"] == __file__]
        name = entry["profiling_name"].split(":")[-1]
        mine.append((name, str(entry["input_sizes"]), str(entry["input_dtypes"]), calls[0]))
    return mine


def first_difference(ranks: tuple[list, ...]) -> str:
    """The first collective that differs between the ranks, and what differs."""
    for number in range(max(map(len, ranks))):
        calls = [rank[number] if number < len(rank) else ("nothing",) * 4 for rank in ranks]
        for field, what in enumerate(("", "sizes", "types", "called by")):
            if len(seen := {call[field] for call in calls}) > 1:
                assert len(seen) == len(ranks)
                return f"{what} {' | '.join(call[field] for call in calls)}".strip()
    return "no difference"


# --8<-- [end:recorder]


def run_rank(mistakes: list, tool: str, rank: int, folder: Path) -> None:
    """One forked rank: make the mistakes, and write the errors and the records to files."""
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL" if tool == "DETAIL" else "OFF"
    dist.set_debug_level_from_env()
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=TIMEOUT)
    dist.barrier()
    for mistake in mistakes:
        before = len(recorded())
        said = folder / f"{mistake.__name__}.{rank}"
        said.write_bytes(pickle.dumps(("ended by a signal", [])))
        try:
            if tool == "barrier" and rank == 0:  # rank 1 skips the barrier as well
                dist.monitored_barrier(timeout=TIMEOUT)
            text = f"no error, {mistake(rank):.4g}"
        except RuntimeError as error:
            text = re.sub(r"^\[/\S+\] ", "", str(error))
        said.write_bytes(pickle.dumps((text, recorded()[before:])))
    (folder / f"done.{rank}").touch()
    end = time.monotonic() + 2 * TIMEOUT.total_seconds()
    while not (folder / f"done.{1 - rank}").exists() and time.monotonic() < end:
        time.sleep(0.05)  # the other rank may still wait for this one


def run(mistakes: list, tool: str, folder: Path) -> list[int]:
    """Start two ranks that make these mistakes one after the other; return their processes."""
    folder.mkdir()
    children = []
    for rank in range(2):
        if (pid := os.fork()) == 0:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # gloo's messages at exit
            signal.alarm(600)
            run_rank(mistakes, tool, rank, folder)
            os._exit(0)
        children.append(pid)
    return children


def short(said: list[str]) -> str:
    """The outcome of two ranks in a few words."""
    both = " ".join(said)
    if aspects := re.search(r"differ in the following aspects:(.*)", said[0]):
        names = re.findall(r"Op type|Tensor shapes|Tensor dtypes|Tensor devices", aspects[1])
        named = ", ".join(n.removeprefix("Tensor ").lower() for n in names)
        other = re.search(r"but Rank 1 .*?OpType=(\w+)", said[0])[1]
        return f"names {named}; rank 1 runs {other}"
    if missing := re.search(r"Ranks? (1) failed to pass monitoredBarrier", both):
        return f"names rank {missing[1]}"
    if "ended by a signal" in said:
        return "process dies"
    if all(s.startswith("no error") for s in said):
        return "; ".join(said).replace("; no error,", " and").replace("no error,", "no error:")
    assert "Timed out" in both or "Connection closed" in both, both
    return "hangs until the timeout"


def main() -> None:
    if not hasattr(os, "fork"):
        sys.exit("which_tool.py forks its ranks: it needs Linux or macOS")
    torch.set_num_threads(1)
    fatal = [different_operation, more_elements, skipped]  # after these, the group is unusable
    others = [more_dimensions, different_type, swapped]
    mistakes = [*fatal[:2], *others, skipped]
    runs = [([mistake], "no tool") for mistake in fatal]
    runs += [(others, "no tool"), (mistakes, "DETAIL")]
    runs += [([skipped], "barrier")]
    with tempfile.TemporaryDirectory() as name:
        folders = [Path(name, str(number)) for number in range(len(runs))]
        started = [
            pid for f, (ms, t) in zip(folders, runs, strict=True) for pid in run(ms, t, f)
        ]
        for pid in started:
            os.waitpid(pid, 0)
        answers: dict = {mistake: {} for mistake in mistakes}
        for folder, (made, tool) in zip(folders, runs, strict=True):
            for mistake in made:
                files = [folder / f"{mistake.__name__}.{rank}" for rank in range(2)]
                said, ranks = zip(*(pickle.loads(f.read_bytes()) for f in files), strict=True)
                answers[mistake][tool] = short(list(said))
                if tool == "no tool":
                    dead = "ended by a signal" in said
                    difference = "lost with the process" if dead else first_difference(ranks)
                    answers[mistake]["recorder"] = difference

    for mistake, said in answers.items():
        print(mistake.__name__.replace("_", " "))
        for tool in ("no tool", "DETAIL", "barrier", "recorder"):
            if tool in said:
                print(f"  {tool:9} {said[tool]}")
    assert answers[skipped]["DETAIL"] == answers[skipped]["barrier"] == "names rank 1"
    assert answers[different_type]["no tool"] == "no error: 1 and 1.065e+09"
    assert answers[swapped]["DETAIL"] == answers[swapped]["no tool"] == "no error: 101 and 102"
    assert answers[swapped]["recorder"] == "called by reduce_loss | reduce_count"
    without_error = [m for m in mistakes if answers[m]["no tool"].startswith("no error")]
    assert without_error == others
    assert sum("names" in answers[m]["DETAIL"] for m in mistakes) == 5


if __name__ == "__main__":
    main()
