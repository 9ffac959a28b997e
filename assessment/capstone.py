"""Train a GPT over a mesh of processes: pipeline × FSDP2 × tensor parallelism, and survive.

    torchrun --nproc-per-node=4 assessment/capstone.py assessment/capstone.toml

The mesh, the model and all else stand in the configuration; `mesh.pp=2` behind its name changes
one key. On any mesh the losses are those of one process. A rank that dies costs the steps since
the last checkpoint: with --max-restarts=3 torchrun starts all ranks again, and they go on from
it, as a later run on another mesh can. On accelerators if each rank has one, else on the CPU.
"""

import glob
import math
import os
import shutil
import signal
import sys
import time
import tomllib
import unicodedata
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions as Options
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.checkpoint import checkpoint

# dense bf16 products, TFLOP/s by the data sheets; the first name that the device's contains
PEAKS = {"B200": 2250, "H200": 989, "H100 PCIe": 756, "H100": 989, "A100": 312, "4090": 165,
         "MI300X": 1307}  # fmt: skip

FLAT = Options(flatten_optimizer_state_dict=True)  # moments by names of parameters
# of the logits, which nobody changes in place
warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")


@dataclass(frozen=True)
class Config:
    """One run; the sections of the file are laid flat."""

    layers: int
    hidden: int
    heads: int
    sequence: int
    vocabulary: int
    pp: int
    dp: int
    tp: int
    steps: int
    batch: int
    micro: int
    text: str
    lr: float
    warmup: int
    clip: float
    precision: str
    recompute: bool
    compile: bool
    seed: int
    log: int
    folder: str
    every: int
    keep: int

    @property
    def dtype(self) -> torch.dtype:
        """What products are computed in."""
        return {"fp32": torch.float32, "bf16": torch.bfloat16}[self.precision]

    @property
    def micro_batches(self) -> int:
        """How many micro-batches a rank computes in a step."""
        return self.batch // (self.dp * self.micro)


def read_config(path: str, changes: Iterable[str] = ()) -> Config:
    """The configuration of a file, changed by words like `mesh.pp=2`; or the end of the run."""
    try:
        sections = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        for change in changes:
            for section, keys in tomllib.loads(change).items():
                sections.setdefault(section, {}).update(keys)
        flat = {key: value for keys in sections.values() for key, value in keys.items()}
    except (OSError, AttributeError, TypeError, tomllib.TOMLDecodeError) as error:
        refuse(f"{path}: cannot be read with {list(changes)}: {error}")
    if wrong := set(flat) ^ {field.name for field in fields(Config)}:
        refuse(f"{path}: unknown or missing: {', '.join(sorted(wrong))}")
    config = Config(**flat)
    for what in ("pp", "dp", "tp", "batch", "micro", "heads", "keep"):
        if type(flat[what]) is not int or flat[what] < 1:
            refuse(f"{path}: {what} is a whole number from 1 on, not {flat[what]}")
    cuts = {"batch": config.dp * config.micro, "layers": config.pp, "hidden": config.heads}
    cuts |= dict.fromkeys(("heads", "vocabulary", "sequence"), config.tp)
    for what, parts in cuts.items():
        if flat[what] % parts:
            refuse(f"{path}: {what} = {flat[what]} cannot be cut into {parts} equal parts")
    if config.precision not in ("fp32", "bf16"):
        refuse(f"{path}: precision is fp32 or bf16, not {config.precision}")
    if config.text and not glob.glob(config.text, recursive=True):
        refuse(f"{path}: no file here is {config.text}")
    if config.text and config.vocabulary < 256:
        refuse(f"{path}: bytes need a vocabulary of 256, not {config.vocabulary}")
    if config.pp > config.micro_batches:
        refuse(f"{path}: {config.pp} stages need as many micro-batches as that, at least")
    return config


def refuse(sentence: str) -> None:
    """End the run with one sentence from one rank; torchrun then ends the others."""
    if os.environ.get("RANK", "0") != "0":
        time.sleep(60)
    sys.exit(sentence)


