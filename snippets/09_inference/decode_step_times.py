"""A picture of one decode step: the host launches kernels while the GPU reads its memory.

The host and the GPU work at the same time, so the longer of the two sets the time of the step.
Each case has two lanes. The lane of the GPU adds the time for the weights, for the cached keys
and values, and for the all-reduces between GPUs. The GPU times are lower limits, because they
use the whole bandwidth of the data sheet.

The time of a launch (5 µs) and the latency of an all-reduce (10 µs) are assumptions. The 17 µs
for an operator of eager mode were measured on one H200. A simulation that starts every kernel
one by one checks the rule. Plain Python writes the SVG, so the program needs no package.
"""

from dataclasses import dataclass

EAGER, LAUNCH, ALL_REDUCE = 17e-6, 5e-6, 10e-6  # seconds
KERNELS = 15  # per layer
BANDWIDTH = {"H100": 3.35e12, "B200": 8e12}  # bytes per second


@dataclass
class Model:
    """A dense model with grouped queries; `wide` is the width of the MLP."""

    name: str
    hidden: int
    wide: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int = 128_256

    def weight_bytes(self) -> int:
        """Bytes of the weights that a step reads: all but the embedding, 16 bits each."""
        width = self.hidden // self.heads
        attention = self.hidden * width * 2 * (self.heads + self.kv_heads)
        mlp = 3 * self.hidden * self.wide
        return 2 * (self.layers * (attention + mlp) + self.vocabulary * self.hidden)

    def cache_bytes(self) -> int:
        """Bytes of keys and values for one token, 16 bits each."""
        return 2 * 2 * self.layers * self.kv_heads * self.hidden // self.heads


SMALL = Model("Llama 3 8B", 4096, 14_336, 32, 32, 8)
LARGE = Model("Llama 3 70B", 8192, 28_672, 80, 64, 8)


# --8<-- [start:step]
@dataclass
class Case:
    """One decode step of `requests` requests with `cached` tokens each on `n` GPUs."""

    model: Model
    gpu: str
    n: int = 1
    requests: int = 1
    cached: int = 2048
    per_kernel: float = LAUNCH  # seconds of the host for each kernel; 0 in a CUDA graph

    def host(self) -> float:
        return self.model.layers * KERNELS * self.per_kernel

    def device(self) -> dict[str, float]:
        rate = self.n * BANDWIDTH[self.gpu]
        cache = self.requests * self.cached * self.model.cache_bytes()
        return {
            "weights": self.model.weight_bytes() / rate,
            "cache": cache / rate,
            "all-reduces": (self.n > 1) * 2 * self.model.layers * ALL_REDUCE,
        }

    def step(self) -> float:
        return max(self.host(), sum(self.device().values()))


# --8<-- [end:step]

CASES = [
    ("eager mode", Case(SMALL, "H100", per_kernel=EAGER)),
    ("5 µs per launch", Case(SMALL, "H100")),
    ("5 µs per launch", Case(SMALL, "B200")),
    ("CUDA graph", Case(SMALL, "B200", per_kernel=0.0)),
    ("CUDA graph, 32 requests, 8,192 tokens", Case(SMALL, "H100", 1, 32, 8192, 0.0)),
    ("CUDA graph", Case(LARGE, "H100", 8, 1, 2048, 0.0)),
]


def simulated(case: Case) -> float:
    """Start every kernel one by one: after its launch and after the kernel before it."""
    count = case.model.layers * KERNELS
    launched = finished = 0.0
    for _ in range(count):
        launched += case.per_kernel
        finished = max(launched, finished) + sum(case.device().values()) / count
    return finished


LEFT, TOP, ROW, SCALE = 300, 52, 62, 27.0  # pixels: axis, first case, a case, one millisecond
INK, MUTED = "#1f2937", "#52525b"
COLOURS = {"launches": "#c2410c", "weights": "#0b6e99", "cache": "#7c3aed",
           "all-reduces": "#15803d"}  # fmt: skip


