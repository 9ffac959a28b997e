# %% [markdown]
# # Lab 05: ZeRO with DeepSpeed
#
# DeepSpeed takes a model, an optimizer and a configuration, and returns an **engine**. The
# engine owns backward, the optimizer step, accumulation and clipping. One number in the
# configuration decides what is sharded. This is easy to use, but it is also dangerous:
# DeepSpeed often accepts a key in a wrong place without an error, and then the job trains in
# a different way than you intended.
#
# In this lab you write the configuration of all four stages, of bf16 and of offload. You
# predict what each rank keeps and sends, and you measure both. FSDP2 trains the same model
# for comparison. All losses must equal those of one process.
#
# You can run the finished lab on the CPU, or with one GPU per process. The number of ranks
# must be 1, 2, 3, 4 or 6. The lab needs `pip install deepspeed` (version 0.19), and nothing
# is compiled:
#
#     torchrun --nproc-per-node=2 labs/lab05_deepspeed.py
#
# To solve the lab yourself, create a copy with blanks, run the copy, and have it graded:
#
#     python labs/start.py 05                           # creates my_labs/lab05_deepspeed.py
#     torchrun --nproc-per-node=2 my_labs/lab05_deepspeed.py
#     python labs/check.py my_labs/lab05_deepspeed.py   # grades it with 1, 2 and 3 ranks
#
# With `--step 2`, `check.py` grades only step 2. With `--output`, it also shows what the
# failing ranks printed. You need a clone of the repository and its Python environment. The
# command `make test WHAT=labs` creates the environment, and you need it only once. The
# command `source .venv/bin/activate` makes `torchrun` available in your shell.
#
# Each of the eight steps has a text, one or more blanks for you to fill, and a check. The
# check prints what it has proved. Your copy runs up to the first blank, and there it prints
# one line that says what is missing. The long report below that line comes from `torchrun`,
# and you can ignore it. The checker grades each step with finished versions of the other
# steps, so you can solve the steps in any order.
#
# Plan three hours for the lab. Solve lab 02 first. Read the page "DeepSpeed" of chapter 04 up
# to the end of the section "DeepSpeed: the same idea, as an engine".

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
    """Print `text` on rank 0 only."""
    if os.environ.get("RANK", "0") == "0":
        print(text, flush=True)


def stop_kindly(kind: type[BaseException], error: BaseException, trace) -> None:
    """At a blank or a failed check, print one sentence on rank 0 instead of a traceback."""
    blank = issubclass(kind, NotImplementedError)  # if so, every rank stops at a blank
    if not (blank or issubclass(kind, AssertionError) or kind.__module__ == __name__):
        return sys.__excepthook__(kind, error, trace)
    own = [frame for frame in traceback.extract_tb(trace) if frame.filename == __file__]
    checks = [frame for frame in own if frame.name.startswith(("<module>", "main", "check_"))]
    line = getattr(error, "line", (own if blank else checks)[-1].lineno)
    if os.environ.get("RANK", "0") != "0":
        # rank 0 prints first, and its launcher then ends the other ranks
        time.sleep(60 if blank or os.environ.get("GROUP_RANK", "0") != "0" else 5)
    what = "a blank" if blank else "a check that failed"
    print(f"{Path(__file__).name}, line {line}, {what}: {error}", flush=True)


def refuse(sentence: str) -> None:
    """Exit with one sentence on rank 0; torchrun then ends the other ranks."""
    if os.environ.get("RANK", "0") != "0":
        time.sleep(60)
    sys.exit(sentence)


if __name__ == "__main__":
    if "LOCAL_RANK" not in os.environ or len(sys.argv) > 2:
        sys.exit(
            "start this program with: torchrun --nproc-per-node=2 lab05_deepspeed.py [FOLDER]"
        )
    if os.environ["WORLD_SIZE"] not in ("1", "2", "3", "4", "6"):
        refuse("start 1, 2, 3, 4 or 6 ranks, which must divide 24 rows and 12 layers")
    sys.excepthook = stop_kindly