@lru_cache
def text(files: str = "") -> torch.Tensor:
    """The ids of a text: the bytes of files, or what every Python has: names of characters."""
    if files:
        found = sorted(glob.glob(files, recursive=True))
        data = bytearray(b"\n".join(Path(each).read_bytes() for each in found))
        return torch.frombuffer(data, dtype=torch.uint8).long()
    names = (unicodedata.ucd_3_2_0.name(chr(code), "") for code in range(0x3000))
    lines = "\n".join(name for name in names if name)
    alphabet = {letter: index for index, letter in enumerate(sorted(set(lines)))}
    return torch.tensor([alphabet[letter] for letter in lines])


class Stream:
    """Global batches without end. Its state is all the randomness there is after the start."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.generator = torch.Generator().manual_seed(config.seed)

    def next(self, replica: int) -> torch.Tensor:
        """The rows of one of `dp` replicas, of the next global batch: [batch / dp, s + 1]."""
        # >>> solution 1: all replicas draw one global batch; each returns rows of its own
        # hint: ids = text(config.text)
        # hint: positions = torch.randint(len(ids) - s - 1, (batch,), generator=...)
        # hint: every replica draws all of them, so that all generators stay equal
        config = self.config
        ids = text(config.text)
        last = len(ids) - config.sequence - 1
        positions = torch.randint(last, (config.batch,), generator=self.generator)
        own = positions.chunk(config.dp)[replica]
        return ids[own[:, None] + torch.arange(config.sequence + 1)]
        # <<< solution


class Attention(nn.Module):
    """Causal attention with rotary positions. It does not know how many of the heads it has."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        h, self.width = config.hidden, config.hidden // config.heads
        self.q, self.k, self.v, self.out = (nn.Linear(h, h, bias=False) for _ in range(4))
        speed = 10_000 ** (-torch.arange(0, self.width, 2) / self.width)
        angle = torch.arange(config.sequence)[:, None] * speed  # [s, width / 2]
        self.register_buffer("turn", torch.stack([angle.cos(), angle.sin()]), persistent=False)

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        """Turn each pair of numbers by an angle that grows with the position."""
        cos, sin = self.turn
        a, b = x.float().chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1).type_as(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [b, s, h]
        q, k, v = (
            layer(x).unflatten(-1, (-1, self.width)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )  # each [b, a / tp, s, width]
        q, k = self.rotate(q), self.rotate(k)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, h: int) -> None:
        super().__init__()
        self.up, self.down = (nn.Linear(*n, bias=False) for n in ((h, 4 * h), (4 * h, h)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    """Attention and MLP; recomputed in backward, if asked, so that only its input is kept."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.recompute = config.recompute
        self.norm1, self.norm2 = nn.LayerNorm(config.hidden), nn.LayerNorm(config.hidden)
        self.attention, self.mlp = Attention(config), MLP(config.hidden)

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [b, s / tp, h]
        if self.recompute:  # inside of FSDP's hooks: a block is gathered once for backward
            return checkpoint(self.compute, x, use_reentrant=False)
        return self.compute(x)


class GPT(nn.Module):
    """A stage of the model. Layers are named by their number in the whole model."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding: nn.Module | None = None  # on the first stage
        self.blocks = nn.ModuleDict()
        self.norm: nn.Module | None = None  # both on the last stage
        self.head: nn.Module | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.embedding is not None:
            x = self.embedding(x)  # [b, s] -> [b, s / tp, h]
        for block in self.blocks.values():
            x = block(x)
        if self.head is not None:
            x = self.head(self.norm(x))  # [b, s / tp, h] -> [b, s, v]
        return x


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The mean loss over all positions, in fp32."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


# --- the mesh -----------------------------------------------------------------------------


def make_mesh(config: Config, device_type: str) -> DeviceMesh:
    """Lay the ranks out as pp × dp × tp; ranks of one tp group are neighbours."""
    # >>> solution 2: a mesh with the dimensions pp, dp and tp, in this order
    # hint: init_device_mesh; the last dimension changes fastest
    sizes = (config.pp, config.dp, config.tp)
    return init_device_mesh(device_type, sizes, mesh_dim_names=("pp", "dp", "tp"))
    # <<< solution


def layers_of_stage(config: Config, stage: int) -> range:
    """The numbers of the layers that a stage of the pipeline holds."""
    # >>> solution 6: equal runs of neighbouring layers
    each = config.layers // config.pp
    return range(stage * each, (stage + 1) * each)
    # <<< solution


def cut(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Cut a block, an embedding or a head over the tp dimension, in place.

    Between the blocks each rank has its share of the positions: [b, s / tp, h].
    """
    if mesh["tp"].size() == 1:
        return module
    # >>> solution 3: plans for a Block, and for embedding, norm and head of a GPT
    # hint: SequenceParallel for norms; PrepareModuleInput gathers positions for what follows
    # hint: q, k, v and up by columns; out and down by rows, with output_layouts=Shard(1)
    # hint: the embedding by rows, from Replicate() to Shard(1); the head by columns, back
    layouts = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
    gathered = PrepareModuleInput(**layouts)
    if isinstance(module, Block):
        plan = {"attention": gathered, "mlp": gathered}
        plan |= {name: SequenceParallel() for name in ("norm1", "norm2")}
        columns, rows = [f"attention.{name}" for name in "qkv"], ["attention.out", "mlp.down"]
        plan |= {name: ColwiseParallel() for name in (*columns, "mlp.up")}
        plan |= {name: RowwiseParallel(output_layouts=Shard(1)) for name in rows}
    else:
        ends = {"input_layouts": Replicate(), "output_layouts": Shard(1)}
        plan = {"embedding": RowwiseParallel(**ends), "norm": SequenceParallel()}
        ends = {"input_layouts": Shard(1), "output_layouts": Replicate()}
        plan["head"] = ColwiseParallel(**ends)
        plan = {name: style for name, style in plan.items() if getattr(module, name)}
    return parallelize_module(module, mesh["tp"], plan)
    # <<< solution


def shard(module: nn.Module, config: Config, mesh: DeviceMesh) -> nn.Module:
    """Shard a module's parameters over the dp dimension, in place, as one unit."""
    # >>> solution 4: fully_shard over dp, with the run's precision, reducing in fp32
    # hint: MixedPrecisionPolicy; the mesh of one dimension is mesh["dp"]
    policy = MixedPrecisionPolicy(param_dtype=config.dtype, reduce_dtype=torch.float32)
    return fully_shard(module, mesh=mesh["dp"], mp_policy=policy)
    # <<< solution


def build(config: Config, mesh: DeviceMesh, device: torch.device) -> GPT:
    """This rank's part of the model. No rank ever holds more than one block whole.

    A block's first values depend on the seed and on its number, and not on the mesh.
    """

    def fresh(make: Callable[[], nn.Module], number: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed * 10_000 + number)
            module = make()
            for parameter in module.parameters():
                if parameter.dim() > 1:
                    nn.init.normal_(parameter, std=0.02)
        return module.to(device)

    h, stage = config.hidden, mesh["pp"].get_local_rank()
    model = GPT()
    for number in layers_of_stage(config, stage):
        block = cut(fresh(lambda: Block(config), number), mesh)
        if config.compile:
            block.compile()
        model.blocks[str(number)] = shard(block, config, mesh)
    if stage == 0:
        model.embedding = fresh(lambda: nn.Embedding(config.vocabulary, h), 9_998)
    if stage == config.pp - 1:
        model.norm = nn.LayerNorm(h).to(device)
        model.head = fresh(lambda: nn.Linear(h, config.vocabulary, bias=False), 9_999)
    return shard(cut(model, mesh), config, mesh)


def accumulate(config: Config, model: GPT, rows: torch.Tensor) -> torch.Tensor:
    """Forward and backward of all micro-batches, without a pipeline; the mean loss of `rows`.

    Gradients are reduced over dp after each micro-batch: no rank ever holds them whole.
    """
    # >>> solution 5: the gradients of the mean over all of this replica's rows
    # hint: rows.split(config.micro); inputs are all but the last column, targets all but the
    # hint: first; FSDP divides by dp, and you divide by the number of micro-batches
    total = torch.zeros((), device=rows.device)
    for part in rows.split(config.micro):
        loss = loss_of(model(part[:, :-1]), part[:, 1:]) / config.micro_batches
        loss.backward()
        total += loss.detach()
    return total
    # <<< solution


def make_schedule(config: Config, model: GPT, mesh: DeviceMesh, device: torch.device):
    """One forward, one backward, over the stages of the pp dimension."""
    # >>> solution 6: a PipelineStage of this rank's part, under Schedule1F1B
    # hint: group=mesh["pp"].get_group(); the schedule divides by the number of micro-batches
    number, group = mesh["pp"].get_local_rank(), mesh["pp"].get_group()
    stage = PipelineStage(model, number, config.pp, device, group=group)
    return Schedule1F1B(stage, config.micro_batches, loss_fn=loss_of)
    # <<< solution


def run_pipeline(
    config: Config, schedule: Schedule1F1B, rows: torch.Tensor, stage: int
) -> torch.Tensor:
    """Forward and backward of all micro-batches; the mean loss of `rows`, 0 but on the last."""
    losses: list[torch.Tensor] = []  # of the micro-batches, on the last stage
    inputs = (rows[:, :-1].contiguous(),) if stage == 0 else ()  # as torch 2.11 asks
    target = rows[:, 1:] if stage == config.pp - 1 else None
    schedule.step(*inputs, target=target, losses=losses, return_outputs=False)
    return torch.stack(losses or [torch.zeros((), device=rows.device)]).mean().detach()


def clip(config: Config, model: GPT) -> torch.Tensor:
    """Scale all gradients so that their norm is `config.clip` at most; return the norm."""
    # >>> solution 5: the norm over all shards of all stages, the same on every rank
    # hint: p.grad.to_local() is this rank's shard; p.placements tell what it is a copy of
    # hint: squares can be added up over all ranks, if what c ranks hold counts 1/c on each
    parameters = list(model.parameters())
    shards = [p.grad.to_local() for p in parameters]
    square = torch.zeros((), device=shards[0].device)
    for p, own in zip(parameters, torch._foreach_norm(shards), strict=True):
        sizes = zip(p.placements, p.device_mesh.shape, strict=True)
        square += own**2 / math.prod(n for where, n in sizes if where.is_replicate())
    dist.all_reduce(square)
    norm = square.sqrt()
    torch._foreach_mul_(shards, (config.clip / (norm + 1e-6)).clamp(max=1))
    return norm
    # <<< solution


def rate(config: Config, step: int) -> float:
    """The learning rate of a step, counted from 1: a warm-up, then half a cosine to a tenth."""
    if step <= config.warmup:
        return config.lr * step / config.warmup
    done = (step - config.warmup) / max(1, config.steps - config.warmup)
    return config.lr * (0.55 + 0.45 * math.cos(math.pi * min(1.0, done)))


def budget(config: Config, stage: int) -> dict[str, int]:
    """Bytes that a rank of this stage may need at most, by what they are for."""
    # >>> solution 7: bytes of state, gathered, kept, block and logits, by formulas
    # hint: state: 16 bytes for each parameter of this rank, that is cut by dp, and by tp if
    # hint: it is no norm. gathered: weights and gradients of the units that are whole at once
    # hint: kept: inputs of blocks, for as many micro-batches as are live in 1F1B
    h, v, s, b = config.hidden, config.vocabulary, config.sequence, config.micro
    item, layers = config.dtype.itemsize, len(layers_of_stage(config, stage))
    first, last = stage == 0, stage == config.pp - 1
    block = 12 * h * h // config.tp + 4 * h
    ends = (first + last) * v * h // config.tp + 2 * h * last
    state = 16 * (layers * block + ends) // config.dp
    # without a pipeline two blocks at once, and the ends; with it all, for the whole step
    whole = (min(2, layers) if config.pp == 1 else layers) * block + ends
    gathered = whole * (2 * item + 4)  # weight and gradient, and the gradient to be reduced
    live = min(config.micro_batches, config.pp - stage) if config.pp > 1 else 1
    stream = b * s * h // config.tp  # the residual stream of one micro-batch
    per_block = 1 if config.recompute else 24 + 4 * config.tp
    kept = live * layers * stream * per_block * item
    # one block as backward has it, and gradients of the same shapes
    working = 2 * (24 + 4 * config.tp) * stream * item
    logits = 4 * b * s * v * 4 * last
    parts = {"state": state, "gathered": gathered, "kept": kept, "block": working}
    return parts | {"logits": logits}
    # <<< solution


def training_state(model: GPT, optimizer: torch.optim.Optimizer, stream: Stream, step: int):
    """All that a run needs to go on, by names that do not depend on the mesh."""
    parameters, moments = get_state_dict(model, optimizer, options=FLAT)
    state = {"model": parameters, "optimizer": moments, "step": torch.tensor(step)}
    return state | {"stream": stream.generator.get_state()}


def save(config: Config, state: dict) -> None:
    """Write a checkpoint so that at every moment the newest complete one can be found."""
    # >>> solution 8: write beside, give it its name when all ranks have written, drop old ones
    # hint: dcp.save returns when all ranks have written; a rename is one operation
    root, step = Path(config.folder), int(state["step"])
    unfinished, finished = root / f"step-{step}.unfinished", root / f"step-{step}"
    dcp.save(state, checkpoint_id=unfinished)
    if dist.get_rank() == 0:
        shutil.rmtree(finished, ignore_errors=True)  # of a life that was resumed before it
        unfinished.rename(finished)
        for old in complete(config)[: -config.keep]:
            shutil.rmtree(root / f"step-{old}")
    dist.barrier()  # nobody goes on before the checkpoint has its name
    # <<< solution


def complete(config: Config) -> list[int]:
    """The steps of the complete checkpoints, oldest first."""
    # >>> solution 8: those which have their final name
    names = [path.name for path in Path(config.folder).glob("step-*")]
    return sorted(int(name[5:]) for name in names if name[5:].isdecimal())
    # <<< solution


def load(config: Config, model: GPT, optimizer: torch.optim.Optimizer, stream: Stream) -> int:
    """Go back to the newest complete checkpoint; return its step, 0 if there is none."""
    # >>> solution 9: parameters, moments, the stream's generator and the step
    # hint: dcp.load fills a state dict of the right shapes; set_state_dict puts it to use
    # hint: rank 0 says which checkpoint, so that all ranks take the same
    steps = [max(complete(config), default=0)]
    dist.broadcast_object_list(steps, src=0)
    if not steps[0]:
        return 0
    state = training_state(model, optimizer, stream, 0)
    dcp.load(state, checkpoint_id=Path(config.folder) / f"step-{steps[0]}")
    set_state_dict(
        model, optimizer, model_state_dict=state["model"],
        optim_state_dict=state["optimizer"], options=FLAT,
    )  # fmt: skip
    stream.generator.set_state(state["stream"])
    return int(state["step"])
    # <<< solution


def flops_per_token(config: Config) -> int:
    """Forward and backward: 6 for each weight of a matrix, and attention's two products."""
    matrices = config.layers * 12 * config.hidden**2 + config.hidden * config.vocabulary
    return 6 * matrices + 12 * config.layers * config.hidden * config.sequence


def peak_flops(device: torch.device) -> float:
    """FLOP/s of all ranks together: from the data sheet, else measured, all at once."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    for peak in [peak for known, peak in PEAKS.items() if known in name]:
        return peak * 1e12 * dist.get_world_size()
    n, rounds = 384 if device.type == "cpu" else 4096, 8
    a = torch.randn(n, n, device=device, dtype=None if device.type == "cpu" else torch.bfloat16)
    a @ a
    dist.barrier()
    start = now(device)
    for _ in range(rounds):
        a @ a
    own = torch.tensor(rounds * 2 * n**3 / (now(device) - start), device=device)
    dist.all_reduce(own)
    return own.item()


def now(device: torch.device) -> float:
    """Seconds on a clock, when the device has done all that it was given."""
    device.type == "cpu" or torch.accelerator.synchronize()
    return time.perf_counter()


def train(
    config: Config, device: torch.device, say: Callable[[str], None]
) -> list[list[float]]:
    """Train to the last step from wherever the checkpoints are; [step, loss, norm] of each."""
    mesh = make_mesh(config, device.type)
    stage, replica = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()
    model = build(config, mesh, device)
    adam = {"lr": config.lr, "betas": (0.9, 0.95), "fused": True}
    optimizer = torch.optim.AdamW(model.parameters(), **adam)
    stream = Stream(config)
    step = load(config, model, optimizer, stream)
    begin = f"resumed after step {step}" if step else "from the start"
    shape = " × ".join(map(str, mesh.shape))
    say(f"mesh pp × dp × tp = {shape} on {device.type}, {begin}")
    say(f"{flops_per_token(config):,} FLOPs a token")
    schedule = make_schedule(config, model, mesh, device) if config.pp > 1 else None
    peak, history = peak_flops(device) if config.log else 0.0, []
    tokens = config.batch * config.sequence * config.log
    start = now(device)
    while step < config.steps:
        step += 1
        for group in optimizer.param_groups:
            group["lr"] = rate(config, step)
        rows = stream.next(replica).to(device, non_blocking=True)
        if schedule is None:
            loss = accumulate(config, model, rows)
        else:
            loss = run_pipeline(config, schedule, rows, stage)
        norm = clip(config, model)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss)  # stages but the last add 0; ranks of a tp group have the same
        history.append([step, loss / (config.dp * config.tp), norm])
        if config.log and step % config.log == 0:
            took = now(device) - start
            speed, mfu = tokens / took, flops_per_token(config) * tokens / took / peak
            line = f"step {step:4}/{config.steps}  loss {history[-1][1]:.2f}  norm {norm:.2f}"
            say(f"{line}  ≈{speed:,.0f} tokens/s  MFU ≈{mfu:.1%}")
            start = now(device)
        if config.every and step % config.every == 0:
            save(config, training_state(model, optimizer, stream, step))
            start = now(device)
    return [[step, float(loss), float(norm)] for step, loss, norm in history]


def join() -> torch.device:
    """Join the process group: one accelerator per local rank where there are enough."""
    # the agent's store outlives a life, and has the addresses of the dead: each life its own
    life = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    own = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" and os.environ["RANK"] == "0"
    store = dist.PrefixStore(f"life {life}", dist.TCPStore(address, port, is_master=own))
    group = {"store": store, "rank": int(os.environ["RANK"]),
             "world_size": int(os.environ["WORLD_SIZE"])}  # fmt: skip
    local_rank, local_world = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if torch.accelerator.is_available() and torch.accelerator.device_count() >= local_world:
        device = torch.device(torch.accelerator.current_accelerator().type, local_rank)
        torch.accelerator.set_device_index(local_rank)
        dist.init_process_group(device_id=device, **group)
    else:
        device = torch.device("cpu")
        torch.set_num_threads(1)
        dist.init_process_group("gloo", **group)
    return device


def main() -> None:
    words = [word for word in sys.argv[1:] if not word.startswith("--die=")]
    if not words or "LOCAL_RANK" not in os.environ:
        refuse("start me with: torchrun --nproc-per-node=4 capstone.py capstone.toml")
    config = read_config(words[0], words[1:])
    if (ranks := config.pp * config.dp * config.tp) != int(os.environ["WORLD_SIZE"]):
        refuse(f"the mesh has {ranks} ranks: start as many")
    device, life = join(), int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    rank = dist.get_rank()
    for rest in Path(config.folder).glob("*.unfinished") if rank == 0 else ():
        shutil.rmtree(rest)  # what a life that was killed while saving has left
    dist.barrier()
    for word in set(sys.argv[1:]) - set(words):  # --die=7:1: in step 7, rank 1
        life or die(*map(int, word.removeprefix("--die=").split(":")))
    say = (lambda line: print(line, flush=True)) if rank == 0 else (lambda line: None)
    if life:
        say(f"life {life}: a rank died, all ranks were started again")
    say(f"{len(train(config, device, say))} steps in this life, {config.steps} in all")


def die(step: int, rank: int) -> None:
    """In place of a failing machine: a rank is killed between backward and update."""
    steps = iter(range(1, step + 1))

    def before_update(*_: object) -> None:
        if next(steps, step) == step and dist.get_rank() == rank:
            os.kill(os.getpid(), signal.SIGKILL)

    register_optimizer_step_pre_hook(before_update)


if __name__ == "__main__":
    try:
        main()
    except NotImplementedError as blank:
        os.environ["RANK"] == "0" and print(f"a blank: {blank}", flush=True)
        os._exit(1)
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # DTensor's caches hold the mesh, which holds the group, to the very end
