# %% [markdown]
# # Lab 05: ZeRO with DeepSpeed
#
# DeepSpeed takes a model, an optimizer and a configuration, and returns an **engine**, which
# owns backward, the step, accumulation and clipping. What is sharded is one number in the
# configuration. That is its charm, and its danger: a key in the wrong place is often no error,
# and the job then trains something else than you meant. In this lab you write the configuration
# of all four stages, of bf16 and of offload, predict what each rank then holds and sends, and
# measure both. FSDP2 trains the same model beside it. All losses must be those of one process.
#
#     torchrun --nproc-per-node=2 labs/lab05_deepspeed.py
#
# runs the finished lab, on the CPU or on one GPU per process, with 1, 2, 3, 4 or 6 ranks. It
# needs `pip install deepspeed` (0.19; nothing is compiled). To do it yourself:
#
#     python labs/start.py 05
#     torchrun --nproc-per-node=2 my_labs/lab05_deepspeed.py
#     python labs/check.py my_labs/lab05_deepspeed.py
#
# The first line writes your copy, with blanks, to `my_labs/`. The last one grades it, step by
# step, at 2 and 3 ranks; `--step 2` grades one step, `--output` shows what failing ranks
# printed. Work in a clone of the repository, with its Python: `make test WHAT=labs` sets it up
# once, and `source .venv/bin/activate` puts torchrun on the path.
#
# There are eight steps. Each has a text, one or more blanks for you to fill, and a check which
# prints what it proved. Your copy runs as far as the first blank and says in one line what
# belongs there; the long report below that line is torchrun's. In `check.py` every step stands
# on finished versions of the other steps, so you can take them in any order. Allow three hours.
# Lab 02 comes first, and chapter 04 to the end of "DeepSpeed: the same idea, as an engine".

# %%
import argparse
import contextlib
import copy
import gc
import io
import json
import logging
import os
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode


def say(text: str) -> None:
    """Print once, not once per rank."""
    if os.environ.get("RANK", "0") == "0":
        print(text, flush=True)


def stop_kindly(kind: type[BaseException], error: BaseException, trace) -> None:
    """End on a blank or on a failed check with one sentence from one rank."""
    blank = issubclass(kind, NotImplementedError)
    if not (blank or issubclass(kind, AssertionError) or kind.__module__ == __name__):
        return sys.__excepthook__(kind, error, trace)
    own = [frame for frame in traceback.extract_tb(trace) if frame.filename == __file__]
    checks = [frame for frame in own if frame.name.startswith(("<module>", "main", "check_"))]
    line = getattr(error, "line", (own if blank else checks)[-1].lineno)
    if os.environ.get("RANK", "0") != "0":
        # rank 0 speaks first, and its launcher then ends the others; every rank meets a blank
        time.sleep(60 if blank or os.environ.get("GROUP_RANK", "0") != "0" else 5)
    what = "a blank" if blank else "a check that failed"
    print(f"{Path(__file__).name}, line {line}, {what}: {error}", flush=True)


def refuse(sentence: str) -> None:
    """End with one sentence from one rank; torchrun then ends the others."""
    if os.environ.get("RANK", "0") != "0":
        time.sleep(60)
    sys.exit(sentence)


if __name__ == "__main__":
    if "LOCAL_RANK" not in os.environ or len(sys.argv) > 2:
        sys.exit("start me with: torchrun --nproc-per-node=2 lab05_deepspeed.py [FOLDER]")
    if os.environ["WORLD_SIZE"] not in ("1", "2", "3", "4", "6"):
        refuse("24 rows and 12 layers go into equal parts: start 1, 2, 3, 4 or 6 ranks")
    sys.excepthook = stop_kindly

# DeepSpeed logs to stdout, with the date; it looks for accelerators, and at each gradient again
logging.disable(logging.WARNING)
warnings.simplefilter("ignore")
if torch.accelerator.device_count() < int(os.environ.get("LOCAL_WORLD_SIZE", 1)):
    os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_SIZE": "1"} | os.environ

try:
    import deepspeed
    import deepspeed.ops
    from deepspeed.runtime import constants
    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
except ImportError:
    refuse("this lab needs DeepSpeed: pip install deepspeed")

# on a CPU, DeepSpeed would compile an all-reduce for inference, which training does not use
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

# %% [markdown]
# The cells under `if __name__ == "__main__":` run when you start the file. `check.py` imports
# the file and calls what you wrote, so keep code of your own inside functions or such cells.
#
# ## The truth: one process, the whole batch
#
# Twelve layers of 48 × 48 numbers each, $\Psi = 27\,648$ parameters in all, without biases, so
# that everything divides evenly by the ranks and formulas are exact. Five batches of 24 rows;
# the model learns to make each row symmetric. One process trains on them with AdamW and the
# gradient clipped to a norm of 0.75, which the first three exceed. Its five losses are what
# every engine in this lab must arrive at.

# %%
WIDTH, LAYERS = 48, 12
PSI = LAYERS * WIDTH * WIDTH
BATCH, BATCHES = 24, 5
LEARNING_RATE, CLIP = 1e-2, 0.75


