"""How long a request waits: two formulas, compared with a simulation.

The formulas are Pollaczek and Khinchine's and Little's law. There is one server with random
arrivals. A service lasts one second on average: always the same time, or exponential, or
log-normal, which is our model of the answers of a language model. Draws one_server_queue.svg.
"""

import math
import random
from bisect import bisect_right

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

REQUESTS = 150_000
SPREAD = {"constant": 0.0, "exponential": 1.0, "log-normal": 2.0}  # variance over mean²


def service(kind: str, dice: random.Random) -> float:
    """Seconds of one service; the mean is 1."""
    if kind == "constant":
        return 1.0
    if kind == "exponential":
        return dice.expovariate(1)
    sigma2 = math.log(1 + SPREAD[kind])
    return dice.lognormvariate(-sigma2 / 2, math.sqrt(sigma2))


# --8<-- [start:queue]
def predicted_wait(utilisation: float, spread: float) -> float:
    """Mean seconds in the queue, for services of 1 s with variance `spread`."""
    return utilisation * (1 + spread) / (2 * (1 - utilisation))


def simulate(utilisation: float, kind: str) -> tuple[list[float], list[float], list[float]]:
    """First come, first served: when requests arrive, wait, and leave."""
    dice = random.Random(5)
    clock = free = 0.0
    arrivals, waits, departures = [], [], []
    for _ in range(REQUESTS):
        clock += dice.expovariate(utilisation)
        start = max(clock, free)  # when the request before has left
        free = start + service(kind, dice)
        arrivals.append(clock)
        waits.append(start - clock)
        departures.append(free)
    return arrivals, waits, departures


def number_inside(arrivals: list[float], departures: list[float]) -> float:
    """Mean number of requests in the system, counted at random moments."""
    dice = random.Random(2)
    moments = [dice.uniform(0, arrivals[-1]) for _ in range(10_000)]
    return (
        sum(bisect_right(arrivals, t) - bisect_right(departures, t) for t in moments) / 10_000
    )


# --8<-- [end:queue]


def draw(points: dict[str, list[tuple[float, float]]]) -> None:
    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "queue", "font.size": 12}
    figure, axes = plt.subplots(figsize=(7, 3.8))
    grid = [i / 200 for i in range(187)]
    colours = {"constant": "#0f766e", "exponential": "#c2410c", "log-normal": "#7c3aed"}
    places = {"constant": (0.87, 1.2), "exponential": (0.93, 9.6), "log-normal": (0.66, 9.6)}
    for kind, spread in SPREAD.items():
        line = [predicted_wait(u, spread) for u in grid]
        axes.plot(grid, line, color=colours[kind], linewidth=1.5)
        axes.plot(*zip(*points[kind], strict=True), "o", color=colours[kind])
        axes.text(*places[kind], kind, color=colours[kind])
    axes.set(xlabel="utilisation of the server", ylabel="mean wait, in services", ylim=(0, 15))
    axes.set(xlim=(0, 1))
    axes.spines[["top", "right"]].set_visible(False)
    axes.patch.set_visible(False)
    figure.tight_layout()
    figure.savefig("one_server_queue.svg", transparent=True, metadata={"Date": None})


def main() -> None:
    print("service       load   wait: formula  simulated   p99   inside: counted  by Little")
    points: dict[str, list[tuple[float, float]]] = {}
    for kind, spread in SPREAD.items():
        for load in (0.5, 0.7, 0.85):
            arrivals, waits, departures = simulate(load, kind)
            mean = sum(waits) / REQUESTS
            p99 = sorted(waits)[int(0.99 * REQUESTS)]
            rate = REQUESTS / arrivals[-1]
            stay = sum(d - a for a, d in zip(arrivals, departures, strict=True)) / REQUESTS
            inside = number_inside(arrivals, departures)
            formula = predicted_wait(load, spread)
            points.setdefault(kind, []).append((load, mean))
            print(
                f"{kind:12} {load:.2f} {formula:12.2f} s {mean:8.2f} s {p99:6.1f} s "
                f"{inside:10.2f} {rate * stay:14.2f}"
            )
            assert abs(mean / formula - 1) < 0.1, "the formula does not describe the queue"
            assert abs(inside / (rate * stay) - 1) < 0.05, "Little's law"
    draw(points)


if __name__ == "__main__":
    main()
