"""Read a memory snapshot: which lines of the program allocated the bytes of the peak?

torch.cuda.memory._snapshot() returns segments, and a trace of allocations with their stacks. On
a machine without CUDA, the program builds a snapshot of the same form from operators and the
Python stack. The function that reads the snapshot is the same for both.
"""

import pickle
import traceback
import weakref
from collections import Counter
from itertools import pairwise

import torch
from torch import nn
from torch.cuda._memory_viz import segsum
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

S, H, A, LAYERS = 256, 64, 8, 4


class NormlessLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(H, 3 * H), nn.Linear(H, H)
        self.up, self.down = nn.Linear(H, 4 * H), nn.Linear(4 * H, H)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [s, h]
        q, k, v = self.qkv(x).view(len(x), 3, A, H // A).permute(1, 2, 0, 3)
        weights = (q @ k.transpose(1, 2)).softmax(-1)
        x = x + self.out((weights @ v).transpose(0, 1).reshape(x.shape))
        return x + self.down(F.gelu(self.up(x)))


class Recorder(TorchDispatchMode):
    """Replaces _record_memory_history on a CPU: a trace in the format of a snapshot."""

    def __init__(self) -> None:
        super().__init__()
        self.trace: list[dict] = []
        self.live: dict[int, dict] = {}
        self.address = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if (key := storage._cdata) not in self.live and storage.nbytes():
                    self.note(storage, key)
        return result

    def note(self, storage: torch.UntypedStorage, key: int) -> None:
        frames = [
            {"filename": frame.filename, "line": frame.lineno, "name": frame.name}
            for frame in reversed(traceback.extract_stack()[:-2])  # innermost first
        ]
        entry = {"addr": self.address, "size": storage.nbytes(), "stream": 0, "frames": frames}
        self.live[key] = entry
        self.trace.append({"action": "alloc", **entry})
        self.address += -(-storage.nbytes() // 512) * 512
        weakref.finalize(storage, self.free, key).atexit = False

    def free(self, key: int) -> None:
        entry = self.live.pop(key)
        self.trace.append({"action": "free_requested", **entry})
        self.trace.append({"action": "free_completed", **entry})

    def snapshot(self) -> dict:
        """Each live storage becomes a segment with one block, because there is no cache."""
        segments = []
        for entry in self.live.values():
            size = -(-entry["size"] // 512) * 512
            block = {"size": size, "requested_size": entry["size"], "state": "active_allocated"}
            block |= {"address": entry["addr"], "frames": entry["frames"]}
            segment = {"address": entry["addr"], "total_size": size, "stream": 0, "device": 0}
            segment |= {"segment_type": "small", "allocated_size": size, "active_size": size}
            segments.append(segment | {"blocks": [block]})
        return {"segments": segments, "device_traces": [self.trace]}


# --8<-- [start:reader]
def mine(frames: list[dict]) -> str:
    """The text of the innermost line of this file in the stack."""
    for frame in frames:
        if frame["filename"] == __file__:
            with open(__file__) as file:
                return file.read().splitlines()[frame["line"] - 1].strip()
    return "(no Python frame of ours)"


def peak_by_line(snapshot: dict) -> tuple[int, Counter]:
    """Replay the trace. Return the peak in bytes, and its bytes by line of code."""
    live: dict[int, dict] = {}
    now = peak = 0
    at_peak: list[dict] = []
    for entry in snapshot["device_traces"][0]:
        if entry["action"] == "alloc":
            live[entry["addr"]] = entry
            now += entry["size"]
            if now > peak:
                peak, at_peak = now, list(live.values())
        elif entry["action"] == "free_completed" and live.pop(entry["addr"], None):
            now -= entry["size"]
    lines: Counter = Counter()
    for entry in at_peak:
        lines[mine(entry["frames"])] += entry["size"]
    return peak, lines


# --8<-- [end:reader]


def check_reader() -> None:
    """By hand: allocate 4 bytes, request their free, 2 more, free 4, 3 more. The peak is 6."""
    a, b, c = (
        {"addr": 512 * i, "size": size, "frames": []} for i, size in enumerate((4, 2, 3))
    )
    actions = {"alloc": a, "free_requested": a}, {"alloc": b, "free_completed": a}, {"alloc": c}
    trace = [{"action": key} | entry for part in actions for key, entry in part.items()]
    assert peak_by_line({"device_traces": [trace]}) == (6, {"(no Python frame of ours)": 6})


def step(device: str) -> nn.Module:
    with torch.device(device):
        model = nn.Sequential(*(NormlessLayer() for _ in range(LAYERS)))
        model(torch.randn(S, H)).square().mean().backward()
    return model


def main() -> None:
    check_reader()
    if torch.cuda.is_available():
        step("cuda")  # the first products allocate the workspaces of cuBLAS
        kept = torch.cuda.memory_allocated()
        torch.cuda.memory._record_memory_history(stacks="python")
        model = step("cuda")
        snapshot = torch.cuda.memory._snapshot()
        print(f"cuBLAS keeps ≈{kept / 2**20:.1f} MiB")
    else:
        with Recorder() as recorder:
            model, kept = step("cpu"), 0
            snapshot = recorder.snapshot()
    expected = sum(p.nbytes + p.grad.nbytes for p in model.parameters())
    peak, lines = peak_by_line(snapshot)
    print(f"at the peak ≈{peak / 2**20:.1f} MiB are live; by the line that allocated them:")
    for line, size in lines.most_common(4):
        print(f" ≈{size / peak:.0%}  {line}")
    line, size = lines.most_common(1)[0]
    softmax = LAYERS * 4 * A * S * S  # bytes of the outputs that backward needs
    assert "softmax" in line and abs(size - softmax) < 0.03 * softmax, (line, size, softmax)
    last = [entry["action"] for entry in snapshot["device_traces"][0][-2:]]
    print(f"a tensor's end is two entries: {', '.join(last)}")
    with open("snapshot.pickle", "wb") as file:  # for pytorch.org/memory_viz
        pickle.dump(snapshot, file)
    blocks = [block for segment in snapshot["segments"] for block in segment["blocks"]]
    ends = sorted((block["address"], block["address"] + block["size"]) for block in blocks)
    assert all(end <= start for (_, end), (start, _) in pairwise(ends))  # no two blocks overlap
    live = sum(b["requested_size"] for b in blocks if b["state"] == "active_allocated") - kept
    print(f"after the step {live / expected:.2f} times parameters and gradients are live")
    assert live == expected
    assert "total_allocated" in segsum(snapshot)  # torch's own reader accepts the snapshot


if __name__ == "__main__":
    main()
