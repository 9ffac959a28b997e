"""A checkpoint that is renamed into place is whole at every moment, whenever the process dies.

Two ways to save are cut into their steps. For each step a child process saves and is killed
right after the step. The parent then loads the file, as a restarted run would. Look for the
steps after which nothing can be loaded: only the way that overwrites the old file has them.

A killed process leaves its bytes to the kernel, so this program cannot show what `fsync` is
for: it puts the bytes on the disk in case that the machine itself loses power.
"""

import io
import os
import pickle
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import torch

OLD, NEW = 8, 12  # the steps of training at which the two checkpoints were taken
CHECKPOINT = Path("checkpoint.pt")
WIDTH, BOX, ROW, TOP = 760, 112, 118, 44
INK, MUTED = "#1f2937", "#52525b"
BLUE, GREEN, ORANGE = "#0b6e99", "#15803d", "#c2410c"


def serialize(step: int) -> bytes:
    buffer = io.BytesIO()
    torch.save({"step": step, "weight": torch.full((1000,), float(step))}, buffer)
    return buffer.getvalue()


def overwrite(data: bytes) -> Iterator[str]:
    """Save into the old file, and name each step after it was done."""
    with CHECKPOINT.open("wb") as file:
        yield "open"
        file.write(data[: len(data) // 2])
        file.flush()
        yield "write half"
        file.write(data[len(data) // 2 :])
        file.flush()
        yield "write the rest"


def rename_into_place(data: bytes) -> Iterator[str]:
    """Save next to the old file, then give the new file its name; name each step."""
    temporary = CHECKPOINT.with_suffix(".tmp")
    with temporary.open("wb") as file:
        yield "open .tmp"
        file.write(data[: len(data) // 2])
        file.flush()
        yield "write half"
        file.write(data[len(data) // 2 :])
        file.flush()
        yield "write the rest"
        os.fsync(file.fileno())
        yield "fsync"
    os.replace(temporary, CHECKPOINT)
    yield "rename"


def save_and_die(save: Callable[[bytes], Iterator[str]], last: int) -> None:
    """Save in a child process, which is killed right after step `last`."""
    child = os.fork()
    if child == 0:
        for number, _ in enumerate(save(NEW_DATA)):
            if number == last:
                os.kill(os.getpid(), signal.SIGKILL)
        os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


def load() -> str:
    """Load the checkpoint as a restarted run does: `step 8`, `step 12` or `nothing`."""
    try:
        state = torch.load(CHECKPOINT, weights_only=True)
    except (EOFError, OSError, RuntimeError, pickle.UnpicklingError):
        return "nothing"
    assert state["weight"].eq(state["step"]).all()
    return f"step {state['step']}"


def try_every_step(save: Callable[[bytes], Iterator[str]]) -> list[tuple[str, str]]:
    """For each step of `save`: its name, and what can be loaded after a death right then."""
    CHECKPOINT.write_bytes(OLD_DATA)
    names = list(save(NEW_DATA))
    assert load() == f"step {NEW}"  # undisturbed, both ways work
    found = []
    for last, name in enumerate(names):
        CHECKPOINT.write_bytes(OLD_DATA)
        CHECKPOINT.with_suffix(".tmp").unlink(missing_ok=True)
        save_and_die(save, last)
        found.append((name, load()))
    return found


def caption(x: float, y: float, words: str, colour: str = INK, anchor: str = "middle") -> str:
    return f'<text x="{x}" y="{y}" fill="{colour}" text-anchor="{anchor}">{words}</text>'


def box(x: float, y: float, width: float, height: float, words: str, colour: str) -> str:
    frame = (
        f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6" fill="{colour}" '
        f'fill-opacity="0.1" stroke="{colour}" stroke-width="1.5"/>'
    )
    return frame + caption(x + width / 2, y + height / 2 + 5, words, colour)


def draw(results: dict[str, list[tuple[str, str]]]) -> str:
    """The steps of each way as boxes from left to right; below a box, what can be loaded."""
    colours = {f"step {OLD}": BLUE, f"step {NEW}": GREEN, "nothing": ORANGE}
    height = TOP + len(results) * ROW - 26
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        'font-family="system-ui, sans-serif" font-size="14">',
        caption(
            2, 20, f"checkpoint.pt is from step {OLD}; now step {NEW} is saved", INK, "start"
        ),
    ]
    for row, (way, found) in enumerate(results.items()):
        y = TOP + row * ROW
        parts.append(caption(2, y + 25, way, INK, "start"))
        parts.append(caption(2, y + 76, "load after a kill", MUTED, "start"))
        for number, (name, loaded) in enumerate(found):
            left = 140 + number * (BOX + 14)
            middle = left + BOX / 2
            parts.append(box(left, y, BOX, 40, name, MUTED))
            if number + 1 < len(found):
                arrow = f"M{left + BOX} {y + 20} h14"
                parts.append(f'<path d="{arrow}" stroke="{MUTED}" stroke-width="1.5"/>')
            arrow = f"M{middle} {y + 40} v16"
            parts.append(f'<path d="{arrow}" stroke="{MUTED}" stroke-width="1.5"/>')
            parts.append(box(left + 10, y + 56, BOX - 20, 30, loaded, colours[loaded]))
    return "\n".join([*parts, "</svg>", ""])


OLD_DATA, NEW_DATA = serialize(OLD), serialize(NEW)


def check_fsync() -> None:
    """The new file is synced once, when it is complete and before it gets its final name."""
    CHECKPOINT.write_bytes(OLD_DATA)
    synced = []
    with mock.patch("os.fsync", lambda file: synced.append((os.fstat(file).st_size, load()))):
        list(rename_into_place(NEW_DATA))
    assert synced == [(len(NEW_DATA), f"step {OLD}")]


def main() -> None:
    if not hasattr(os, "fork"):
        sys.exit("this program needs os.fork, which Windows does not have")
    check_fsync()
    results = {
        "overwrite": try_every_step(overwrite),
        "rename into place": try_every_step(rename_into_place),
    }
    print("way to save          killed after      then torch.load returns")
    for way, found in results.items():
        for name, loaded in found:
            print(f"{way:21}{name:18}{loaded}")
    overwritten = [loaded for _, loaded in results["overwrite"]]
    renamed = [loaded for _, loaded in results["rename into place"]]
    assert "nothing" in overwritten and "nothing" not in renamed
    assert renamed == [f"step {OLD}"] * (len(renamed) - 1) + [f"step {NEW}"]
    with open("atomic_write.svg", "w", encoding="utf-8") as file:
        file.write(draw(results))


if __name__ == "__main__":
    main()
