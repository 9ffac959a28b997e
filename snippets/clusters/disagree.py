"""Three ranks call different collectives without an error; a ledger finds the first of them.

Rank 1 calls two collectives in a different order, or passes a different dtype, or a different
shape with the same number of elements, or logs a metric that the other ranks do not have. gloo
adds the tensors of such calls without an error. TORCH_DISTRIBUTED_DEBUG=DETAIL detects only a
different dtype or shape. In the other cases the operations, shapes and dtypes are equal. The
ledger hashes every call, with the function that made it and a name. From time to time, the
ranks compare their hashes. With three ranks, the majority shows which rank is different. The
last case shows what the ledger cannot detect: calls of one loop that have no name.
which_tool.py shows which calls hang or end the process instead.

The ranks are forked, so torch is imported once. Linux and macOS only.
"""

import collections
import os
import pickle
import re
import signal
import sys
import tempfile
import zlib
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

RANKS, ODD = 3, 1


def majority(calls: tuple) -> tuple:
    return max(calls, key=calls.count)


class Ledger:
    """Records every all_reduce of this rank, and compares the records of all ranks on request.

    A call is the caller, the name that it gives, the shape and the dtype. Give a name where one
    line reduces several tensors: without it their calls look the same.
    """

    def __init__(self) -> None:
        self.calls: collections.deque[tuple] = collections.deque(maxlen=100)
        self.number, self.hash = 0, 0

    def all_reduce(self, tensor: torch.Tensor, name: str = "") -> None:
        caller = sys._getframe(1).f_code.co_name  # in a real run the line: f_lineno
        caller += f" {name}" if name else ""
        call = (caller, list(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        self.calls.append((self.number, *call))
        self.number += 1
        self.hash = zlib.crc32(repr(call).encode(), self.hash)  # of all calls up to here
        dist.all_reduce(tensor)

    def disagreement(self) -> str | None:
        """None if the hashes of all ranks are equal, else the first call that differs."""
        n = dist.get_world_size()
        hashes = [torch.zeros(1, dtype=torch.int64) for _ in range(n)]
        dist.all_gather(hashes, torch.tensor([self.hash]))
        if len({int(h) for h in hashes}) == 1:
            return None
        logs: list = [None] * n
        dist.all_gather_object(logs, list(self.calls))
        for calls in zip(*logs, strict=True):
            usual = majority(calls)
            if odd := [rank for rank, call in enumerate(calls) if call != usual]:
                number, *what = calls[odd[0]]
                return f"rank {odd}, call {number}: {what}, the other ranks {list(usual[1:])}"
        return "an older call than the ledger stores"


def reduce_loss(ledger: Ledger, loss: torch.Tensor) -> None:
    ledger.all_reduce(loss)


def reduce_count(ledger: Ledger, count: torch.Tensor) -> None:
    ledger.all_reduce(count)


# --8<-- [start:cases]
def order(ledger: Ledger, fixed: bool) -> float:
    loss, count = torch.full((4,), 0.5), torch.full((4,), 8.0)
    calls = {"loss": (reduce_loss, loss), "count": (reduce_count, count)}
    names = ["loss", "count"]
    reduce_count(ledger, torch.ones(1))  # in this call, the ranks agree
    if dist.get_rank() == ODD:
        names = ["count", "loss"]  # for example, because it iterated over a set
    for name in sorted(names) if fixed else names:
        call, value = calls[name]
        call(ledger, value)
    reduce_loss(ledger, torch.ones(1))  # the ranks agree again, but the sums are wrong
    return loss[0].item()


def dtype(ledger: Ledger, fixed: bool) -> float:
    count = torch.tensor([8, 8], dtype=torch.int32 if dist.get_rank() == ODD else torch.float32)
    if fixed:
        count = count.float()  # cast where the data enters
    reduce_count(ledger, count)
    return float(count[0])


def shape(ledger: Ledger, fixed: bool) -> float:
    matrix = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    if dist.get_rank() == ODD:
        matrix = matrix.T.contiguous()  # [3, 2]: the same numbers in a different order
    if fixed:
        matrix = matrix.T.contiguous() if matrix.shape == (3, 2) else matrix
        assert matrix.shape == (2, 3)
    reduce_loss(ledger, matrix)
    return matrix.flatten()[1].item()


# --8<-- [end:cases]


# --8<-- [start:keys]
def reduce_metrics(ledger: Ledger, fixed: bool, named: bool) -> float:
    """The sum of a loss over the ranks; one loop reduces all metrics that a rank has."""
    mine = {"loss": 0.5, "math": 2.0}
    if dist.get_rank() == ODD:
        mine = {"code": 3.0, "loss": 0.5}  # its batch has different subjects
    sums = {}
    for name in ["code", "loss", "math"] if fixed else sorted(mine):
        value = torch.tensor([mine.get(name, 0.0)])
        ledger.all_reduce(value, name if named else "")
        sums[name] = value.item()
    return sums["loss"]


def keys(ledger: Ledger, fixed: bool) -> float:
    return reduce_metrics(ledger, fixed, named=True)


def keys_without_names(ledger: Ledger, fixed: bool) -> float:
    return reduce_metrics(ledger, fixed, named=False)


# --8<-- [end:keys]

CASES = {  # each with its correct result
    "order": (order, 1.5),
    "dtype": (dtype, 24.0),
    "shape": (shape, 6.0),
    "keys": (keys, 1.5),
    "keys, and the ledger gets no names": (keys_without_names, 1.5),
}


def run(rank: int, tool: str) -> dict[str, tuple[float | str, str | None]]:
    """For each case, the result of this rank or an error, and the report of the ledger."""
    results = {}
    for name, (case, _) in CASES.items():
        ledger = Ledger()
        try:
            value: float | str = case(ledger, fixed=tool == "fixed")
        except RuntimeError as error:
            value = str(error)
        results[name] = (value, None if tool == "DETAIL" else ledger.disagreement())
    if tool == "bare":
        short = Ledger()
        short.calls = collections.deque(maxlen=1)  # the newest call, which is equal
        order(short, fixed=False)
        assert short.disagreement() == "an older call than the ledger stores"
    return results


def fork_rank_with(rank: int, tool: str, folder: Path) -> int:
    """Start a process that is this rank. Return its pid."""
    if pid := os.fork():
        return pid
    try:
        signal.alarm(600)  # in any case, the rank ends after this time
        os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL" if tool == "DETAIL" else "OFF"
        dist.set_debug_level_from_env()
        store = dist.FileStore(str(folder / f"store.{tool}"), RANKS)
        timeout = timedelta(seconds=300)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=RANKS, timeout=timeout
        )
        (folder / f"{tool}.{rank}").write_bytes(pickle.dumps(run(rank, tool)))
        dist.barrier()
        os._exit(0)
    finally:
        os._exit(1)


def wait_for(ranks: list[int]) -> list[int]:
    """Exit statuses, below 0 for a signal. After an interrupt, the ranks end too."""
    statuses: list[int] = []
    try:
        for pid in ranks:
            statuses.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        return statuses
    finally:
        for pid in ranks[len(statuses) :]:
            os.kill(pid, signal.SIGKILL)


def accused(message: str) -> str:
    """The rank that a message of DETAIL names, and the property that is different."""
    other = re.search(r"but Rank (\d+) is running", message)[1]
    aspects = re.findall(r"Op type|Tensor shapes|Tensor dtypes", message.split("differ in")[1])
    return f"rank {other} ({', '.join(a.split()[-1] for a in aspects)})"


def main() -> None:
    if not hasattr(os, "fork"):
        sys.exit("disagree.py forks its ranks: it needs Linux or macOS")
    torch.set_num_threads(1)
    assert majority(("odd", "usual", "usual")) == "usual"  # also if rank 0 is different
    tools = ("bare", "DETAIL", "fixed")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pids = [fork_rank_with(rank, tool, folder) for tool in tools for rank in range(RANKS)]
        assert not any(wait_for(pids))
        reports = {
            tool: [
                pickle.loads((folder / f"{tool}.{rank}").read_bytes()) for rank in range(RANKS)
            ]
            for tool in tools
        }

    for name, (_, right) in CASES.items():
        values = [results[name][0] for results in reports["bare"]]
        assert all(isinstance(value, float) for value in values)  # no error was raised
        assert any(abs(value - right) > 0.1 for value in values)  # but a result is wrong
        print(
            f"{name}: no error; {', '.join(f'{v:.4g}' for v in values)}; correct is {right:.4g}"
        )
        detail = [results[name][0] for results in reports["DETAIL"]]
        if isinstance(detail[0], float):
            print("  DETAIL   no error")
        else:
            names = [f"rank {r} names {accused(message)}" for r, message in enumerate(detail)]
            print(f"  DETAIL   {'; '.join(names)}")
        ledger = reports["bare"][0][name][1]
        print(f"  ledger   {ledger or 'reports nothing'}")
        if name == "keys, and the ledger gets no names":
            assert ledger is None  # everything that the ledger compares is equal
        else:
            assert ledger.startswith(f"rank [{ODD}]")
        assert (name in ("dtype", "shape")) != isinstance(detail[0], float)
        for results in reports["fixed"]:
            assert results[name] == (right, None)
    print("fixed: all results are correct on all ranks, and the ledgers agree")


if __name__ == "__main__":
    main()
