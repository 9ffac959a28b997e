"""Exposed communication in seconds, for each collective, from the trace of a profiler.

A collective makes a step longer only while nothing is computed. With NCCL, collectives and
computation are kernels in streams of the GPU. With gloo, collectives run in threads of their
own. The program records a trace and analyses it, or it analyses a file that you pass:

    python exposed.py trace.json
"""

import json
import os
import sys
from collections import defaultdict

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

Spans = list[tuple[float, float]]


def covered(spans: Spans) -> float:
    """The length of the union of all spans, in seconds. Spans are in µs."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total / 1e6


def read(events: list[dict]) -> tuple[dict[str, Spans], Spans]:
    """The spans of communication by collective, and the spans of computation, in µs."""
    communication: dict[str, Spans] = defaultdict(list)
    computation: Spans = []
    spans = sorted(
        (e for e in events if e.get("ph") == "X"), key=lambda e: (e["ts"], -e["dur"])
    )
    on_gpu = any(e.get("cat") == "kernel" for e in spans)
    gloo = {e["tid"] for e in spans if e["name"].startswith("gloo:")}
    handing = {}  # thread: until when it passes tensors to a collective
    for e in spans:
        name, kind, thread, span = (
            e["name"],
            e.get("cat"),
            e["tid"],
            (e["ts"], e["ts"] + e["dur"]),
        )
        if on_gpu and kind == "kernel":
            if name.startswith("nccl"):  # ncclDevKernel_AllReduce_Sum_f32_RING_LL(…)
                known = e.get("args", {}).get("Collective name")
                communication[known or name.split("(")[0].split("_")[1]].append(span)
            else:
                computation.append(span)
        elif not on_gpu and name.startswith("gloo:"):
            communication[name.removeprefix("gloo:")].append(span)
        elif not on_gpu and kind == "cpu_op" and thread not in gloo:
            if name.startswith("c10d::"):
                handing[thread] = span[1]
            elif name.startswith("aten::") and span[0] >= handing.get(thread, 0.0):
                computation.append(span)
    return communication, computation


def exposed(events: list[dict]) -> dict[str, tuple[int, float, float]]:
    """For each collective: its calls, its seconds, and its seconds without computation."""
    communication, computation = read(events)
    return {
        name: (len(spans), covered(spans), covered(spans + computation) - covered(computation))
        for name, spans in communication.items()
    }


def check() -> None:
    """A made-up trace, as from gloo and as from a GPU; its microseconds are counted."""
    collectives = [("all_reduce", 10, 30), ("broadcast", 40, 60), ("all_reduce", 90, 100)]
    # These calls overlap with earlier calls. A collective never hides another collective.
    collectives += [("all_reduce", 24, 34), ("broadcast", 32, 37)]
    work = [(0, 12), (20, 25), (22, 28), (50, 95)]
    kernels = {"all_reduce": "AllReduce_Sum_f32_RING_LL(", "broadcast": "Broadcast_RING_LL("}

    def event(kind: str, name: str, start: int, end: int, thread: int = 7) -> dict:
        return {
            "ph": "X",
            "cat": kind,
            "name": name,
            "ts": start,
            "dur": end - start,
            "tid": thread,
        }

    cpu = [event("user_annotation", f"gloo:{n}", a, b, 9) for n, a, b in collectives]
    cpu += [event("cpu_op", "aten::mm", a, b) for a, b in work]
    # passing a tensor to a collective is no computation, and a copy by gloo is none either
    cpu += [event("cpu_op", "c10d::broadcast_", 38, 42), event("cpu_op", "aten::view", 41, 42)]
    cpu += [event("cpu_op", "aten::copy_", 30, 45, 9)]
    gpu = [event("kernel", f"ncclDevKernel_{kernels[n]}", a, b) for n, a, b in collectives]
    gpu += [event("kernel", "gemm", a, b) for a, b in work]
    gpu += [event("cpu_op", "aten::mm", 0, 100)]  # the host only launches: no computation
    busy = {t for a, b in work for t in range(a, b)}
    for name, kernel in (("all_reduce", "AllReduce"), ("broadcast", "Broadcast")):
        inside = {t for n, a, b in collectives if n == name for t in range(a, b)}
        bare = sum(t not in busy for t in inside)
        for table, key in ((exposed(cpu), name), (exposed(gpu), kernel)):
            calls, total, alone = table[key]
            assert calls == sum(n == name for n, *_ in collectives)
            assert round(total * 1e6) == len(inside) and round(alone * 1e6) == bare
        print(f"by hand: {name:11} {len(inside)} µs, {bare} of them exposed")


# --8<-- [start:record]
def record(path: str, device: torch.device) -> None:
    """An all-reduce during matrix products, and a broadcast that is waited for at once."""
    weights, gradient = torch.randn(512, 512).to(device), torch.randn(1 << 20).to(device)
    store = dist.distributed_c10d._get_default_store()
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    dist.all_reduce(gradient)  # a first call, which connects the ranks
    with profile(activities=activities) as profiler:
        if dist.get_rank() == 1:
            store.wait(["multiplied"])  # rank 1 is late, so that rank 0 overlaps
        work = dist.all_reduce(gradient, async_op=True)
        for _ in range(4):
            weights @ weights
        if dist.get_rank() == 0:
            store.set("multiplied", "yes")
        work.wait()
        dist.broadcast(gradient, 0)
        weights @ weights  # too late to hide the broadcast
        if device.type == "cuda":
            torch.cuda.synchronize()
    if dist.get_rank() == 0:
        profiler.export_chrome_trace(path)


# --8<-- [end:record]


def init_distributed() -> torch.device:
    """Join the process group: one accelerator per local rank where there are enough.

    With NCCL_MULTI_RANK_GPU_ENABLE=1 (NCCL 2.30 or newer), several ranks share a GPU.
    """
    if "LOCAL_RANK" not in os.environ:
        sys.exit(f"start this program with: torchrun --nproc-per-node=2 {sys.argv[0]}")
    local_rank, local_world = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    count = torch.accelerator.device_count()
    shared = count > 0 and os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
    if (count < local_world and not shared) or torch.backends.mps.is_available():
        if count and torch.version.cuda and local_rank == 0:
            advice = "NCCL_MULTI_RANK_GPU_ENABLE=1 lets ranks share a GPU (NCCL 2.30 or newer)"
            print(f"{local_world} ranks use the CPU and gloo. {advice}", file=sys.stderr)
        dist.init_process_group("gloo")  # on the CPU; mps has no collectives
        return torch.device("cpu")
    device = torch.device(torch.accelerator.current_accelerator().type, local_rank % count)
    torch.accelerator.set_device_index(device.index)
    dist.init_process_group(device_id=device)
    return device


def show(path: str) -> dict[str, tuple[int, float, float]]:
    with open(path) as file:
        table = exposed(json.load(file)["traceEvents"])
    for name, (calls, total, alone) in sorted(table.items()):
        print(f"{name:11} {calls} call: ≈{total:.4f} s, exposed ≈{alone:.4f} s")
    return table


def main() -> None:
    if len(sys.argv) > 1:
        show(sys.argv[1])
        return
    if os.environ.get("WORLD_SIZE", "2") != "2":
        sys.exit("this program takes two ranks: torchrun --nproc-per-node=2 exposed.py")
    torch.set_num_threads(1)
    device = init_distributed()
    record("trace.json", device)
    if dist.get_rank() == 0:
        check()
        table = show("trace.json")
        hidden, bare = [table[name] for name in sorted(table)]
        assert len(table) == 2 and hidden[2] < hidden[1]
        if device.type == "cpu":
            assert bare[2] > 0.999 * bare[1]
            print("the broadcast is all exposed, the all-reduce in part")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
