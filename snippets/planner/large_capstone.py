"""The large capstone on one to eight GPUs: memory and time by the planner's formulas.

What is planned is assessment/capstone_large.toml. Its blocks are plain: as many heads with keys
as without, an MLP of two matrices four times as wide, an embedding and a head of their own.
fully_shard is the planner's zero=3.
"""

from memory import Layout
from plan import CONSTANTS, mfu, the_gpu, weigh
from step_time import step_time
from transformer import Shape, parameters

SHAPE = Shape(24, 1024, 16, 16, 4 * 1024, 256, gated=False)
SEQUENCE, BATCH, MICRO, STEPS = 1024, 64, 8, 1000  # tokens, rows, rows, steps
GIB = 2**30


# --8<-- [start:predict]
def predict(dp: int, gpu_name: str) -> tuple[float, float, float]:
    """GiB that a GPU needs, seconds of a step, and MFU."""
    gpu = the_gpu(gpu_name)
    layout = Layout(dp=dp, micro_batch=MICRO, micro_batches=BATCH // MICRO // dp, zero=3)
    step = step_time(SHAPE, layout, SEQUENCE, gpu, CONSTANTS["time"])
    memory = weigh(SHAPE, layout, SEQUENCE, gpu, step)
    used = mfu(SHAPE, BATCH * SEQUENCE, SEQUENCE, step.seconds, layout, gpu)
    return memory.needed / GIB, step.seconds, used


# --8<-- [end:predict]


def main() -> None:
    print(f"{parameters(SHAPE):,} parameters, {BATCH * SEQUENCE:,} bytes of text in a step")
    print(f"GPUs      memory    step   {STEPS:,} steps    MFU")
    for gpu in ("a100", "h100"):
        for dp in (1, 2, 4, 8):
            memory, seconds, used = predict(dp, gpu)
            minutes = STEPS * seconds / 60
            line = f"{dp} {gpu}  {memory:4.1f} GiB  {seconds:4.2f} s  {minutes:8.1f} min"
            print(f"{line}  {used:5.0%}")


if __name__ == "__main__":
    main()