# DeepSpeed logs to stdout, with the date. It chooses an accelerator when it is imported.
logging.disable(logging.WARNING)
warnings.simplefilter("ignore")
if torch.accelerator.device_count() < int(os.environ.get("LOCAL_WORLD_SIZE", 1)):
    os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_SIZE": "1"} | os.environ
    # DeepSpeed uses the GPU with the number LOCAL_RANK, so its ranks cannot share a GPU.
    os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "0"

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
# the file and calls your functions. So put your own code inside functions or inside such
# cells.
#
# ## The reference: one process with the whole batch
#
# The model has twelve layers of 48 × 48 numbers and no biases. In total it has $\Psi =
# 27\,648$ parameters. The ranks divide these numbers evenly, so the formulas are exact. There
# are five batches of 24 rows, and the model learns to make each row symmetric. One process
# trains on these batches with AdamW, and clips the gradient to a norm of 0.75. The first
# three gradients are longer than that, so clipping changes them. Every engine in this lab
# must reach the same five losses.

# %%
WIDTH, LAYERS = 48, 12
PSI = LAYERS * WIDTH * WIDTH
BATCH, BATCHES = 24, 5
LEARNING_RATE, CLIP = 1e-2, 0.75


class Net(nn.Module):
    """Compute rows [b, 48] from rows [b, 48], in the precision of the parameters."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(self.layers[0].weight.dtype)
        for layer in self.layers:
            x = x + torch.tanh(layer(x)) / 2
        return x.float()


def build_model(device: torch.device | str = "cpu") -> Net:
    """Return the model, with equal parameters on all ranks."""
    torch.manual_seed(5)
    return Net().to(device)


def build_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)


def make_batches(device: torch.device | str = "cpu") -> list[torch.Tensor]:
    """Return five batches of rows [24, 48], equal on all ranks."""
    generator = torch.Generator().manual_seed(5)
    return list(torch.randn(BATCHES, BATCH, WIDTH, generator=generator).to(device))


def mean_loss(output: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return the mean squared distance between the output and the symmetric rows."""
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
    """Raise an AssertionError that shows both lists of losses, unless they agree."""
    what = f"the losses are {in_row(ours, 6)}, but one process has {in_row(true, 6)}"
    assert len(ours) == len(true), what
    torch.testing.assert_close(
        torch.tensor(ours), torch.tensor(true), rtol=wide, atol=0.0, msg=what
    )


if __name__ == "__main__":
    TRUE_LOSSES = train_alone()
    say(f"one process with the whole batch: losses {in_row(TRUE_LOSSES)}")

# %% [markdown]
# ## Step 1: a configuration, and who checks it
#
# Three numbers must agree. The **global batch** is the micro-batch of one forward, times the
# number of micro-batches that are accumulated before a step, times the number of ranks:
#
#     train_batch_size
#     = train_micro_batch_size_per_gpu × gradient_accumulation_steps × ranks
#
# The global batch is given, because it decides what the model learns. The micro-batch is
# given, because the memory limits it. The number of ranks $N$ is given by the cluster. From
# these numbers you compute the number of accumulated micro-batches, if the division has no
# remainder. If it has a remainder, raise an error. A batch that is silently rounded would be
# a different experiment.
#
# These keys belong to the top level of the configuration, and so does `gradient_clipping`,
# which is `CLIP` here. The keys of sharding belong to a block with the name
# `zero_optimization`:
#
# - `stage`: 0, 1, 2 or 3.
# - `reduce_bucket_size`: the number of *elements* that are reduced together. DeepSpeed keeps
#   a buffer of this size. Use the size of one layer, `WIDTH * WIDTH`. The default is 500
#   million.
# - `stage3_prefetch_bucket_size`: the number of elements that are gathered before they are
#   used. Use the size of one layer again.
# - `stage3_param_persistence_threshold`: tensors with at most this number of elements stay
#   whole on every rank. The default is 100,000. Every layer of this model is smaller, so
#   stage 3 would shard nothing. Set it to 0.
#
# Who checks the configuration? DeepSpeed checks the names of the keys *inside*
# `zero_optimization`. It does not check the names at the top level. If you write
# `gradient_cliping`, DeepSpeed clips to its default of 1.0 and not to your limit. So the
# check below lets DeepSpeed read your configuration, searches for names that DeepSpeed does
# not know, and compares the values that DeepSpeed has understood.


# %%
def make_config(ranks: int, micro: int, batch: int, stage: int) -> dict:
    """Return a configuration for a global batch of `batch` rows in micro-batches of `micro`.

    Raises ValueError if the batch cannot be cut into equal micro-batches on all ranks.
    """
    # >>> solution 1: raise ValueError if the batch cannot be cut, or return the configuration
    # hint: The text names four keys for the top level and four keys for "zero_optimization".
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
    """Return the top-level keys that DeepSpeed does not know, and therefore ignores."""
    known = {value for value in vars(constants).values() if isinstance(value, str)}
    known |= {"zero_optimization", "activation_checkpointing", "aio", "amp", "compile"}
    known |= {"elasticity", "flops_profiler", "tensorboard", "wandb", "csv_monitor", "comet"}
    return [key for key in config if key not in known]


