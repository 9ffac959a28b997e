"""This program models how SDPA chooses a kernel: the first backend that refuses nothing runs.

Each backend has a list of checks. The lists below follow PyTorch's files sdp_utils.cpp and
sdp_utils_cpp.cpp, but only for the properties that the ten calls of sdpa_backends.py change.
The model's choices must equal the kernels that sdpa_backends.py recorded on a CPU with torch
2.15 and on an H200 with torch 2.11. The last column is a prediction for an NVIDIA GPU on which
cuDNN does not come first. Look at the calls for which only math is left. Plain Python writes
backend_checks.svg, so the program runs without any package.
"""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Call:
    """The properties of one call that the checks look at."""

    dimensions: int = 4
    mask_dimensions: int = 0  # 0: there is no mask
    mask_has_gradient: bool = False
    heads: int = 4
    key_heads: int = 4
    enable_gqa: bool = False
    dropout: float = 0.0
    width: int = 32
    value_width: int = 32
    key_stride: int = 1  # between neighbouring elements of a key


Check = tuple[str, Callable[[Call], bool]]  # a reason to refuse, and when it applies

# --8<-- [start:checks]
THREE_DIMENSIONS = ("3 dimensions", lambda c: c.dimensions != 4)
STRIDE = ("stride is not 1", lambda c: c.key_stride != 1)
LEARNED_MASK = ("learned mask", lambda c: c.mask_has_gradient)
MASK_SHAPE = ("mask of 3 dims", lambda c: c.mask_dimensions == 3)
ANY_MASK = ("takes no mask", lambda c: c.mask_dimensions > 0)
DROPOUT = ("dropout", lambda c: c.dropout > 0)
WIDTHS = ("widths differ", lambda c: c.width != c.value_width)
OTHER_HEADS = ("heads differ", lambda c: c.heads != c.key_heads and not c.enable_gqa)
GROUPED_HEADS = ("grouped heads", lambda c: c.heads != c.key_heads)  # up to torch 2.13

CPU: dict[str, list[Check]] = {  # torch 2.15: three dimensions are allowed since 2.14
    "flash": [DROPOUT, LEARNED_MASK, MASK_SHAPE, WIDTHS, STRIDE],
    "math": [],
}
GPU: dict[str, list[Check]] = {  # torch 2.11, in the order in which an H200 tries them
    "cudnn": [THREE_DIMENSIONS, LEARNED_MASK, MASK_SHAPE, OTHER_HEADS, STRIDE],
    "flash": [THREE_DIMENSIONS, ANY_MASK, WIDTHS, OTHER_HEADS, STRIDE],
    "efficient": [THREE_DIMENSIONS, GROUPED_HEADS, STRIDE],
    "math": [],
}


def first_refusal(checks: list[Check], call: Call) -> str | None:
    """Return the first reason to refuse the call, or None if the kernel takes it."""
    return next((reason for reason, applies in checks if applies(call)), None)


def choose(backends: dict[str, list[Check]], call: Call) -> str:
    """Return the first backend whose checks all pass."""
    return next(name for name, checks in backends.items() if not first_refusal(checks, call))


# --8<-- [end:checks]

CALLS = {
    "plain": Call(),
    "is_causal": Call(),
    "boolean mask": Call(mask_dimensions=2),
    "one key head, enable_gqa": Call(key_heads=1, enable_gqa=True),
    "dropout_p=0.1": Call(dropout=0.1),
    "a mask that is learned": Call(mask_dimensions=2, mask_has_gradient=True),
    "a mask of three dimensions": Call(mask_dimensions=3),
    "no batch dimension": Call(dimensions=3),
    "values half as wide": Call(value_width=16),
    "keys stored as [d, s]": Call(key_stride=64),
}
# the kernels in sdpa_backends.cpu.txt (torch 2.15.0) and sdpa_backends.cuda.txt (torch 2.11.0)
RECORDED_CPU = ["flash"] * 4 + ["math"] * 3 + ["flash"] + ["math"] * 2
RECORDED_GPU = ["cudnn"] * 5 + ["efficient"] * 2 + ["math", "cudnn", "math"]