class Net(nn.Module):
    """Rows [b, 48] to rows [b, 48], computed in the precision of the parameters."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(self.layers[0].weight.dtype)
        for layer in self.layers:
            x = x + torch.tanh(layer(x)) / 2
        return x.float()


def build_model(device: torch.device | str = "cpu") -> Net:
    """The model, the same wherever it is built."""
    torch.manual_seed(5)
    return Net().to(device)


def build_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)


def make_batches(device: torch.device | str = "cpu") -> list[torch.Tensor]:
    """Five batches of rows [24, 48]."""
    generator = torch.Generator().manual_seed(5)
    return list(torch.randn(BATCHES, BATCH, WIDTH, generator=generator).to(device))


def mean_loss(output: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """How far the output is from the rows made symmetric; a mean over all numbers."""
    return (output - (rows + rows.flip(-1)) / 2).square().mean()


def train_alone() -> list[float]:
    """Train the whole model in one process; return the loss of each step."""
    model, losses = build_model(), []
    optimizer = build_optimizer(model)
    for rows in make_batches():
        loss = mean_loss(model(rows), rows)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def in_row(numbers: Sequence[float], digits: int = 4) -> str:
    return " ".join(f"{number:.{digits}f}" for number in numbers)


def assert_losses(ours: Sequence[float], true: Sequence[float], wide: float = 1e-5) -> None:
    """Raise AssertionError, with both rows of losses, unless they agree."""
    what = f"the losses are {in_row(ours, 6)}, of one process {in_row(true, 6)}"
    assert len(ours) == len(true), what
    torch.testing.assert_close(
        torch.tensor(ours), torch.tensor(true), rtol=wide, atol=0.0, msg=what
    )


if __name__ == "__main__":
    TRUE_LOSSES = train_alone()
    say(f"the truth: one process, losses {in_row(TRUE_LOSSES)}")

# %% [markdown]
# ## Step 1: a configuration, and who checks it
#
# Three numbers must agree: the **global batch** is the micro-batch of one forward, times the
# micro-batches that are accumulated before a step, times the ranks.
#
#     train_batch_size
#     = train_micro_batch_size_per_gpu × gradient_accumulation_steps × ranks
#
# The global batch is given (it decides what is learned), so is the micro-batch (memory decides
# it) and so is $N$ (the cluster decides it). The number of accumulated micro-batches follows,
# if it divides. If it does not, say so: a batch silently rounded is another experiment.
#
# These keys stand at the top, and so does `gradient_clipping` (here `CLIP`). Sharding has a
# block of its own, `zero_optimization`:
#
# - `stage`: 0, 1, 2 or 3.
# - `reduce_bucket_size`: how many *elements* are reduced at a time; a buffer of this many is
#   kept. Here one layer, `WIDTH * WIDTH`; the default is 500 million.
# - `stage3_prefetch_bucket_size`: how many elements are gathered ahead of their use. One layer
#   again.
# - `stage3_param_persistence_threshold`: tensors with fewer elements stay whole on every rank.
#   The default is 100,000, more than any layer here has: stage 3 would shard nothing. Set it to
#   0.
#
# Who checks this? Keys *inside* `zero_optimization` are checked by name. Keys at the top are
# not: write `gradient_cliping`, and you train without clipping. So the check below asks
# DeepSpeed to read your configuration, looks for names that DeepSpeed does not know, and reads
# back what it understood.


# %%
def make_config(ranks: int, micro: int, batch: int, stage: int) -> dict:
    """DeepSpeed's configuration for a global batch of `batch` rows, `micro` at a time.

    Raises ValueError if the batch cannot be cut into equal micro-batches on all ranks.
    """
    # >>> solution 1: raise ValueError if it does not divide, and return the configuration
    # hint: the keys of the text: four at the top, and a dict of four in "zero_optimization"
    accumulation, rest = divmod(batch, micro * ranks)
    if rest or accumulation == 0:
        raise ValueError(f"{batch} rows cannot be cut for {ranks} ranks of {micro} rows each")
    return {
        "train_batch_size": batch,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": CLIP,
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": WIDTH * WIDTH,
            "stage3_prefetch_bucket_size": WIDTH * WIDTH,
            "stage3_param_persistence_threshold": 0,
        },
    }
    # <<< solution


def unknown_keys(config: dict) -> list[str]:
    """Top-level keys that DeepSpeed does not know, and therefore ignores."""
    known = {value for value in vars(constants).values() if isinstance(value, str)}
    known |= {"zero_optimization", "activation_checkpointing", "aio", "amp", "compile"}
    known |= {"elasticity", "flops_profiler", "tensorboard", "wandb", "csv_monitor", "comet"}
    return [key for key in config if key not in known]


# %%
def start() -> torch.device:
    """Join the process group: one accelerator per local rank where there are enough."""
    if "LOCAL_RANK" not in os.environ:
        sys.exit(f"start this program with: torchrun --nproc-per-node=2 {sys.argv[0]}")
    local_rank, local_world = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if torch.accelerator.device_count() < local_world or torch.backends.mps.is_available():
        dist.init_process_group("gloo")  # on the CPU; mps has no collectives
        return torch.device("cpu")
    device = torch.device(torch.accelerator.current_accelerator().type, local_rank)
    torch.accelerator.set_device_index(local_rank)
    dist.init_process_group(device_id=device)
    return device


def lab_config(stage: int) -> dict:
    """Two micro-batches per step on each rank: the configuration of most checks."""
    ranks = dist.get_world_size()
    return make_config(ranks, BATCH // (2 * ranks), BATCH, stage)


def check_config() -> None:
    ranks = dist.get_world_size()
    for stage in range(4):
        config = make_config(ranks, 2, BATCH, stage)
        assert not unknown_keys(config), f"DeepSpeed ignores {unknown_keys(config)}"
        read = DeepSpeedConfig(copy.deepcopy(config))
        three = (
            read.train_micro_batch_size_per_gpu,
            read.gradient_accumulation_steps,
            read.train_batch_size,
        )
        expected = (2, BATCH // (2 * ranks), BATCH)
        assert three == expected, f"micro-batch, accumulation, batch: {three}, not {expected}"
        found = int(read.zero_config.stage)
        assert found == stage, f"DeepSpeed reads stage {found}"
        assert read.gradient_clipping == CLIP, "DeepSpeed does not clip"
        found = (read.zero_config.reduce_bucket_size, read.zero_config.prefetch_bucket_size)
        assert found == (WIDTH * WIDTH, WIDTH * WIDTH), f"the buckets have {found} elements"
        assert read.zero_config.param_persistence_threshold == 0, "small tensors stay whole"
    try:
        make_config(ranks, 5, BATCH, 0)
    except ValueError:
        pass
    else:
        raise AssertionError(f"{BATCH} rows in micro-batches of 5, and no ValueError")
    micro, accumulation, batch = three
    say(f"step 1: batch {batch} = {micro} × {accumulation} × {ranks} ranks; stages 0 to 3 read")


# %% [markdown]
# ## Step 2: the loop belongs to the engine
#
# `deepspeed.initialize(model=…, optimizer=…, config=…)` returns four things; the first is the
# engine. Three calls replace yours:
#
# - `engine(x)` for `model(x)`. In stage 3 it gathers parameters, layer by layer.
# - `engine.backward(loss)` for `(loss / m).backward()`. It divides by the number $m$ of
#   accumulated micro-batches *itself*, and reduces gradients.
# - `engine.step()` for clipping, `optimizer.step()` and `zero_grad()`. It counts micro-batches:
#   it does all this on the $m$-th, and nothing but count on the others.
#
# So `engine.step()` stands in the loop over micro-batches, once for each. The $m$-th is called
# the **accumulation boundary**. What the engine does not do is deal out the data: it counts,
# and trusts you. Rank $r$ takes the $r$-th of $N$ equal parts of the batch, and cuts that into
# micro-batches. `engine.train_micro_batch_size_per_gpu()` and
# `engine.gradient_accumulation_steps()` say how.
#
# The loss of a step is the mean over all its rows, on whatever rank they are. Take care of the
# difference between what is trained on and what is printed: AdamW divides a gradient by its
# size, and so forgives a wrong factor for a long time. Clipping does not, nor does the next
# optimizer. `check.py` looks at the calls.


# %%
def make_engine(config: dict, device: torch.device | str = "cpu") -> deepspeed.DeepSpeedEngine:
    """The engine for the lab's model and AdamW."""
    model = build_model(device)
    # >>> solution 2: build_optimizer(model), initialize, return the engine
    optimizer = build_optimizer(model)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return engine
    # <<< solution


