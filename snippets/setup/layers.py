"""Draws the five layers between a program and a GPU, and the six faults that can separate them.

Each fault changes one fact of a machine on which everything works. The program checks that the
rules of `why_no_gpu.py` then report the message that the picture shows for this fault. Plain
Python writes the SVG.
"""

import subprocess
import sys
from dataclasses import replace

from why_no_gpu import CU130, Machine, why

INK, MUTED, BLUE, ORANGE, GREEN = "#1f2937", "#52525b", "#0b6e99", "#c2410c", "#15803d"
LAYERS = [
    ("your program", BLUE),
    ("torch", BLUE),
    ("CUDA libraries", BLUE),
    ("driver", GREEN),
    ("GPU", GREEN),
]
HEALTHY = Machine(build=(13, 0), driver=(13, 0), gpus=[(9, 0)], code=CU130)

# --8<-- [start:faults]
FAULTS = [  # a layer, what is wrong with it, torch's message, and the facts that differ
    ("torch", "it is not installed", "No module named 'torch'", None),
    (
        "CUDA libraries",
        "the build of torch has none",
        "Torch not compiled with CUDA enabled",
        {"build": None},
    ),
    (
        "driver",
        "it is not installed",
        "Found no NVIDIA driver on your system",
        {"driver": None},
    ),
    (
        "driver",
        "it is older than the libraries",
        "The NVIDIA driver on your system is too old",
        {"driver": (12, 4)},
    ),
    ("GPU", "the process sees none", "No CUDA GPUs are available", {"visible": ""}),
    (
        "GPU",
        "torch has no code for it",
        "no kernel image is available for execution on the device",
        {"gpus": [(7, 0)]},
    ),
]
# --8<-- [end:faults]


def draw_text(
    x: float, y: float, words: str, colour: str = INK, size: int = 14, extra=""
) -> str:
    return f'<text x="{x}" y="{y}" fill="{colour}" font-size="{size}" {extra}>{words}</text>'


def box(x: float, y: float, width: float, height: float, colour: str, dashed=False) -> str:
    dash = ' stroke-dasharray="5 4"' if dashed else ""
    return (
        f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="4" fill="{colour}" '
        f'fill-opacity="0.1" stroke="{colour}" stroke-width="1.5"{dash}/>'
    )


def badge(x: float, y: float, number: int) -> str:
    middle = 'text-anchor="middle" font-weight="600"'
    return f'<circle cx="{x}" cy="{y}" r="11" fill="{ORANGE}"/>' + draw_text(
        x, y + 5, str(number), "#ffffff", 14, middle
    )


def draw() -> str:
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 374" '
        'font-family="system-ui, sans-serif">'
    ]
    parts += [box(6, 6, 232, 212, BLUE, dashed=True), box(6, 226, 232, 142, GREEN, dashed=True)]
    parts += [draw_text(16, 26, "environment or container image", MUTED, 13)]
    parts += [draw_text(16, 359, "the machine", MUTED, 13)]
    tops = {"your program": 36, "torch": 98, "CUDA libraries": 160, "driver": 236, "GPU": 298}
    for name, colour in LAYERS:
        y = tops[name]
        parts += [box(24, y, 150, 44, colour), draw_text(36, y + 28, name, INK, 15)]
    used = dict.fromkeys(tops, 0)
    for number, (layer, wrong, message, _) in enumerate(FAULTS, 1):
        alone = [fault[0] for fault in FAULTS].count(layer) == 1
        down = 22 if alone else 9 + 26 * used[layer]
        used[layer] += 1
        parts += [badge(196, tops[layer] + down, number)]
        y = 30 + 57 * (number - 1)
        parts += [
            badge(266, y + 8, number),
            draw_text(286, y + 4, f"{layer}: {wrong}", MUTED, 13),
        ]
        parts += [draw_text(286, y + 25, message, INK, 14)]
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    with open("layers.svg", "w", encoding="utf-8") as file:
        file.write(draw())
    assert why(HEALTHY) == "no fault found"
    for number, (layer, wrong, message, changed) in enumerate(FAULTS, 1):
        if changed is None:  # -I and -S: this Python, without its installed packages
            command = [sys.executable, "-I", "-S", "-c", "import torch"]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            assert done.stderr.rstrip().endswith(message), done.stderr
        else:
            assert why(replace(HEALTHY, **changed)).startswith(message), message
        print(f"{number} {layer}: {wrong}\n  {message}")


if __name__ == "__main__":
    main()