INK, MUTED, BLUE, GREEN, ORANGE = "#1f2937", "#52525b", "#0b6e99", "#15803d", "#c2410c"
ROWS = {  # what the picture shows of the ten calls
    "is_causal": "is_causal=True",
    "boolean mask": "boolean mask",
    "a mask that is learned": "learned mask",
    "a mask of three dimensions": "mask [a, s, s]",
    "keys stored as [d, s]": "keys as [d, s]",
}
NAMES = {"cudnn": "cuDNN", "efficient": "memory-efficient"}


def words(x: float, y: float, text: str, colour: str = INK, anchor: str = "middle") -> str:
    return f'<text x="{x:g}" y="{y:g}" fill="{colour}" text-anchor="{anchor}">{text}</text>'


def panel(top: float, title: str, backends: dict[str, list[Check]]) -> list[str]:
    """Draw one row for each call: which backends refuse it, which runs, which is not asked."""
    left, wide, high = 130, 140, 32
    parts = [words(2, top + 16, title, INK, "start")]
    for place, name in enumerate(backends):
        head = f"{place + 1}. {NAMES.get(name, name)}"
        parts.append(words(left + wide * (place + 0.5), top + 42, head, MUTED))
    for row, (name, label) in enumerate(ROWS.items()):
        y = top + 52 + (high + 6) * row
        parts.append(words(2, y + 21, label, INK, "start"))
        chosen = choose(backends, CALLS[name])
        for place, (backend, checks) in enumerate(backends.items()):
            reason = first_refusal(checks, CALLS[name])
            asked = list(backends).index(chosen) >= place
            colour = GREEN if backend == chosen else ORANGE if asked else MUTED
            text = "runs" if backend == chosen else reason if asked else "not asked"
            dash = "" if asked else ' stroke-dasharray="3 4"'
            fill = 0.25 if backend == chosen else 0.08 if asked else 0
            x = left + wide * place + 6
            parts.append(
                f'<rect x="{x:g}" y="{y:g}" width="{wide - 12}" height="{high}" rx="5" '
                f'fill="{colour}" fill-opacity="{fill}" stroke="{colour}"{dash}/>'
            )
            parts.append(words(x + wide / 2 - 6, y + 21, text, colour))
    return parts


def draw() -> str:
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 530" '
        'font-family="system-ui, sans-serif" font-size="14">'
    ]
    parts += panel(4, "On an H200 with torch 2.11, SDPA asks four backends:", GPU)
    parts += panel(280, "On a CPU with torch 2.15, SDPA asks two backends:", CPU)
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    without_cudnn = {name: checks for name, checks in GPU.items() if name != "cudnn"}
    print(f"{'call':27} CPU     H200       GPU without cuDNN")
    columns = []
    for name, call in CALLS.items():
        row = [choose(backends, call) for backends in (CPU, GPU, without_cudnn)]
        columns.append(row)
        print(f"{name:27} {row[0]:7} {row[1]:10} {row[2]}")
    on_cpu, on_gpu, _ = (list(column) for column in zip(*columns, strict=True))
    assert on_cpu == RECORDED_CPU and on_gpu == RECORDED_GPU
    print("The first two columns equal the kernels that sdpa_backends.py recorded.")

    grouped = Call(mask_dimensions=2, key_heads=1, enable_gqa=True)
    assert choose(without_cudnn, grouped) == "math"
    newer = {**without_cudnn, "efficient": [THREE_DIMENSIONS, OTHER_HEADS, STRIDE]}
    assert choose(newer, grouped) == "efficient"
    print(f"A mask with grouped heads, without cuDNN: {choose(without_cudnn, grouped)} up to "
          f"torch 2.13, {choose(newer, grouped)} since 2.14")  # fmt: skip
    # each check decides at least one call: without it, a recorded choice changes
    for backends, recorded in ((CPU, RECORDED_CPU), (GPU, RECORDED_GPU)):
        for name, checks in backends.items():
            for check in checks:
                fewer = {**backends, name: [other for other in checks if other != check]}
                changed = [choose(fewer, call) for call in CALLS.values()] != recorded
                hidden = backends is GPU and (name == "flash" or "heads" in check[0])
                assert changed or hidden, f"no call tests that {name} refuses: {check[0]}"
    with open("backend_checks.svg", "w", encoding="utf-8") as file:
        file.write(draw())


if __name__ == "__main__":
    main()