def train_step(engine: deepspeed.DeepSpeedEngine, rows: torch.Tensor) -> float:
    """One optimizer step on the global batch `rows` [24, 48]; return its mean loss."""
    # >>> solution 2: for each micro-batch of this rank: forward, backward, step; then the mean
    # hint: rows.chunk(ranks)[rank].split(engine.train_micro_batch_size_per_gpu())
    # hint: mean_loss(engine(x), x) is the loss of x; all_reduce the sum of detached losses
    mine = rows.chunk(dist.get_world_size())[dist.get_rank()]
    total = torch.zeros((), device=rows.device)
    for x in mine.split(engine.train_micro_batch_size_per_gpu()):
        loss = mean_loss(engine(x), x)
        engine.backward(loss)
        engine.step()
        total += loss.detach() / engine.gradient_accumulation_steps()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()
    # <<< solution


def losses_of(engine: deepspeed.DeepSpeedEngine, device: torch.device) -> list[float]:
    """The losses of all five batches."""
    return [train_step(engine, rows) for rows in make_batches(device)]


def check_loop(device: torch.device) -> None:
    config = lab_config(0)
    engine = make_engine(config, device)
    losses = losses_of(engine, device)
    assert_losses(losses, TRUE_LOSSES)
    assert engine.global_steps == BATCHES, f"{engine.global_steps} optimizer steps, not 5"
    say(
        f"step 2: stage 0, {engine.micro_steps} micro-batches on a rank,"
        f" {engine.global_steps} optimizer steps, losses {in_row(losses)}"
    )
    engine.destroy()


