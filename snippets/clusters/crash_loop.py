"""A fault that is in the data comes back with every restart, until torchrun gives up.

Step 8 reads a row that ends the process, in each life anew. A restart helps against a machine
that failed; against an input that fails it only repeats. So count: a life that ends at the step
where the last one ended is no accident of hardware.

    (no flag)   every life saves at step 6 and dies in step 8, until torchrun gives up
    --fix      each life leaves word of its step; the third knows of two that died in it, and
                leaves that batch out

No torch is needed for it: torchrun starts any program.
"""

import os
import sys
from pathlib import Path

STEPS, EVERY, DAMAGED = 12, 3, 8
CHECKPOINT, TRYING = Path("checkpoint.txt"), Path("trying.txt")


def compute(step: int) -> None:
    if step == DAMAGED:
        os._exit(13)  # a decoder that crashes, an assertion in a kernel


# --8<-- [start:main]
def repeated(tried: list[str]) -> set[int]:
    """The steps in which two lives or more have ended."""
    return {int(step) for step in tried if tried.count(step) >= 2}


def main(fix: bool) -> None:
    life = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    done = int(CHECKPOINT.read_text()) if CHECKPOINT.exists() else 0
    tried = TRYING.read_text().split() if TRYING.exists() else []  # where each life ended
    left_out = repeated(tried) if fix else set()
    steps = range(done + 1, STEPS + 1)
    print(f"life {life}: from step {steps.start}", end="", flush=True)
    for step in steps:
        # a life leaves the number of the step that it tries; the last one stays when it dies
        TRYING.write_text(" ".join([*tried, str(step)]))
        if step in left_out:
            print(f", leaves out {step}", end="", flush=True)
        else:
            if step == DAMAGED:
                print(f", dies in {step}", flush=True)
            compute(step)
        if step % EVERY == 0:
            CHECKPOINT.write_text(str(step))
    print(f", done: {steps.stop - 1 - len(left_out)} of {STEPS} batches")


# --8<-- [end:main]


if __name__ == "__main__":
    if os.environ.get("WORLD_SIZE") != "1":  # several would write one file of what was tried
        sys.exit(
            "start with torchrun: torchrun --nproc-per-node=1 --max-restarts=3 crash_loop.py"
        )
    assert not repeated(["5", "8"])  # two accidents, each in a step of its own
    main("--fix" in sys.argv)
