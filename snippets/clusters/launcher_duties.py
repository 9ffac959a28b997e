"""Draws two nodes and the seven duties of a launcher, with the numbers that torchrun gives.

The program starts one torchrun for each of two nodes on this machine, with two ranks each. The
ranks print their environment variables, and the picture shows these numbers. They must follow
from one formula: rank = node * ranks per node + local rank.
"""

import os
import shlex
import subprocess
import sys
from socket import create_server

NODES, RANKS = 2, 2  # RANKS is the number of ranks per node
INK, MUTED, BLUE, ORANGE, GREEN = "#1f2937", "#52525b", "#0b6e99", "#c2410c", "#15803d"
DUTIES = [
    "Start one process per GPU on every node.",
    "Set RANK, LOCAL_RANK and WORLD_SIZE for each process.",
    "Give all processes one address and port where they meet.",
    "Watch the processes, and end all of them if one fails.",
    "Forward a signal to the ranks, so that they can save.",
    "Start all processes again after a failure.",
    "Provide one folder that all nodes can read and write.",
]
PRINT = "echo $GROUP_RANK $LOCAL_RANK $RANK $WORLD_SIZE"


# --8<-- [start:agents]
def start_agent(node: int, port: int) -> subprocess.Popen:
    """Start the agent of one node. Its ranks print four variables and end."""
    command = f"-m torch.distributed.run --nnodes={NODES} --node-rank={node} "
    command += f"--nproc-per-node={RANKS} --master-addr=127.0.0.1 --master-port={port} "
    words = [sys.executable, *shlex.split(command), "--no-python", "sh", "-c", PRINT]
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True)


def numbers_of_torchrun() -> list[list[int]]:
    """Return [node, local rank, rank, world size] of each rank, as torchrun sets them."""
    with create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    agents = [start_agent(node, port) for node in range(NODES)]
    lines = [line for agent in agents for line in agent.communicate()[0].splitlines()]
    assert [agent.returncode for agent in agents] == [0] * NODES
    return sorted([int(word) for word in line.split()] for line in lines)


# --8<-- [end:agents]


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


def arrow(x1: float, y1: float, x2: float, y2: float, colour: str = MUTED) -> str:
    return (
        f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{colour}" stroke-width="1.8" '
        'marker-end="url(#head)"/>'
    )


def badge(x: float, y: float, number: int) -> str:
    middle = 'text-anchor="middle" font-weight="600"'
    return f'<circle cx="{x}" cy="{y}" r="11" fill="{ORANGE}"/>' + draw_text(
        x, y + 5, str(number), "#ffffff", 14, middle
    )


def draw(numbers: list[list[int]]) -> str:
    """Return the picture as SVG, with the numbers of each rank."""
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 556" '
        'font-family="system-ui, sans-serif"><defs><marker id="head" viewBox="0 0 8 8" '
        'refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        f'<path d="M0 0L8 4L0 8z" fill="{MUTED}"/></marker></defs>'
    ]
    parts += [box(160, 4, 400, 44, ORANGE)]
    parts += [draw_text(176, 31, "ssh, Slurm or Kubernetes: starts one agent per node")]
    for node in range(NODES):
        left = 16 + 364 * node
        parts += [box(left, 92, 324, 186, MUTED, dashed=True)]
        parts += [draw_text(left + 12, 114, f"node {node}", MUTED, 13)]
        parts += [box(left + 84, 102, 156, 40, BLUE)]
        parts += [draw_text(left + 98, 127, "agent (torchrun)", INK)]
        parts += [arrow(left + 138, 48, left + 138, 99), arrow(left + 186, 99, left + 186, 51)]
        for _, local, rank, world in (row for row in numbers if row[0] == node):
            x = left + 12 + 156 * local
            parts += [box(x, 190, 144, 78, GREEN), arrow(left + 162, 142, x + 72, 187)]
            for line, words in enumerate(
                (f"RANK={rank}", f"LOCAL_RANK={local}", f"WORLD_SIZE={world}")
            ):
                parts += [draw_text(x + 12, 211 + 22 * line, words, INK, 13)]
    parts += [badge(130, 70, 1), badge(226, 70, 6), badge(172, 190, 2)]
    parts += [badge(46, 160, 4), draw_text(62, 165, "watch", MUTED, 13)]
    parts += [badge(252, 160, 5), draw_text(268, 165, "signal", MUTED, 13)]
    parts += [arrow(360, 122, 461, 122), arrow(360, 122, 259, 122), badge(360, 122, 3)]
    parts += [draw_text(342, 80, "meeting", MUTED, 12), draw_text(346, 96, "point", MUTED, 12)]
    parts += [box(160, 306, 400, 34, INK), badge(160, 306, 7)]
    parts += [draw_text(182, 328, "one folder for checkpoints, which all nodes share")]
    for x1, x2 in ((178, 250), (542, 470)):
        parts += [arrow(x1, 281, x2, 303), arrow(x2, 303, x1, 281)]
    for number, duty in enumerate(DUTIES, 1):
        y = 366 + 28 * (number - 1)
        parts += [badge(16, y, number), draw_text(36, y + 5, duty, INK, 15)]
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    os.environ |= {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    numbers = numbers_of_torchrun()
    for node, local, rank, world in numbers:
        print(f"node {node}, local rank {local}: rank {rank} of {world}")
    formula = [
        [node, local, node * RANKS + local, NODES * RANKS]
        for node in range(NODES)
        for local in range(RANKS)
    ]
    assert numbers == formula, (numbers, formula)
    with open("launcher_duties.svg", "w", encoding="utf-8") as file:
        file.write(draw(numbers))


if __name__ == "__main__":
    main()