# %% [markdown]
# ## Step 3: what each rank holds
#
# Between two micro-batches, a rank holds parameters, gradients, and the optimizer's two
# moments. In fp32, 4 bytes a number, that is $4 + 4 + 8 = 16$ bytes per parameter without ZeRO.
# Stage 1 shards the moments, stage 2 the gradients too, stage 3 the parameters too: what is
# sharded is divided by $N$.
#
# And DeepSpeed keeps one thing more. In stages 1 to 3 its optimizer works on a flat **master**
# copy in fp32 of the part which the rank updates. That is what mixed precision needs, in step
# 4. In pure fp32 the copy is made all the same: $4/N$ bytes per parameter that no formula in
# the paper has. Stage 0 in fp32 runs your optimizer on your parameters, without a copy.
#
# The measurement takes no framework's word for it. It asks Python's garbage collector for every
# tensor that was made since a mark, and adds up their storages, each once. What it finds beyond
# the four kinds are buffers of one layer: the reduce bucket in stages 1 and 3 (as large as you
# configured it), and in stages 1 and 2 the last gradient that was reduced.


# %%
def bytes_held(stage: int, ranks: int) -> dict[str, float]:
    """Bytes per parameter that a rank holds in fp32, by kind, without buffers.

    The kinds are "parameters", "gradients", "master" and "moments".
    """
    # >>> solution 3: a dict of the four kinds, each number from stage and ranks
    return {
        "parameters": 4 / ranks if stage == 3 else 4.0,
        "gradients": 4 / ranks if stage >= 2 else 4.0,
        "master": 4 / ranks if stage >= 1 else 0.0,
        "moments": 8 / ranks if stage >= 1 else 8.0,
    }
    # <<< solution


BUFFERS = (0, 2, 1, 1)  # in layers, by stage


def mark() -> None:
    """From here on, `made_since` counts."""
    gc.collect()
    gc.freeze()  # get_objects() leaves out what is frozen


def made_since(but: Sequence[torch.Tensor] = ()) -> int:
    """Bytes of all tensors this process has made since the mark and still holds."""
    gc.collect()
    storages = {}
    for found in gc.get_objects():
        if issubclass(type(found), torch.Tensor):
            for tensor in (found, found.grad if found.is_leaf else None):
                if tensor is not None:
                    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
                    storages[local.untyped_storage().data_ptr()] = local.untyped_storage()
    known = {tensor.untyped_storage().data_ptr() for tensor in but}
    return sum(storage.nbytes() for place, storage in storages.items() if place not in known)


def let_go(done: Callable[[], bool]) -> None:
    """Wait half a second for `done`: gloo's threads drop a collective's buffers a bit late."""
    end = time.monotonic() + 0.5
    while not done() and time.monotonic() < end:
        time.sleep(0.001)


def measured(
    module: nn.Module, step: Callable[[torch.Tensor], float], device: torch.device, holds: float
) -> tuple[list[float], float]:
    """Losses of all batches, and bytes per parameter held at a second micro-batch's start.

    `holds`: bytes per parameter expected, for which to wait until gloo has let go of the rest.
    """
    batches, forwards, found = make_batches(device), 0, 0

    def count(*_: object) -> None:
        nonlocal forwards, found
        forwards += 1
        if forwards == 4:  # the second micro-batch of the second step: the moments are there
            let_go(lambda: made_since(but=batches) < (holds + 0.1) * PSI)
            found = made_since(but=batches)

    hook = module.register_forward_pre_hook(count, prepend=True)
    losses = [step(rows) for rows in batches]
    hook.remove()
    return losses, found / PSI


def measure_engine(
    config: dict, device: torch.device, holds: float
) -> tuple[list[float], float]:
    """Losses of the engine of this configuration, and bytes per parameter it holds."""
    mark()
    engine = make_engine(config, device)
    losses, held = measured(engine.module, lambda rows: train_step(engine, rows), device, holds)
    engine.destroy()
    return losses, held


def measure_against(
    config: dict, parts: dict[str, float], stage: int, element: int, device: torch.device
) -> tuple[list[float], str]:
    """Hold the bytes of an engine to the parts and the buffers; its losses, and the numbers."""
    formula, buffers = sum(parts.values()), BUFFERS[stage] * element / LAYERS
    losses, held = measure_engine(config, device, formula + buffers)
    assert abs(held - formula - buffers) < 0.1, (
        f"stage {stage} holds {held:.2f} bytes per parameter,"
        f" you expect {formula:.2f} and {buffers:.2f} for buffers"
    )
    return losses, f"{formula:7.2f} + {buffers:6.2f}  {f'≈{held:.2f}':>8} bytes"


def check_stages(device: torch.device) -> None:
    n = dist.get_world_size()
    say("step 3: fp32, bytes per parameter  formula  buffers  measured")
    for stage in range(4):
        parts = bytes_held(stage, n)
        losses, told = measure_against(lab_config(stage), parts, stage, 4, device)
        assert_losses(losses, TRUE_LOSSES)
        say(f"        stage {stage:<20} {told}")
    say(f"        losses in all stages {in_row(losses)}")


