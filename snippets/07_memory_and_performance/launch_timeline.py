"""Host and GPU during one step: eager launches, fused kernels, and a CUDA graph.

The host launches kernels in order, and the GPU runs them in order. A kernel starts when it has
been launched and the kernel before it has ended. The program computes the time of a step from
assumed times in µs, and compares it with a formula. It draws launch_timeline.svg.

Look at the row "eager": the GPU is idle for more than half of the step.
"""

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

OPERATORS = 16
Span = tuple[float, float]


# --8<-- [start:timeline]
def timeline(
    launches: list[float], kernels: list[list[float]]
) -> tuple[list[Span], list[Span]]:
    """Start and end of launches and of kernels, in µs. A launch can start several kernels."""
    host: list[Span] = []
    gpu: list[Span] = []
    launched = done = 0.0
    for launch, started in zip(launches, kernels, strict=True):
        host.append((launched, launched + launch))
        launched += launch
        for length in started:
            start = max(launched, done)
            done = start + length
            gpu.append((start, done))
    return host, gpu


# --8<-- [end:timeline]


def draw(cases: dict[str, tuple[list[Span], list[Span]]]) -> None:
    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "launch_timeline", "font.size": 12}
    figure, rows = plt.subplots(len(cases), 1, figsize=(7, 4.4), sharex=True)
    for axes, (name, (host, gpu)) in zip(rows, cases.items(), strict=True):
        for row, spans, colour in ((0, host, "#c2410c"), (1, gpu, "#0b6e99")):
            for start, end in spans:
                axes.barh(row, end - start, 0.8, start, color=colour, ec="white", lw=0.8)
        axes.set_yticks([0, 1], ["host", "GPU"])
        axes.invert_yaxis()
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_title(f"{name}: {gpu[-1][1]:.0f} µs", fontsize=12, loc="left")
    rows[-1].set(xlabel="time (µs)", xlim=(0, 90))
    figure.tight_layout()
    figure.savefig("launch_timeline.svg", transparent=True, metadata={"Date": None})


def main() -> None:
    launch, kernel, graph = 5.0, 2.0, 8.0  # µs: per launch, per kernel, to launch a graph
    fused = OPERATORS // 4  # chains of four: 9 tensors are read or written, then 3
    cases = {
        "eager": timeline([launch] * OPERATORS, [[kernel]] * OPERATORS),
        "fused": timeline([launch] * fused, [[4 * kernel * 3 / 9]] * fused),
        "CUDA graph": timeline([graph], [[kernel] * OPERATORS]),
    }
    formula = {  # µs
        "eager": OPERATORS * launch + kernel,
        "fused": fused * launch + 4 * kernel / 3,
        "CUDA graph": graph + OPERATORS * kernel,
    }
    print(
        f"{OPERATORS} operators, {launch:.0f} µs per launch, {kernel:.0f} µs per kernel", end=""
    )
    print(f", {graph:.0f} µs to launch a graph")
    print("            launches   step µs  GPU busy")
    for name, (host, gpu) in cases.items():
        step, busy = gpu[-1][1], sum(end - start for start, end in gpu)
        assert abs(step - formula[name]) < 1e-9
        print(f"{name:11}{len(host):9}{step:10.1f}{busy / step:10.0%}")
    # with long kernels the host is ahead, and a graph gains nothing
    slow = [[50.0]] * OPERATORS
    eager = timeline([launch] * OPERATORS, slow)[1][-1][1]
    replayed = timeline([graph], [[50.0] * OPERATORS])[1][-1][1]
    assert (eager, replayed) == (launch + 50.0 * OPERATORS, graph + 50.0 * OPERATORS)
    print(f"with kernels of 50 µs: eager {eager:.0f} µs, CUDA graph {replayed:.0f} µs")
    draw(cases)


if __name__ == "__main__":
    main()
