"""Answers three questions by torch.profiler: which operator, which of its calls, who allocates.

The step has a deliberate fault: a buffer has the type float64, and therefore all operators
after it compute in float64.
"""

import json
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, schedule

B, S, H = 8, 128, 256
HOST = DeviceType.CPU  # of an operator; a kernel has rows of its own


# --8<-- [start:model]
class Scores(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(H, H), nn.Linear(H, H)
        slope = torch.linspace(0, 1, S, dtype=torch.float64)  # the fault: float64
        self.register_buffer("slope", slope[:, None])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x) * self.slope
        x = nn.functional.linear(x, self.second.weight.double())
        return (x @ x.transpose(1, 2)).softmax(-1)


# --8<-- [end:model]


# --8<-- [start:profile]
def record(model: nn.Module, x: torch.Tensor) -> profile:
    """Profile two steps of four: one is skipped, one warms up."""
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    with profile(
        activities=activities,
        schedule=schedule(wait=1, warmup=1, active=2),
        record_shapes=True,
        profile_memory=True,
    ) as profiler:
        for _ in range(4):
            model(x)
            profiler.step()
    return profiler


# --8<-- [end:profile]


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    profiler = record(Scores().to(device), torch.randn(B, S, H, device=device))

    # --8<-- [start:ask]
    print("which operator takes the time itself, without those it calls")
    of = "cpu" if device.type == "cpu" else "device"
    rows = {row.key: row for row in profiler.key_averages() if row.device_type == HOST}
    own = {name: getattr(row, f"self_{of}_time_total") for name, row in rows.items()}
    share = {name: time / sum(own.values()) for name, time in own.items()}
    for name in ("aten::addmm", "aten::mm", "aten::bmm"):
        print(f"  {name:12} {rows[name].count} calls  ≈{100 * share[name]:.0f} %")
    assert 0.999 < sum(share.values()) < 1.001  # no time counts twice

    print("which of its calls, and in which type")
    each = {}
    for row in profiler.key_averages(group_by_input_shape=True):
        if row.key in ("aten::addmm", "aten::mm"):
            shapes = [shape for shape in row.input_shapes if len(shape) == 2]
            each[row.key] = getattr(row, f"self_{of}_time_total") / row.count
            print(f"  {row.key:12} {shapes}  ≈{each[row.key]:.0f} µs")

    print("who allocates, in two steps")
    taken = {name: getattr(row, f"self_{of}_memory_usage") for name, row in rows.items()}
    for name, size in sorted(taken.items(), key=lambda item: (-item[1], item[0])):
        if size > 2**20:
            print(f"  {name:20} {rows[name].count:2} calls  {size / 2**20:.2f} MiB")
    # --8<-- [end:ask]

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    casts = [e for e in events if e.get("name") == "aten::to" and e.get("cat") == "cpu_op"]
    print(f"chrome trace: ≈{len(events)} events, aten::to among them {len(casts)} times")
    longest = max(e["dur"] for e in events if e.get("name") == "aten::mm")
    assert of == "device" or each["aten::mm"] <= longest + 1  # µs, of one call
    assert taken["aten::mm"] == 2 * taken["aten::addmm"]  # the same shape, 8 bytes and not 4


if __name__ == "__main__":
    main()