# %% [markdown]
# ## Step 4: bf16, and the 16 bytes again
#
# `"bf16": {"enabled": true}` makes parameters and gradients bf16, 2 bytes each. Now the fp32
# master copy has a purpose: an update of a thousandth of a weight is lost in bf16, which has
# eight bits of precision. So master and moments stay in fp32, $4 + 8 = 12$ bytes, and without
# ZeRO that is $2 + 2 + 12 = 16$ again: in stage 0, too, there is a master now. With ZeRO, the
# 12 are divided first (stage 1), then the gradients' 2, then the parameters' 2.
#
# In which precision are micro-batches added up? In bf16, unless you say otherwise: the gradient
# that is kept between micro-batches has the parameters' precision. With many micro-batches that
# loses the small ones. `"data_types": {"grad_accum_dtype": "fp32"}` keeps the *sum* in fp32:
# the gradients then take 4 bytes in place of 2. (In stages 2 and 3. Stage 0 refuses it, and for
# stage 1 DeepSpeed takes another optimizer, which keeps both.)
#
# The losses agree with those of fp32 to about a hundredth, but for stage 0. Its wrapper takes a
# step with zero gradients when it is built, to have the moments allocated, and AdamW counts
# that step: its correction for young moments then makes the first real update about a quarter
# smaller. The check allows for that. In a comparison of your own, do not blame the precision.
#
# Both keys belong at the top of the configuration. Do not change the dict you get, return
# another one: configurations are shared.


# %%
def in_bf16(config: dict, fp32_sum: bool = False) -> dict:
    """The configuration in bf16; with gradients summed in fp32, if asked for."""
    # >>> solution 4: a copy of config with bf16, and with data_types if fp32_sum
    new = config | {"bf16": {"enabled": True}}
    if fp32_sum:
        new["data_types"] = {"grad_accum_dtype": "fp32"}
    return new
    # <<< solution


def bytes_held_bf16(stage: int, ranks: int, fp32_sum: bool = False) -> dict[str, float]:
    """Bytes per parameter that a rank holds in bf16, by kind, as `bytes_held`.

    With `fp32_sum` only for stages 2 and 3.
    """
    # >>> solution 4: the same four kinds; the master has a purpose in every stage
    gradients = 4 if fp32_sum else 2
    return {
        "parameters": 2 / ranks if stage == 3 else 2.0,
        "gradients": gradients / ranks if stage >= 2 else float(gradients),
        "master": 4 / ranks if stage >= 1 else 4.0,
        "moments": 8 / ranks if stage >= 1 else 8.0,
    }
    # <<< solution


def check_bf16(device: torch.device) -> None:
    n = dist.get_world_size()
    say("step 4: bf16, bytes per parameter  formula  buffers  measured")
    cases = [(0, False), (1, False), (2, False), (3, False), (2, True), (3, True)]
    for stage, fp32_sum in cases:
        config = lab_config(stage)
        before = json.dumps(config)
        parts = bytes_held_bf16(stage, n, fp32_sum)
        losses, told = measure_against(in_bf16(config, fp32_sum), parts, stage, 2, device)
        assert json.dumps(config) == before, "in_bf16 changed the configuration it was given"
        assert_losses(losses, TRUE_LOSSES, 2e-2 if stage else 8e-2)
        how = f"{stage}, fp32 sums" if fp32_sum else stage
        say(f"        stage {how:<20} {told}, last loss ≈{losses[-1]:.2f}")


# %% [markdown]
# ## Step 5: what each rank sends
#
# Memory is half of the bargain, traffic the other. Of a buffer of $S$ bytes, each of $N$ ranks
# sends, by a bandwidth-optimal algorithm and on average over the ranks,
#
# - in a **reduce-scatter**: $(N-1)/N \cdot S$, every chunk passing every other rank once;
# - in an **all-gather** of $S$ bytes in all: as much;
# - in an **all-reduce**, which is the one and then the other: twice as much;
# - in a **reduce** to one rank: as much as in a reduce-scatter (each of the others sends $S$
#   once).
#
# ZeRO's paper has $2\Psi$ for stages 1 and 2 (a reduce-scatter of gradients, an all-gather of
# parameters), and $3\Psi$ for stage 3 (parameters gathered for forward and again for backward).
# DeepSpeed 0.19 does not do either by default:
#
# - Stages 1 and 2 *all-reduce* each bucket and keep their part: $3\Psi$. For many ranks and
#   small models that is fewer, larger messages. `"use_multi_rank_bucket_allreduce": false`
#   makes it reduce each part to its owner.
# - Stage 3 does not free a parameter after forward if it is used again soon: within the next
#   `stage3_max_reuse_distance` elements, and as long as no more than
#   `stage3_max_live_parameters` are whole. Both are one billion by default. This model is used
#   again so soon that it stays whole from forward to backward: $2\Psi$, and no memory saved at
#   the peak. Set both to 0.
#
# And in stages 2 and 3 each *micro-batch* pays: there is nowhere to keep whole gradients.


# %%
def bytes_sent(kind: str, size: int, ranks: int) -> float:
    """Bytes each rank sends, on average, in one collective over a buffer of `size` bytes.

    `kind`: "all-reduce", "all-gather", "reduce-scatter" or "reduce". `size` is that of the
    whole buffer: what an all-gather puts out, what a reduce-scatter takes in.
    """
    # >>> solution 5: one formula, and twice that for one of the kinds
    once = (ranks - 1) / ranks * size
    return 2 * once if kind == "all-reduce" else once
    # <<< solution


def as_in_the_paper(config: dict) -> dict:
    """The configuration whose traffic is that of ZeRO's paper, whatever its stage."""
    # >>> solution 5: a copy, with three more keys in its zero_optimization
    # hint: config | {"zero_optimization": config["zero_optimization"] | {…}}
    zero = config["zero_optimization"] | {
        "use_multi_rank_bucket_allreduce": False,
        "stage3_max_reuse_distance": 0,
        "stage3_max_live_parameters": 0,
    }
    return config | {"zero_optimization": zero}
    # <<< solution


