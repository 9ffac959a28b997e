"""What does a call of an operator cost? Time against size: t = λ + bytes / W.

λ is the fixed time of a call, whatever the size. Where bytes / W equals λ, half of the time is
overhead. The fitted λ predicts the time if the same addition is split into k calls. The program
draws launch_overhead.svg.
"""

import time
from collections.abc import Callable

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import torch


def seconds(work: Callable[[], object], rounds: int = 7) -> float:
    """The shortest time of several rounds, in seconds. Waits for the device if there is one."""
    wait = torch.accelerator.synchronize if torch.accelerator.is_available() else lambda: None
    work(), wait()
    calls, elapsed = 1, 0.0
    while elapsed < 2e-3:
        calls *= 2
        begin = time.perf_counter()
        for _ in range(calls):
            work()
        wait()
        elapsed = time.perf_counter() - begin
    times = [elapsed / calls]
    for _ in range(rounds):
        begin = time.perf_counter()
        for _ in range(calls):
            work()
        wait()
        times.append((time.perf_counter() - begin) / calls)
    return min(times)


# --8<-- [start:fit]
def fit(sizes: list[int], times: list[float]) -> tuple[float, float]:
    """λ in s and W in bytes/s, by least squares of relative errors; 12 bytes per element."""
    design = torch.tensor([[1 / t, 12 * n / t] for n, t in zip(sizes, times, strict=True)])
    solution = torch.linalg.lstsq(design.double(), torch.ones(len(sizes), 1).double()).solution
    return solution[0].item(), 1 / solution[1].item()


# --8<-- [end:fit]


def draw(sizes: list[int], times: list[float], overhead: float, bandwidth: float) -> None:
    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "launch", "font.size": 12}
    figure, axes = plt.subplots(figsize=(7, 3.6))
    model = [1e6 * (overhead + 12 * n / bandwidth) for n in sizes]
    axes.loglog(sizes, model, color="#0b6e99", linewidth=1.5)
    axes.loglog(sizes, [1e6 * t for t in times], "o", color="#c2410c")
    knee = overhead * bandwidth / 12
    axes.axvline(knee, ymax=0.8, color="#52525b", linestyle=":", linewidth=1.2)
    axes.text(knee * 0.85, model[-1] * 0.4, "half is overhead", color="#52525b", ha="right")
    axes.text(sizes[0], model[0] * 2.6, "λ: Python and dispatcher", color="#0b6e99")
    axes.text(sizes[-1] * 0.5, model[-1] * 0.75, "bytes / W", color="#0b6e99", ha="right")
    axes.set(xlabel="elements added", ylabel="time of one call (µs)")
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig("launch_overhead.svg", transparent=True, metadata={"Date": None})


def main() -> None:
    torch.set_num_threads(1)
    device = torch.device("cpu")
    if torch.accelerator.is_available():
        device = torch.accelerator.current_accelerator()
    cpu = device.type == "cpu"
    sizes, times = [4**k for k in range(1, 10 if cpu else 14)], []  # up to 3 or 805 MB
    for n in sizes:
        x, y, out = (torch.ones(n, device=device) for _ in range(3))
        times.append(seconds(lambda x=x, y=y, out=out: torch.add(x, y, out=out)))
    made_up = torch.tensor(fit(sizes, [1e-6 + 12 * n / 1e11 for n in sizes]))
    torch.testing.assert_close(made_up, torch.tensor([1e-6, 1e11]), rtol=1e-4, atol=0)
    # between these ends a GPU's kernel runs while the host launches, and reads from L2
    ends = [n for n, size in enumerate(sizes) if cpu or not 4**8 < size < 4**12]
    overhead, bandwidth = fit([sizes[n] for n in ends], [times[n] for n in ends])
    print(f"one torch.add: λ ≈{1e6 * overhead:.1f} µs, then ≈{bandwidth / 1e9:.1f} GB/s")
    print(f"half of the time is overhead at ≈{overhead * bandwidth / 12:.0f} elements")

    n = 2**16
    x, y, out = (torch.ones(n, device=device) for _ in range(3))
    print(f"{n} elements in k calls:")
    whole = seconds(lambda: torch.add(x, y, out=out))
    for k in (1, 16, 256, 1024):
        parts = list(zip(x.chunk(k), y.chunk(k), out.chunk(k), strict=True))

        def pieces(parts=parts) -> None:
            for a, b, c in parts:
                torch.add(a, b, out=c)

        measured = seconds(pieces, rounds=3)
        predicted = whole + (k - 1) * overhead
        print(
            f"  k = {k:4}: predicted ≈{1e6 * predicted:.0f} µs, "
            f"measured ≈{1e6 * measured:.0f} µs"
        )
    assert measured > 5 * whole, "a thousand calls cost more than one"
    law = k * (overhead + 12 * n / k / bandwidth)  # λ + bytes / W for each piece
    assert law / 4 < predicted < 4 * law

    # the same four bytes by other ways: what of λ is whose
    a, b, c = (torch.ones(1, device=device) for _ in range(3))
    grad = torch.ones(1, device=device, requires_grad=True)
    for words, work in (
        ("a Python call", lambda: None),
        ("a view", lambda: a.view(1)),
        ("add, out= given", lambda: torch.add(a, b, out=c)),
        ("add, output allocated", lambda: torch.add(a, b)),
        ("add, recorded by autograd", lambda: torch.add(grad, b)),
    ):
        assert getattr(work(), "requires_grad", False) == ("autograd" in words)
        print(f"  {words:26} ≈{1e6 * seconds(work, rounds=3):.2f} µs")
    draw(sizes, times, overhead, bandwidth)


if __name__ == "__main__":
    main()