# %%
def init_distributed() -> torch.device:
    """Join the process group: one accelerator per local rank where there are enough.

    With NCCL_MULTI_RANK_GPU_ENABLE=1 (NCCL 2.30 or newer), several ranks share a GPU.
    """
    if "LOCAL_RANK" not in os.environ:
        sys.exit(f"start this program with: torchrun --nproc-per-node=2 {sys.argv[0]}")
    local_rank, local_world = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    count = torch.accelerator.device_count()
    shared = count > 0 and os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
    if (count < local_world and not shared) or torch.backends.mps.is_available():
        if count and torch.version.cuda and local_rank == 0:
            advice = "NCCL_MULTI_RANK_GPU_ENABLE=1 lets ranks share a GPU (NCCL 2.30 or newer)"
            print(f"{local_world} ranks use the CPU and gloo. {advice}", file=sys.stderr)
        dist.init_process_group("gloo")  # on the CPU; mps has no collectives
        return torch.device("cpu")
    device = torch.device(torch.accelerator.current_accelerator().type, local_rank % count)
    torch.accelerator.set_device_index(device.index)
    dist.init_process_group(device_id=device)
    return device


def lab_config(stage: int) -> dict:
    """Return the configuration of most checks: two micro-batches per step on each rank."""
    ranks = dist.get_world_size()
    return make_config(ranks, BATCH // (2 * ranks), BATCH, stage)


def check_config() -> None:
    ranks = dist.get_world_size()
    for stage in range(4):
        config = make_config(ranks, 2, BATCH, stage)
        assert not unknown_keys(config), f"DeepSpeed ignores the keys {unknown_keys(config)}"
        read = DeepSpeedConfig(copy.deepcopy(config))
        three = (
            read.train_micro_batch_size_per_gpu,
            read.gradient_accumulation_steps,
            read.train_batch_size,
        )
        expected = (2, BATCH // (2 * ranks), BATCH)
        assert three == expected, (
            f"micro-batch, accumulation and batch are {three}, not {expected}"
        )
        found = int(read.zero_config.stage)
        assert found == stage, f"DeepSpeed reads stage {found}, not {stage}"
        found = read.gradient_clipping
        assert found == CLIP, f"DeepSpeed clips to a norm of {found}, not {CLIP}"
        found = (read.zero_config.reduce_bucket_size, read.zero_config.prefetch_bucket_size)
        assert found == (WIDTH * WIDTH, WIDTH * WIDTH), f"the buckets have {found} elements"
        found = read.zero_config.param_persistence_threshold
        assert found == 0, f"tensors of up to {found} elements stay whole"
    try:
        make_config(ranks, 5, BATCH, 0)
    except ValueError:
        pass
    else:
        raise AssertionError(f"micro-batches of 5 do not divide {BATCH} rows: raise ValueError")
    micro, accumulation, batch = three
    say(f"step 1: batch {batch} = {micro} rows × {accumulation} micro-batches × {ranks} ranks")
    say("        DeepSpeed reads every key of stages 0 to 3")


# %% [markdown]
# ## Step 2: the loop belongs to the engine
#
# `deepspeed.initialize(model=…, optimizer=…, config=…)` returns four things. The first is the
# engine. Three calls of the engine replace your own calls:
#
# - `engine(x)` replaces `model(x)`. In stage 3 it gathers the parameters, layer by layer.
# - `engine.backward(loss)` replaces `(loss / m).backward()`. The engine *itself* divides the
#   loss by the number $m$ of accumulated micro-batches, and it reduces the gradients.
# - `engine.step()` replaces clipping, `optimizer.step()` and `zero_grad()`. The engine counts
#   the micro-batches. It does this work only in the call for micro-batch number $m$. In all
#   other calls it only counts.
#
# So call `engine.step()` inside the loop, once for every micro-batch. Micro-batch number $m$
# is called the **accumulation boundary**. The engine does not distribute the data. It only
# counts, and it trusts you. Rank $r$ takes part number $r$ of $N$ equal parts of the batch,
# and cuts this part into micro-batches. `engine.train_micro_batch_size_per_gpu()` returns the
# size of a micro-batch, and `engine.gradient_accumulation_steps()` returns the number of
# micro-batches.
#
# The loss of a step is the mean over all rows of the batch, on all ranks. Do not confuse the
# loss that you pass to backward with the loss that you print. AdamW divides a gradient by its
# size, so it hides a wrong factor for a long time. Clipping does not hide it, and other
# optimizers do not hide it. So `check.py` also looks at your calls.


# %%
def make_engine(config: dict, device: torch.device | str = "cpu") -> deepspeed.DeepSpeedEngine:
    """Return the engine for the model and the optimizer of this lab."""
    model = build_model(device)
    # >>> solution 2: build the optimizer, call deepspeed.initialize, and return the engine
    # hint: build_optimizer(model) returns the optimizer.
    optimizer = build_optimizer(model)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return engine
    # <<< solution


def train_step(engine: deepspeed.DeepSpeedEngine, rows: torch.Tensor) -> float:
    """Take one optimizer step on the global batch `rows` [24, 48]; return its mean loss."""
    # >>> solution 2: train on the micro-batches of this rank, and return the mean loss
    # hint: chunk cuts the rows into parts for the ranks. split cuts a part into micro-batches.
    # hint: mean_loss needs the output of the engine and x. Add up the detached losses.
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
    """Return the losses of all five batches."""
    return [train_step(engine, rows) for rows in make_batches(device)]


def check_loop(device: torch.device) -> None:
    config = lab_config(0)
    engine = make_engine(config, device)
    losses = losses_of(engine, device)
    assert_losses(losses, TRUE_LOSSES)
    assert engine.global_steps == BATCHES, f"there were {engine.global_steps} steps, not 5"
    say(
        f"step 2: stage 0, {engine.micro_steps} micro-batches on each rank,"
        f" {engine.global_steps} optimizer steps, losses {in_row(losses)}"
    )
    engine.destroy()


# %% [markdown]
# ## Step 3: what each rank holds
#
# Between two micro-batches, a rank keeps the parameters, the gradients, and the two moments
# of the optimizer. In fp32 each number has 4 bytes. Without ZeRO this is $4 + 4 + 8 = 16$
# bytes per parameter. Stage 1 shards the moments, stage 2 also shards the gradients, and
# stage 3 also shards the parameters. The bytes of a sharded kind are divided by $N$.
#
# DeepSpeed also keeps a fourth kind. In stages 1 to 3, its optimizer works on a flat
# **master** copy in fp32 of the parameters that the rank updates. Mixed precision needs this
# copy, as you will see in step 4. In pure fp32 the copy is also made, and it adds $4/N$ bytes
# per parameter, which the formulas of the paper do not contain. In fp32, stage 0 runs your
# optimizer on your parameters, without a copy.
#
# The measurement does not rely on any framework. It asks Python's garbage collector for every
# tensor that was created after a mark, and it adds up the bytes of their storages. In
# addition to the four kinds it finds buffers, each as large as one layer. Stages 1 and 3 keep
# the reduce bucket, which has the configured size. Stages 1 and 2 keep the last gradient that
# was reduced.


# %%
def bytes_held(stage: int, ranks: int) -> dict[str, float]:
    """Return the bytes per parameter that a rank keeps in fp32, for each kind, without buffers.

    The kinds are "parameters", "gradients", "master" and "moments".
    """
    # >>> solution 3: return a dict of the four kinds; each number depends on stage and ranks
    return {
        "parameters": 4 / ranks if stage == 3 else 4.0,
        "gradients": 4 / ranks if stage >= 2 else 4.0,
        "master": 4 / ranks if stage >= 1 else 0.0,
        "moments": 8 / ranks if stage >= 1 else 8.0,
    }
    # <<< solution


BUFFERS = (0, 2, 1, 1)  # number of layers, for each stage


def mark() -> None:
    """Make `made_since` count only tensors that are created from now on."""
    gc.collect()
    gc.freeze()  # get_objects() leaves out what is frozen


def made_since(but: Sequence[torch.Tensor] = ()) -> int:
    """Return the bytes of all live tensors that this process has created since the mark."""
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
    """Wait up to half a second for `done`: gloo's threads free buffers a moment later."""
    end = time.monotonic() + 0.5
    while not done() and time.monotonic() < end:
        time.sleep(0.001)


def measured(
    module: nn.Module, step: Callable[[torch.Tensor], float], device: torch.device, holds: float
) -> tuple[list[float], float]:
    """Train on all batches. Return the losses, and the bytes per parameter that a rank keeps.

    The bytes are measured when a second micro-batch starts. `holds` is the expected number of
    bytes per parameter: the measurement waits until gloo has freed everything else.
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
    """Train an engine with this configuration. Return its losses and bytes per parameter."""
    mark()
    engine = make_engine(config, device)
    losses, held = measured(engine.module, lambda rows: train_step(engine, rows), device, holds)
    engine.destroy()
    return losses, held


def measure_against(
    config: dict, parts: dict[str, float], stage: int, element: int, device: torch.device
) -> tuple[list[float], str]:
    """Compare the bytes of an engine with the formula; return its losses, and a printed row."""
    formula, buffers = sum(parts.values()), BUFFERS[stage] * element / LAYERS
    losses, held = measure_engine(config, device, formula + buffers)
    assert abs(held - formula - buffers) < 0.1, (
        f"stage {stage} keeps {held:.2f} bytes per parameter, but your formula gives"
        f" {formula:.2f} and the buffers take {buffers:.2f}"
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
# With `"bf16": {"enabled": true}`, parameters and gradients are in bf16, with 2 bytes each.
# Now the fp32 master copy is useful: bf16 has a precision of only eight bits, so an update of
# one thousandth of a weight would be lost. The master copy and the moments stay in fp32, with
# $4 + 8 = 12$ bytes. Without ZeRO the sum is $2 + 2 + 12 = 16$ bytes again, because stage 0
# now has a master copy too. Stage 1 divides the 12 bytes by $N$, stage 2 also divides the 2
# bytes of the gradients, and stage 3 also divides the 2 bytes of the parameters.
#
# In which precision are the gradients of several micro-batches added up? By default in bf16,
# because the gradient that is kept between micro-batches has the precision of the parameters.
# With many micro-batches, such a sum loses small gradients. `"data_types":
# {"grad_accum_dtype": "fp32"}` keeps the *sum* in fp32. A gradient then takes 4 bytes instead
# of 2 bytes. This lab uses it with stages 2 and 3. Stage 0 refuses it. In stage 1, DeepSpeed
# uses a different optimizer wrapper, which keeps both gradients.
#
# The losses agree with those of fp32 to about one hundredth, except in stage 0. The optimizer
# wrapper of stage 0 takes one step with zero gradients when it is created, to allocate the
# moments. AdamW counts this step. Its bias correction then makes the first real
# update about a quarter smaller. The check allows this difference. If you compare runs
# yourself, do not blame the precision for it.
#
# Both keys belong to the top level of the configuration. Do not change the dict that you
# receive, but return a new one, because several functions use the same configuration.


# %%
def in_bf16(config: dict, fp32_sum: bool = False) -> dict:
    """Return the configuration in bf16. With `fp32_sum`, gradients are summed in fp32."""
    # >>> solution 4: return a copy of config with bf16, and with data_types if fp32_sum is true
    new = config | {"bf16": {"enabled": True}}
    if fp32_sum:
        new["data_types"] = {"grad_accum_dtype": "fp32"}
    return new
    # <<< solution


def bytes_held_bf16(stage: int, ranks: int, fp32_sum: bool = False) -> dict[str, float]:
    """Return the bytes per parameter that a rank keeps in bf16, for each kind of `bytes_held`.

    `fp32_sum` is true only in stages 2 and 3.
    """
    # >>> solution 4: return a dict of the four kinds; every stage has a master copy
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
        assert json.dumps(config) == before, "in_bf16 has changed its argument"
        assert_losses(losses, TRUE_LOSSES, 2e-2 if stage else 8e-2)
        how = f"{stage}, sums in fp32" if fp32_sum else stage
        say(f"        stage {how:<20} {told}, last loss ≈{losses[-1]:.2f}")


# %% [markdown]
# ## Step 5: what each rank sends
#
# ZeRO saves memory, and it pays with traffic. Consider a buffer of $S$ bytes and $N$ ranks.
# With an algorithm that sends as few bytes as possible, each rank sends on average
#
# - in a **reduce-scatter**: $(N-1)/N \cdot S$ bytes, because every chunk visits every other
#   rank once;
# - in an **all-gather** that returns $S$ bytes: also $(N-1)/N \cdot S$ bytes;
# - in an **all-reduce**: twice as many bytes, because it is a reduce-scatter followed by an
#   all-gather;
# - in a **reduce** to one rank: $(N-1)/N \cdot S$ bytes, because each of the other $N-1$
#   ranks sends $S$ bytes once.
#
# The ZeRO paper says that stages 1 and 2 send $2\Psi$ elements: a reduce-scatter of the
# gradients and an all-gather of the parameters. Stage 3 sends $3\Psi$ elements, because it
# gathers the parameters for forward and again for backward. By default, DeepSpeed 0.19 sends
# different amounts:
#
# - Stages 1 and 2 *all-reduce* each bucket and keep their own part, so stage 1 sends $3\Psi$
#   elements. The messages are larger, and there are fewer of them. This is good for small
#   models on many ranks. With `"use_multi_rank_bucket_allreduce": false`, DeepSpeed reduces
#   each part to its owner.
# - Stage 3 does not free a parameter after forward if it is used again within the next
#   `stage3_max_reuse_distance` elements. The prefetch also keeps parameters, as long as no
#   more than `stage3_max_live_parameters` elements are gathered. Both limits are one billion
#   by default. This model is so small that every layer stays whole from forward to backward.
#   It then sends only $2\Psi$ elements, and it saves no memory at the peak. Set both limits
#   to 0.
#
# In stages 2 and 3, *every micro-batch* sends its gradients, because no rank keeps whole
# gradients.


# %%
def bytes_sent(kind: str, size: int, ranks: int) -> float:
    """Return the bytes that each rank sends on average in one collective.

    `kind` is "all-reduce", "all-gather", "reduce-scatter" or "reduce". `size` is the number of
    bytes of the whole buffer: the output of an all-gather, or the input of the other kinds.
    """
    # >>> solution 5: return the bytes; one of the four kinds sends twice as many as the others
    once = (ranks - 1) / ranks * size
    return 2 * once if kind == "all-reduce" else once
    # <<< solution


def as_in_the_paper(config: dict) -> dict:
    """Return a configuration that sends the amounts of the ZeRO paper in every stage."""
    # >>> solution 5: return a copy with three more keys in zero_optimization
    # hint: The operator | returns a new dict. Use it for the inner dict and for the outer dict.
    zero = config["zero_optimization"] | {
        "use_multi_rank_bucket_allreduce": False,
        "stage3_max_reuse_distance": 0,
        "stage3_max_live_parameters": 0,
    }
    return config | {"zero_optimization": zero}
    # <<< solution


# %% [markdown]
# The table counts every collective of one step with $m = 2$ micro-batches, in units of
# $(N-1)/N \cdot 4\Psi$ bytes. Next to each count is the number that the formula predicts.


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
    """Return the bytes of a tensor, or the sum of the bytes of all tensors in a list."""
    if isinstance(value, (list, tuple)):
        return sum(map(largest, value))
    return value.nbytes if isinstance(value, torch.Tensor) else 0


class Traffic(TorchDispatchMode):
    """A context that records the kind and the bytes of every collective."""

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
        """Return the bytes that this rank sent, in units of (N-1)/N times 4Ψ bytes."""
        n = dist.get_world_size()
        sent = sum(bytes_sent(kind, size, n) for kind, size in self.calls)
        return sent / (bytes_sent("all-gather", 4 * PSI, n) or 1)


def traffic_of(config: dict, device: torch.device) -> Traffic:
    """Record the collectives of the third step. (In stage 3, two steps record the order.)"""
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
    say("step 5: bytes that a rank sends in a step, in units of (N-1)/N × 4Ψ")
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
# The optimizer uses 12 of the 16 bytes only once per step, in an update that treats each
# element separately. So these bytes do not have to be in GPU memory. `offload_optimizer`
# keeps them in host memory, and the CPU computes the update. The configuration needs two
# keys:
#
# - in `zero_optimization`: `"offload_optimizer": {"device": "cpu", "pin_memory": …}`. Pinned
#   memory makes copies to a GPU faster. Set it to false on a machine without a GPU.
# - at the top level: `"zero_force_ds_cpu_optimizer": false`. Without this key, DeepSpeed
#   refuses torch's AdamW on the CPU. Its own `DeepSpeedCPUAdam` is compiled when it is first
#   used, and it needs one pass over memory, where torch's AdamW needs several. Use it on a
#   real machine.
#
# Offload works in stages 1, 2 and 3. On a CPU, all memory is host memory. There you can only
# prove that DeepSpeed has understood the configuration and that the losses do not change.


# %%
def offloaded(config: dict, device: torch.device) -> dict:
    """Return a configuration with the optimizer and its states in host memory."""
    # >>> solution 6: return a copy with a new key in zero_optimization and one at the top level
    zero = config["zero_optimization"] | {
        "offload_optimizer": {"device": "cpu", "pin_memory": torch.device(device).type != "cpu"}
    }
    return config | {"zero_optimization": zero, "zero_force_ds_cpu_optimizer": False}
    # <<< solution


def check_offload(device: torch.device) -> None:
    for stage in (1, 2, 3):
        config = offloaded(lab_config(stage), device)
        assert not unknown_keys(config), f"DeepSpeed ignores the keys {unknown_keys(config)}"
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
# Stage 3 and `fully_shard` implement the same idea in opposite ways. With DeepSpeed the
# engine owns the loop, and with FSDP2 you own it. `fully_shard(module, mesh=mesh)` makes one
# unit of the parameters of a module. A unit is gathered before its forward and freed after
# it. Shard each layer first, and then the whole model. Then only one layer is whole at a
# time. If you shard only the whole model, all parameters are one unit. The losses are then
# right, but the memory at the peak is as large as without sharding.
#
# After that, write the work that `train_step` left to the engine. Now *you* divide each loss
# by the number of micro-batches, because FSDP2 averages only over the ranks. You also clip,
# step and zero the gradients, once per batch.


# %%
def shard(model: nn.Module) -> nn.Module:
    """Shard every layer as a unit of its own, then the model; return the model."""
    mesh = init_device_mesh(next(model.parameters()).device.type, (dist.get_world_size(),))
    # >>> solution 7: call fully_shard for each of model.layers and then for the model
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model
    # <<< solution


def fsdp_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, rows: torch.Tensor, micro: int
) -> float:
    """Take one step like `train_step`, without an engine, in micro-batches of `micro` rows."""
    # >>> solution 7: accumulate, clip, update and zero the gradients; return the mean loss
    # hint: nn.utils.clip_grad_norm_ works with sharded gradients. The limit is CLIP.
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
    assert units == LAYERS + 1, f"there are {units} units, not {LAYERS + 1}"
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
    say("step 7: fp32               formula, measured bytes      sent  losses")
    say(
        f"        DeepSpeed stage 3  20/N = {20 / n:5.2f}, {f'≈{engine_held:.2f}':>6} bytes"
        f"     {engine_units:4.2f}  {in_row(engine_losses)}"
    )
    say(
        f"        FSDP2              16/N = {16 / n:5.2f}, {f'≈{held:.2f}':>6} bytes"
        f"     {traffic.in_units():4.2f}  {in_row(losses)}"
    )
    assert abs(held - 16 / n) < 0.1, f"FSDP2 keeps {held:.2f} bytes per parameter"


# %% [markdown]
# ## Step 8: save, and come back
#
# `engine.save_checkpoint(folder, client_state={…})` writes the part of *every* rank, and a
# file `latest` with the name of the newest checkpoint. So all ranks must call it. If one rank
# does not call it, the other ranks wait forever. You choose the content of `client_state`.
# Here it is the number of the next step.
#
# `engine.load_checkpoint(folder)` returns a path and the client state. If the folder contains
# no checkpoint, it returns `None` twice and logs a warning. The job would then continue with
# random weights. So raise `FileNotFoundError` yourself.
#
# You can use the shards in two more ways, on a machine without a GPU and with any number of
# ranks:
#
# - `get_fp32_state_dict_from_zero_checkpoint(folder)`, which is imported above, joins the
#   fp32 master copies and returns one state dict of the whole model. (In stage 3,
#   `state_dict()` of the module contains empty tensors.) The function prints its progress,
#   and `quietly()` hides it.
# - A **universal checkpoint** has one file for each parameter and each moment, and any number
#   of ranks can load it. `to_universal` below converts a checkpoint. With `"checkpoint":
#   {"load_universal": true}` in the configuration, `load_checkpoint` reads the universal
#   checkpoint, whose name is in a file `latest_universal`. A checkpoint of stage 1 or 2 can
#   be loaded in stages 1 and 2, and a checkpoint of stage 3 only in stage 3.


# %%
@contextlib.contextmanager
def quietly():
    """Hide everything that is printed in this context."""
    nowhere = io.StringIO()
    with contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        yield


def save(engine: deepspeed.DeepSpeedEngine, folder: str, step: int) -> None:
    """Write a checkpoint from which training continues at batch number `step`."""
    # >>> solution 8: save a checkpoint on all ranks, with step in the client state
    engine.save_checkpoint(folder, client_state={"step": step})
    # <<< solution


def resume(engine: deepspeed.DeepSpeedEngine, folder: str) -> int:
    """Load the latest checkpoint; return the next step, or raise FileNotFoundError."""
    # >>> solution 8: load the checkpoint, check the path, and return the step
    path, state = engine.load_checkpoint(folder)
    if path is None:
        raise FileNotFoundError(f"there is no checkpoint in {folder}")
    return state["step"]
    # <<< solution


def whole_weights(folder: str) -> dict[str, torch.Tensor]:
    """Return the fp32 weights of the whole model, joined from the shards of a checkpoint."""
    # >>> solution 8: return the result of one call, and hide what it prints
    with quietly():
        return get_fp32_state_dict_from_zero_checkpoint(folder)
    # <<< solution


def universal(config: dict) -> dict:
    """Return a configuration whose engine loads universal checkpoints."""
    # >>> solution 8: return a copy with one new key at the top level
    return config | {"checkpoint": {"load_universal": True}}
    # <<< solution


def to_universal(folder: str) -> None:
    """Convert the latest checkpoint in the folder. All ranks call this, and rank 0 converts.

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
    """Return the losses of the batches from number `step` on."""
    return [train_step(engine, rows) for rows in make_batches(device)[step:]]


def check_checkpoint(device: torch.device, folder: str) -> None:
    """Save after three batches in stage 3 and in stage 2, and load in every way."""
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
        assert again == losses, f"the resumed losses are {again}, not {losses}"

        model = Net()
        model.load_state_dict(whole_weights(place))
        found = list(model.parameters())
        assert all(map(torch.equal, found, true)), (
            "whole_weights differs from the weights that were saved"
        )
        say(
            f"step 8: stage {stage}, saved after batch {SAVED}: losses {in_row(again)} and"
            " whole weights are exactly those of a run that was not stopped"
        )

    to_universal(place)
    engine = make_engine(universal(lab_config(1)), device)
    losses = go_on(engine, resume(engine, place), device)
    engine.destroy()
    assert_losses(losses, TRUE_LOSSES[SAVED:])
    say(f"step 8: universal checkpoint of stage 2 in an engine of stage 1: {in_row(losses)}")
    try:
        resume(make_engine(lab_config(2), device), os.path.join(folder, "nothing"))
    except FileNotFoundError:
        pass
    else:
        raise AssertionError("resume raised no error for a folder without a checkpoint")


# %% [markdown]
# ## All steps, and other ranks
#
# If you start the program with the name of a folder, it keeps its checkpoints in this folder.
# Start it again with the same folder and a different number of ranks. It then finds the
# universal checkpoint and continues from there.
#
#     torchrun --nproc-per-node=2 labs/lab05_deepspeed.py saved
#     torchrun --nproc-per-node=3 labs/lab05_deepspeed.py saved


# %%
def main() -> None:
    device = init_distributed()
    deepspeed.init_distributed()  # DeepSpeedConfig then reads N from the existing group
    folder = sys.argv[1] if len(sys.argv) > 1 else None
    if folder is not None and Path(folder, "stage2", "latest_universal").is_file():
        engine = make_engine(universal(lab_config(2)), device)
        step = resume(engine, os.path.join(folder, "stage2"))
        losses = go_on(engine, step, device)
        assert_losses(losses, TRUE_LOSSES[step:])
        say(f"{dist.get_world_size()} ranks continue at batch {step}: losses {in_row(losses)}")
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
    say(f"all stages, offload and FSDP2 equal one process: last loss {TRUE_LOSSES[-1]:.4f}")


if __name__ == "__main__":
    main()
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # DeepSpeed keeps its groups in globals of its modules, to the very end

# %% [markdown]
# ## Where to go from here
#
# - Leave `stage3_param_persistence_threshold` out. Which number of step 3 changes, and what
#   does a rank keep now?
# - Set `reduce_bucket_size` to the size of ten layers. What do steps 3 and 5 print? How do
#   the number of collectives, the bytes and the memory change?
# - Train in stage 2 with 4 micro-batches of half the size. Predict the traffic first.
# - On a GPU, use `DeepSpeedCPUAdam`. How much GPU memory does step 6 free, and how long does
#   a step take?
# - Use `stage3_gather_16bit_weights_on_model_save` and `engine.save_16bit_model`. How does
#   that file differ from `whole_weights`, in its size and in its last bits?