# %% [markdown]
# The table counts every collective of one step with $m = 2$ micro-batches, whoever calls it, in
# units of $(N-1)/N \cdot 4\Psi$ bytes. Beside it stands the formula.


# %%
KINDS = {
    "c10d::allreduce_": "all-reduce",
    "c10d::reduce_": "reduce",
    "c10d::_allgather_base_": "all-gather",
    "c10d::allgather_": "all-gather",
    "c10d::_reduce_scatter_base_": "reduce-scatter",
    "c10d::reduce_scatter_": "reduce-scatter",
}


def largest(value: object) -> int:
    """Bytes of a tensor, or of the tensors in a list."""
    if isinstance(value, (list, tuple)):
        return sum(map(largest, value))
    return value.nbytes if isinstance(value, torch.Tensor) else 0


class Traffic(TorchDispatchMode):
    """Within this context, every collective leaves its kind and its size in bytes."""

    def __init__(self):
        super().__init__()
        self.calls: list[tuple[str, int]] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kind = KINDS.get(function.name())
        size = max(map(largest, args), default=0)
        if kind is not None and size > 64:  # norms and losses are single numbers
            self.calls.append((kind, size))
        return function(*args, **(kwargs or {}))

    def in_units(self) -> float:
        """What this rank sent, in units of (N-1)/N of the model's fp32 bytes."""
        n = dist.get_world_size()
        sent = sum(bytes_sent(kind, size, n) for kind, size in self.calls)
        return sent / (bytes_sent("all-gather", 4 * PSI, n) or 1)


def traffic_of(config: dict, device: torch.device) -> Traffic:
    """The collectives of the third step: in stage 3, the first ones record the order."""
    engine, batches = make_engine(config, device), make_batches(device)
    for rows in batches[:2]:
        train_step(engine, rows)
    with Traffic() as traffic:
        train_step(engine, batches[2])
    engine.destroy()
    return traffic


def check_traffic(device: torch.device) -> None:
    n, m = dist.get_world_size(), 2
    formulas = (  # by default, as in the paper
        (2, 2),
        (2 + 1, 1 + 1),
        (2 * m + 1, m + 1),
        (m + m, 2 * m + m),
    )
    say("step 5: sent in a step, × (N-1)/N × 4Ψ bytes")
    say("                    default: formula, counted   paper: formula, counted")
    for stage in range(4):
        row = f"        stage {stage}    "
        for paper in (False, True):
            config = lab_config(stage)
            traffic = traffic_of(as_in_the_paper(config) if paper else config, device)
            formula, counted = formulas[stage][paper] * (n > 1), traffic.in_units()
            how = "as in the paper" if paper else "by default"
            assert abs(counted - formula) < 1e-6, (
                f"stage {stage} {how}: counted {counted:.3f} units, the formula says {formula}"
            )
            row += f"{formula:16} {counted:10.2f}"
        say(row)


# %% [markdown]
# ## Step 6: the optimizer in host memory
#
# 12 of the 16 bytes are touched once per step, by an element-wise update. `offload_optimizer`
# keeps them in the host's memory and runs the update there. In the configuration:
#
# - in `zero_optimization`: `"offload_optimizer": {"device": "cpu", "pin_memory": …}`. Pinned
#   memory is for copies to a GPU; on a machine without one leave it false.
# - at the top: `"zero_force_ds_cpu_optimizer": false`. DeepSpeed otherwise refuses torch's
#   AdamW here, because its own `DeepSpeedCPUAdam`, which is compiled on first use, makes one
#   pass over memory where torch's makes several. On a real machine, use that.
#
# It goes with stages 1, 2 and 3. On a CPU there is nowhere to offload to: what you can prove is
# that DeepSpeed has understood, and that the losses stay.


# %%
def offloaded(config: dict, device: torch.device) -> dict:
    """The configuration with the optimizer and its states in host memory."""
    # >>> solution 6: a copy, with one more key in zero_optimization and one at the top
    zero = config["zero_optimization"] | {
        "offload_optimizer": {"device": "cpu", "pin_memory": torch.device(device).type != "cpu"}
    }
    return config | {"zero_optimization": zero, "zero_force_ds_cpu_optimizer": False}
    # <<< solution


def check_offload(device: torch.device) -> None:
    for stage in (1, 2, 3):
        config = offloaded(lab_config(stage), device)
        assert not unknown_keys(config), f"DeepSpeed ignores {unknown_keys(config)}"
        engine = make_engine(config, device)
        assert engine.zero_use_cpu_optimizer(), "DeepSpeed does not offload the optimizer"
        losses = losses_of(engine, device)
        assert_losses(losses, TRUE_LOSSES)
        states = engine.optimizer.optimizer.state.values()
        where = {t.device.type for state in states for t in state.values() if t.numel() > 1}
        assert where == {"cpu"}, f"the moments are on {where}"
        say(f"step 6: stage {stage}, moments on the {where.pop()}, losses {in_row(losses)}")
        engine.destroy()


