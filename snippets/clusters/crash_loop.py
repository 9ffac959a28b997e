"""Shows that a restart does not help if the data ends the process, and skips the bad batch.

Step 8 reads a row that ends the process, so every restarted life of the process ends there too.
Each life therefore writes the number of the step that it tries into a file. If two lives have
ended in the same step, the next life leaves out the batch of this step.

    (no flag)   every life saves at step 6 and ends in step 8, until torchrun gives up
    --fix       the third life sees that two lives ended in step 8, and leaves out its batch

The program does not import torch, because torchrun starts any program.
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
    """The steps in which at least two lives have ended."""
    return {int(step) for step in tried if tried.count(step) >= 2}


def main(fix: bool) -> None:
    life = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    done = int(CHECKPOINT.read_text()) if CHECKPOINT.exists() else 0
    # the step in which each life ended
    tried = TRYING.read_text().split() if TRYING.exists() else []
    left_out = repeated(tried) if fix else set()
    steps, completed = range(done + 1, STEPS + 1), len({*range(1, done + 1)} - left_out)
    print(f"life {life}: starts at step {steps.start}", end="", flush=True)
    for step in steps:
        # if this life ends in the step, the number of the step stays in the file
        TRYING.write_text(" ".join([*tried, str(step)]))
        if step in left_out:
            print(f", leaves out step {step}", end="", flush=True)
        else:
            if step == DAMAGED:
                print(f", ends in step {step}", flush=True)
            compute(step)
            completed += 1
        if step % EVERY == 0:
            CHECKPOINT.write_text(str(step))
    print(f", completes {completed} of {STEPS} batches")


# --8<-- [end:main]


if __name__ == "__main__":
    if os.environ.get("WORLD_SIZE") != "1":  # several ranks would write the same file
        sys.exit(
            "start with torchrun: torchrun --nproc-per-node=1 --max-restarts=3 crash_loop.py"
        )
    assert not repeated(["5", "8"])  # two lives that ended in different steps
    main("--fix" in sys.argv)
