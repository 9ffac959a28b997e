"""Read the trace of a profiler: parts of a step, own times of operators, and a flame graph.

A trace is a JSON list of events with a start and a duration. If an event lies inside another
event of the same thread, the outer event called the inner one. The own time of an operator is
its duration minus the durations of the operators that it called.
"""

import collections
import json

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function, schedule


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    layers = [nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256), nn.LayerNorm(256)]
    model = nn.Sequential(*layers, nn.Linear(256, 10))
    return model, torch.optim.AdamW(model.parameters(), foreach=False)


# --8<-- [start:record]
def record(path: str) -> torch.profiler.profile:
    """Profile two of five steps, after skipping one and warming up for two."""
    torch.manual_seed(0)
    model, optimizer = build()
    x, y = torch.randn(256, 256), torch.randint(10, (256,))
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
        model, x, y = model.cuda(), x.cuda(), y.cuda()
    plan = schedule(wait=1, warmup=2, active=2, repeat=1)
    with profile(activities=activities, schedule=plan, profile_memory=True) as profiler:
        for _ in range(5):
            with record_function("forward"):
                loss = nn.functional.cross_entropy(model(x), y)
            with record_function("backward"):
                loss.backward()
            with record_function("optimizer"):
                optimizer.step()
                optimizer.zero_grad()
            profiler.step()  # a step of the schedule has ended
    assert all(p.grad is None for p in model.parameters())  # no gradient reaches the next step
    profiler.export_chrome_trace(path)
    return profiler


# --8<-- [end:record]


# --8<-- [start:nest]
HOST = ("cpu_op", "user_annotation", "cuda_runtime", "cuda_driver")  # not "kernel"


def nest(path: str) -> list[dict]:
    """The host events of a trace, each with its `parent`, `depth` and own time `self` (µs)."""
    with open(path) as file:
        events = json.load(file)["traceEvents"]
    spans = [e for e in events if e.get("ph") == "X" and e.get("cat") in HOST]
    spans.sort(key=lambda e: (e["tid"], e["ts"], -e["dur"]))
    stack: list[dict] = []
    for span in spans:
        while stack and (
            stack[-1]["tid"] != span["tid"]
            or span["ts"] >= stack[-1]["ts"] + stack[-1]["dur"] - 1e-3
        ):
            stack.pop()
        span |= {"parent": stack[-1] if stack else None, "depth": len(stack)}
        span["self"] = span["dur"]
        if stack:
            stack[-1]["self"] -= span["dur"]
        stack.append(span)
    return spans


# --8<-- [end:nest]


def check_nest() -> None:
    """If two events start together, the longer one called the shorter one."""
    event = {"ph": "X", "cat": "cpu_op", "tid": 1, "ts": 5.0}
    with open("made.json", "w") as file:
        json.dump({"traceEvents": [event | {"dur": dur} for dur in (1.0, 3.0)]}, file)
    assert [(s["dur"], s["self"]) for s in nest("made.json")] == [(3.0, 2.0), (1.0, 1.0)]


def draw(spans: list[dict]) -> None:
    """The second recorded step as a flame graph. Each event is a box above its caller."""
    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "read_trace", "font.size": 12}
    figure, axes = plt.subplots(figsize=(7, 3.6))
    step = [s for s in spans if s["name"].startswith("ProfilerStep")][-1]
    colours = ["#52525b", "#0b6e99", "#c2410c", "#15803d", "#7c3aed"]
    for span in spans:
        left = (span["ts"] - step["ts"]) / 1e3
        if left < 0 or span["depth"] > 4:
            continue
        row, width = span["depth"], span["dur"] / 1e3
        axes.barh(
            row,
            width,
            left=left,
            height=0.94,
            color=colours[span["depth"]],
            align="edge",
            edgecolor="white",
            linewidth=0.4,
        )
    # each name once, on its widest box, so that every machine draws the same words
    names = ["forward", "backward", "optimizer", "aten::linear", "aten::addmm", "aten::mm"]
    for name in [step["name"], *names]:
        boxes = [s for s in spans if s["name"] == name and s["ts"] >= step["ts"]]
        span = max(boxes, key=lambda s: s["dur"])
        middle = (span["ts"] + span["dur"] / 2 - step["ts"]) / 1e3
        word = "step" if span is step else name.removeprefix("aten::")
        axes.text(
            middle,
            span["depth"] + 0.47,
            word,
            color="white",
            ha="center",
            va="center",
            fontsize=10,
        )
    axes.set(xlabel="time (ms)", yticks=[])
    axes.spines[["top", "right", "left"]].set_visible(False)
    figure.tight_layout()
    figure.savefig("read_trace.svg", transparent=True, metadata={"Date": None})


def main() -> None:
    torch.set_num_threads(1)
    check_nest()
    profiler = record("trace.json")
    spans = nest("trace.json")
    steps = [s for s in spans if s["name"].startswith("ProfilerStep")]
    total = sum(s["dur"] for s in steps)
    each = total / len(steps)
    print(f"{len(steps)} steps recorded of 5, ≈{each / 1e3:.1f} ms each")
    for name in ("forward", "backward", "optimizer"):
        share = sum(s["dur"] for s in spans if s["name"] == name) / total
        print(f"  {name:9} ≈{100 * share:.0f} %")

    own: dict[str, float] = collections.defaultdict(float)
    calls: collections.Counter[str] = collections.Counter()
    for span in spans:
        own[span["name"]] += span["self"]
        calls[span["name"]] += 1
    table = {row.key: row for row in profiler.key_averages()}
    assert abs(each - table["ProfilerStep*"].cpu_time) < 0.05 * each
    print("operator                calls   own time   by key_averages()")
    for name in (
        "aten::addmm",
        "aten::mm",
        "aten::gelu",
        "aten::gelu_backward",
        "aten::native_layer_norm",
        "aten::sqrt",
    ):
        assert calls[name] == table[name].count
        assert abs(own[name] - table[name].self_cpu_time_total) < 0.05 * own[name]
        print(
            f"{name:23} {calls[name]:5}   ≈{own[name]:5.0f} µs   "
            f"≈{table[name].self_cpu_time_total:.0f} µs"
        )
    print("own times equal the profiler's table within 5 %")
    aten = sum(count for name, count in calls.items() if name.startswith("aten::"))
    print(f"operators per step, nested ones included: {aten // len(steps)}")
    gelu, on_device = table["aten::gelu"], torch.cuda.is_available()
    memory = gelu.self_device_memory_usage if on_device else gelu.self_cpu_memory_usage
    print(
        f"aten::gelu allocates {memory / 2 / 2**20:.2f} MiB a step, "
        f"256 × 1024 × 4 bytes = {256 * 1024 * 4 / 2**20:.2f} MiB"
    )
    draw(spans)


if __name__ == "__main__":
    main()