# %% [markdown]
# ## Step 7: FSDP2 does the same
#
# Stage 3 and `fully_shard` are the same idea from opposite sides: there the engine owns the
# loop, here you do. `fully_shard(module, mesh=mesh)` makes one unit of a module's parameters,
# which are gathered together before its forward and freed after it. Shard each layer, then the
# whole, so that a layer at a time is whole. Sharding only the whole makes one unit of
# everything: right losses, and a peak as if nothing were sharded.
#
# Then write out what `train_step` left to the engine. Now it is *you* who divides each loss by
# the number of micro-batches (FSDP2 averages over ranks, not over those), who clips, steps and
# zeroes, once per batch.


# %%
def shard(model: nn.Module) -> nn.Module:
    """Shard every layer as a unit of its own, then the model; return the model."""
    mesh = init_device_mesh(next(model.parameters()).device.type, (dist.get_world_size(),))
    # >>> solution 7: fully_shard each of model.layers, then the model
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model
    # <<< solution


def fsdp_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, rows: torch.Tensor, micro: int
) -> float:
    """As `train_step`, without an engine: this rank's rows in micro-batches of `micro`."""
    # >>> solution 7: accumulate over the micro-batches, clip to CLIP, step, zero; the mean loss
    # hint: nn.utils.clip_grad_norm_ knows sharded gradients
    mine = rows.chunk(dist.get_world_size())[dist.get_rank()].split(micro)
    total = torch.zeros((), device=rows.device)
    for x in mine:
        loss = mean_loss(model(x), x) / len(mine)
        loss.backward()
        total += loss.detach()
    nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()
    # <<< solution


def check_fsdp(device: torch.device) -> None:
    n = dist.get_world_size()
    micro = BATCH // (2 * n)
    mark()
    model = shard(build_model(device))
    units = sum(isinstance(module, FSDPModule) for module in model.modules())
    assert units == LAYERS + 1, f"{units} modules are sharded, not {LAYERS + 1}"
    optimizer = build_optimizer(model)
    losses, held = measured(
        model, lambda rows: fsdp_step(model, optimizer, rows, micro), device, 16 / n
    )
    assert_losses(losses, TRUE_LOSSES)
    with Traffic() as traffic:
        fsdp_step(model, optimizer, make_batches(device)[0], micro)
    config = as_in_the_paper(lab_config(3))
    engine_losses, engine_held = measure_engine(config, device, 20 / n + 4 / LAYERS)
    engine_units = traffic_of(config, device).in_units()
    say("step 7: fp32               formula, held per parameter  sent  losses")
    say(
        f"        DeepSpeed stage 3  20/N = {20 / n:5.2f}, {f'≈{engine_held:.2f}':>6} bytes"
        f"     {engine_units:4.2f}  {in_row(engine_losses)}"
    )
    say(
        f"        FSDP2              16/N = {16 / n:5.2f}, {f'≈{held:.2f}':>6} bytes"
        f"     {traffic.in_units():4.2f}  {in_row(losses)}"
    )
    assert abs(held - 16 / n) < 0.1, f"FSDP2 holds {held:.2f} bytes per parameter"


# %% [markdown]
# ## Step 8: save, and come back
#
# `engine.save_checkpoint(folder, client_state={…})` writes, on *every* rank, what that rank
# holds, and a file `latest` with the name of the newest. So all ranks call it: a rank that
# stays away leaves the others waiting. `client_state` is yours: the step to go on from.
#
# `engine.load_checkpoint(folder)` returns a path and the client state. Mind what it does if the
# folder holds no checkpoint: it returns `None` twice, logs a warning, and the job trains on
# from random weights. Raise `FileNotFoundError` yourself.
#
# Two things can be made of the shards without a GPU, and without as many ranks as wrote them:
#
# - `get_fp32_state_dict_from_zero_checkpoint(folder)` (imported above) puts the fp32 master
#   copies together to one state dict of the whole model. (In stage 3 a `state_dict()` of the
#   module holds empty tensors.) It prints its progress: `quietly()` keeps that off the screen.
# - The **universal checkpoint**, one file per parameter and moment, which any number of ranks
#   loads. `to_universal` below converts; a configuration with
#   `"checkpoint": {"load_universal": true}` makes `load_checkpoint` read it, by way of a file
#   `latest_universal`. (A checkpoint of stage 1 or 2 loads in stages 1 and 2, one of stage 3 in
#   stage 3.)


# %%
@contextlib.contextmanager
def quietly():
    """Keep off the screen what is printed in this context."""
    nowhere = io.StringIO()
    with contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        yield


def save(engine: deepspeed.DeepSpeedEngine, folder: str, step: int) -> None:
    """Write a checkpoint from which training goes on at batch number `step`."""
    # >>> solution 8: save_checkpoint on all ranks, with step in the client state
    engine.save_checkpoint(folder, client_state={"step": step})
    # <<< solution


def resume(engine: deepspeed.DeepSpeedEngine, folder: str) -> int:
    """Load the latest checkpoint; return the step to go on with, or raise FileNotFoundError."""
    # >>> solution 8: load_checkpoint, look at the path, return the step
    path, state = engine.load_checkpoint(folder)
    if path is None:
        raise FileNotFoundError(f"there is no checkpoint in {folder}")
    return state["step"]
    # <<< solution


def whole_weights(folder: str) -> dict[str, torch.Tensor]:
    """The fp32 weights of the whole model, from the checkpoint's shards."""
    # >>> solution 8: one call
    with quietly():
        return get_fp32_state_dict_from_zero_checkpoint(folder)
    # <<< solution