def text_at(x: float, y: float, words: str, colour: str = INK, anchor: str = "start") -> str:
    return f'<text x="{x:g}" y="{y:g}" fill="{colour}" text-anchor="{anchor}">{words}</text>'


def bar(x: float, y: float, width: float, name: str) -> str:
    style = f'fill="{COLOURS[name]}" fill-opacity="0.2" stroke="{COLOURS[name]}"'
    box = f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="18" rx="3" {style}/>'
    if width < 8.2 * len(name):
        return box
    return box + text_at(x + width / 2, y + 14, name, COLOURS[name], "middle")


def draw() -> str:
    bottom = TOP + ROW * len(CASES)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 {bottom + 34}" '
        'font-family="system-ui, sans-serif" font-size="13">'
    ]
    x = 2.0
    for name in COLOURS:  # the legend
        parts += [bar(x, 6, 22, name), text_at(x + 28, 20, name)]
        x += 54 + 8 * len(name)
    parts.append(text_at(x + 6, 20, "upper lane: host, lower lane: GPU", MUTED))
    for number, (words, case) in enumerate(CASES):
        y = TOP + ROW * number
        gpus = f"{case.n} × {case.gpu}"
        parts.append(text_at(2, y + 14, f"{case.model.name}, {gpus}"))
        parts.append(text_at(2, y + 34, words, MUTED))
        if case.per_kernel:
            parts.append(bar(LEFT, y, 1e3 * SCALE * case.host(), "launches"))
        x = float(LEFT)
        for name, seconds in case.device().items():
            width = 1e3 * SCALE * seconds
            if seconds:
                parts.append(bar(x, y + 22, width, name))
            x += width
        end = LEFT + 1e3 * SCALE * case.step()
        parts.append(
            f'<path d="M{end:g} {y - 4} V{y + 44}" stroke="{INK}" stroke-dasharray="3 3"/>'
        )
        shown = f"{1e3 * case.step():.1f} ms"
        parts.append(text_at(end + 5, y + 27, shown) if end < 660 else
                     text_at(end - 5, y + 14, shown, anchor="end"))  # fmt: skip
    for ms in range(0, 16, 5):
        parts.append(text_at(LEFT + SCALE * ms, bottom + 14, str(ms), MUTED, "middle"))
    parts.append(text_at(LEFT + SCALE * 7.5, bottom + 30, "milliseconds", MUTED, "middle"))
    parts.append(f'<path d="M{LEFT} {bottom} H{LEFT + SCALE * 15.3:g}" stroke="{MUTED}"/>')
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    # a count of the parameters, by the models' reports: 8.03 and 70.6 billion with embeddings
    for model, billions in ((SMALL, 8.03), (LARGE, 70.6)):
        every = model.weight_bytes() / 2 + model.vocabulary * model.hidden
        assert abs(every / 1e9 / billions - 1) < 0.002
    print("milliseconds of         host  weights  cache  all-reduces   step  it waits for")
    for words, case in CASES:
        parts = case.device()
        longest = max(parts, key=lambda name: parts[name])
        waits = "the host" if case.host() > sum(parts.values()) else f"the GPU: {longest}"
        print(
              f"{case.model.name:11} {case.n} × {case.gpu} {1e3 * case.host():7.2f}"
              f" {1e3 * parts['weights']:8.2f} {1e3 * parts['cache']:6.2f}"
              f" {1e3 * parts['all-reduces']:12.2f} {1e3 * case.step():6.2f}  {waits}"
        )  # fmt: skip
        # only one kernel or one launch does not overlap with the other lane
        slack = simulated(case) - case.step()
        shorter = min(case.host(), sum(parts.values()))
        count = case.model.layers * KERNELS
        assert abs(slack - shorter / count) < 1e-9, words
    steps = [case.step() for _, case in CASES]
    assert steps[0] > steps[1] and steps[2] > steps[3], "launches decide in eager mode, on B200"
    assert CASES[1][1].host() < sum(CASES[1][1].device().values()), "an H100 hides 5 µs"
    with open("decode_step_times.svg", "w", encoding="utf-8") as file:
        file.write(draw())


if __name__ == "__main__":
    main()