def universal(config: dict) -> dict:
    """The configuration whose engine loads universal checkpoints."""
    # >>> solution 8: a copy with one more key at the top
    return config | {"checkpoint": {"load_universal": True}}
    # <<< solution


def to_universal(folder: str) -> None:
    """Convert the latest checkpoint in the folder; all ranks come, the first one works.

    On the command line: python -m deepspeed.checkpoint.ds_to_universal --input_folder …
    """
    if dist.get_rank() == 0:
        from deepspeed.checkpoint import ds_to_universal

        tag = Path(folder, "latest").read_text()
        options = argparse.Namespace(
            input_folder=os.path.join(folder, tag),
            output_folder=os.path.join(folder, "universal"),
            num_extract_workers=1,
            num_merge_workers=1,
            keep_temp_folder=False,
            strict=True,
            inject_missing_state=True,  # this model was not built by Megatron
        )
        with quietly():
            ds_to_universal.main(options)
    dist.barrier()


# %%
SAVED = 3  # batches before the checkpoint


def go_on(engine: deepspeed.DeepSpeedEngine, step: int, device: torch.device) -> list[float]:
    """The losses of the batches from number `step` on."""
    return [train_step(engine, rows) for rows in make_batches(device)[step:]]


def check_checkpoint(device: torch.device, folder: str) -> None:
    """Save after three batches in stage 3 and in stage 2; load in each way."""
    for stage in (3, 2):
        place = os.path.join(folder, f"stage{stage}")
        engine = make_engine(lab_config(stage), device)
        for rows in make_batches(device)[:SAVED]:
            train_step(engine, rows)
        save(engine, place, SAVED)
        dist.barrier()
        with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
            true = [p.detach().cpu().clone() for p in engine.module.parameters()]
        losses = go_on(engine, SAVED, device)
        engine.destroy()

        fresh = make_engine(lab_config(stage), device)
        again = go_on(fresh, resume(fresh, place), device)
        fresh.destroy()
        assert again == losses, f"resumed: {again}, never stopped: {losses}"

        model = Net()
        model.load_state_dict(whole_weights(place))
        found = list(model.parameters())
        assert all(map(torch.equal, found, true)), "the whole weights are not those saved"
        say(
            f"step 8: stage {stage}, saved after batch {SAVED}: losses {in_row(again)} as if"
            " never stopped; whole weights equal bit for bit"
        )

    to_universal(place)
    engine = make_engine(universal(lab_config(1)), device)
    losses = go_on(engine, resume(engine, place), device)
    engine.destroy()
    assert_losses(losses, TRUE_LOSSES[SAVED:])
    say(f"step 8: stage 2's as a universal checkpoint, in stage 1: losses {in_row(losses)}")
    try:
        resume(make_engine(lab_config(2), device), os.path.join(folder, "nothing"))
    except FileNotFoundError:
        pass
    else:
        raise AssertionError("an empty folder was resumed from, and nobody said so")


# %% [markdown]
# ## All steps, and other ranks
#
# Give the program a folder, and it leaves its checkpoints there. Start it again with the same
# folder and another number of ranks: it finds the universal checkpoint, and goes on from that.
#
#     torchrun --nproc-per-node=2 labs/lab05_deepspeed.py saved
#     torchrun --nproc-per-node=3 labs/lab05_deepspeed.py saved


# %%
def main() -> None:
    device = start()
    deepspeed.init_distributed()  # it finds the group, and DeepSpeedConfig then knows N
    folder = sys.argv[1] if len(sys.argv) > 1 else None
    if folder is not None and Path(folder, "stage2", "latest_universal").is_file():
        engine = make_engine(universal(lab_config(2)), device)
        step = resume(engine, os.path.join(folder, "stage2"))
        losses = go_on(engine, step, device)
        assert_losses(losses, TRUE_LOSSES[step:])
        say(f"{dist.get_world_size()} ranks went on at batch {step}: losses {in_row(losses)}")
        return
    check_config()
    check_loop(device)
    check_stages(device)
    check_bf16(device)
    check_traffic(device)
    check_offload(device)
    check_fsdp(device)
    with tempfile.TemporaryDirectory() as own:
        shared = [folder or own]
        dist.broadcast_object_list(shared, device=device)
        check_checkpoint(device, shared[0])
        dist.barrier()
    say(f"all stages, offload and FSDP2 are one process, loss {TRUE_LOSSES[-1]:.4f}")


if __name__ == "__main__":
    main()
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # DeepSpeed keeps its groups in globals of its modules, to the very end

# %% [markdown]
# ## Where to go from here
#
# - Leave `stage3_param_persistence_threshold` out. Which line of step 3 fails, and what does a
#   rank hold now?
# - Set `reduce_bucket_size` to ten layers. What do steps 3 and 5 say: how many collectives, how
#   many bytes, how much memory?
# - Train in stage 2 with 4 micro-batches of half the size. Predict the traffic first.
# - On a GPU with `DeepSpeedCPUAdam`: how much memory does step 6 free, and what does a step
#   cost?
# - `stage3_gather_16bit_weights_on_model_save` and `engine.save_16bit_model`: how does that
#   file differ from `whole_weights`, in size and in its last bits?
