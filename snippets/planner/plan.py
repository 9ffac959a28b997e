"""Will it fit, how fast, at what price, and what to type: layouts ranked by predicted time.

    python plan.py --model llama-3-70b --gpus 256 --gpu h100 --sequence 8192 --batch 4M

Every layout that the rules allow is timed by step_time.py; from the fastest on, memory.py
replays the stages that may be fullest, until enough layouts are found that fit. If no layout
fits, advice.py lists changes that would help. The constants are fitted to one software
(nanotron) on one machine (H100, 8 to 512 GPUs). `--score FILE.csv` prints how wrong the planner
is there. On any other machine, the result is a guess by the same physics.
"""

import argparse
import csv
import json
import math
import re
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cache
from itertools import product
from pathlib import Path

import advice
import config_json
import post_training
from memory import (
    RECOMPUTED,
    Layout,
    Stage,
    closed_form,
    replay,
    stage_parameters,
    stages,
    with_unseen,
)
from step_time import Gpu, Step, step_time
from traffic import traffic
from transformer import Shape, flops_per_token, parameters

HERE = Path(__file__).resolve().parent
GIB = 2**30
CLOSE, NEAREST = 6, 3  # of so many that nearly fit, by a bound, so many are told of
BETWEEN_FAILURES = (
    54 * 24 * 16_384 / 419
)  # GPU-hours, Llama 3 (Training at scale, "One table …")
STATE = ("optimizer", "gradients", "parameters")  # in the order of ZeRO's stages
MLP_ALONE = [  # torchtitan's settings wrap a block, or every other of its products
    "def mlp_alone(self, block, wrap=FullAC._wrap_block, **names):",
    "    block.feed_forward = wrap(self, block.feed_forward, **names)",
    "    return block",
    "FullAC._wrap_block = mlp_alone",
]


def stop(field: str, sentence: str) -> None:
    sys.exit(f"{field}: {sentence}")


@cache
def table(name: str) -> dict:
    return tomllib.loads((HERE / name).read_text("utf-8"))


CONSTANTS = table("constants.toml")


# --8<-- [start:memory]
def waiting_blocks(shape: Shape, layout: Layout, step: Step, c: dict, node: int) -> float:
    """Gathered activations that a collective may still use when the CPU asks for new ones, on
    the first stage. Forward, each layer scatters two. A CPU that is faster than its GPU is
    ahead by all of a step's, up to a limit; else by two a micro-batch, as the ranks of TP wait
    for their slowest. In a pipeline the last forward before a backward finds room, that of the
    micro-batch to come; and a slower CPU, which waits to receive, is ahead only in the p - 1
    forwards that fill it, unless it is faster in backward, which is two thirds of a GPU's work
    and half of a CPU's.
    """
    if layout.tp == 1 or layout.stalls:
        return 0
    each, m = 2 * stages(shape, layout.pp, layout.cut)[0].layers, layout.micro_batches
    if layout.pp == 1:
        ahead = (each if step.layer_gpu > step.layer_launch else 2) * m
    else:
        ahead = each * max(1, m - 1)
        if step.layer_gpu * 2 / 3 < step.layer_launch / 2 and layout.gpus > node:
            ahead = min(ahead, each * (layout.pp - 2))
    return min(c["in_flight"], ahead)


@dataclass
class Memory:
    first: float  # bytes that rank 0 reserves, as a benchmark would log it
    needed: float  # bytes that a stage cannot do without, at most, which decides
    parts: dict[str, float]  # of the stage that needs most
    stage: int


def fullest(shape: Shape, layout: Layout, sequence: int) -> dict[int, tuple[float, float]]:
    """Reserved and allocated bytes of the first stage, of those with head and loss, and of the
    second where it has more layers than the first, which has the embedding.
    """
    cut = stages(shape, layout.pp, layout.cut)
    ends = {i for i, stage in enumerate(cut) if stage.head or stage.loss}
    some = {0} | ends | ({1} if layout.pp > 1 and cut[1].layers > cut[0].layers else set())
    return {i: replay(shape, layout, sequence, i) for i in some}


def memory_of(
    shape: Shape, layout: Layout, sequence: int, gpu: Gpu, c: dict, step: Step,
    found: dict[int, tuple[float, float]],
) -> Memory:  # fmt: skip
    """Near the end of the GPU's memory the allocator gives cached blocks back. Where they are
    fragments, what is left is what is allocated; blocks that wait soon wait again.
    """
    room = c["room"] * gpu.memory
    whole = 2 * layout.micro_batch * sequence / layout.cp * shape.hidden
    late = waiting_blocks(shape, layout, step, c, gpu.node) * whole
    reserved, allocated = (with_unseen(size, c) for size in found[0])
    first = allocated if reserved > room else max(allocated, min(reserved + late, room))
    worst = max(found, key=lambda i: found[i][1])
    needed = with_unseen(found[worst][1], c)
    parts = closed_form(shape, layout, sequence, worst)
    parts["temporary"] = max(0.0, needed - sum(parts.values()))
    return Memory(first, needed, parts, worst)


# --8<-- [end:memory]


def why_not(shape: Shape, layout: Layout, sequence: int) -> str:
    """What a layout breaks, whatever the memory; empty if nothing."""
    if shape.heads % layout.tp or shape.kv_width % layout.tp:
        return f"TP {layout.tp} does not divide {shape.heads} heads"
    if layout.tp > shape.kv_heads:
        return f"TP {layout.tp} is more than {shape.kv_heads} heads of keys"
    if sequence % (layout.tp * layout.cp):
        return f"TP {layout.tp} and CP {layout.cp} do not cut {sequence:,} tokens evenly"
    if layout.pp > shape.layers:
        return f"PP {layout.pp} is more than {shape.layers} layers"
    if layout.cut == "even" and all(n % layout.pp for n in (shape.layers, shape.layers + 2)):
        return f"PP {layout.pp} divides neither {shape.layers} layers nor {shape.layers + 2}"
    cut = stages(shape, layout.pp, layout.cut)
    if any(stage.blocks == 0 for stage in cut):
        return f"PP {layout.pp} leaves a stage without work"
    if layout.micro_batches < layout.pp - 1:
        return f"PP {layout.pp} has only {layout.micro_batches} micro-batches"
    if layout.virtual > 1:
        # embedding and head count for a layer each where they stand in a stage's place
        each = max(stage.layers for stage in cut)
        if layout.pp == 1 or each % layout.virtual:
            return f"{layout.virtual} chunks do not share {each} layers of a stage"
        if layout.micro_batches % layout.pp:
            return (
                f"interleaved, PP {layout.pp} must divide {layout.micro_batches} micro-batches"
            )
    return ""


# --8<-- [start:search]
def divisors(n: int, most: int) -> list[int]:
    return [d for d in range(1, min(n, most) + 1) if n % d == 0]


def layouts(shape: Shape, gpus: int, sequence: int, batch: int, gpu: Gpu) -> Iterator[Layout]:
    """All that the rules allow: TP inside a node, as many replicas as divide the batch."""
    for tp in divisors(gpus, min(gpu.node, shape.kv_heads)):
        for pp in divisors(gpus // tp, shape.layers):
            for cp in (1, 2, 4, 8, 16, 32, 64, 128):
                dp, rest = divmod(gpus, tp * pp * cp)
                if rest or not dp or batch % dp or sequence < cp * 4096 * (cp > 1):
                    continue
                ep = math.gcd(dp, shape.experts)
                for micro in (1, 2, 4, 8, 16, 32):
                    if batch // dp % micro:
                        break
                    base = Layout(dp, pp, tp, cp, ep, micro, batch // dp // micro)
                    if why_not(shape, base, sequence):
                        continue
                    # every micro-batch of a pipeline would scatter or gather each stage
                    for zero in range(1 if dp * cp == 1 else 2 if pp > 1 else 4):
                        for virtual, recompute in product((1, 2, 4), RECOMPUTED):
                            made = replace(
                                base, zero=zero, recompute=recompute, virtual=virtual
                            )
                            if virtual == 1 or not why_not(shape, made, sequence):
                                yield made


def weigh(shape: Shape, layout: Layout, sequence: int, gpu: Gpu, step: Step) -> Memory:
    """What a step of this layout needs, replayed."""
    found = fullest(shape, layout, sequence)
    return memory_of(shape, layout, sequence, gpu, CONSTANTS["memory"], step, found)


@dataclass
class Candidate:
    layout: Layout
    step: Step
    memory: Memory | None = None


def timed_layouts(
    shape: Shape, gpus: int, sequence: int, batch: int, gpu: Gpu
) -> list[Candidate]:
    """All layouts, fastest first."""
    timed = [
        Candidate(layout, step_time(shape, layout, sequence, gpu, CONSTANTS["time"]))
        for layout in layouts(shape, gpus, sequence, batch, gpu)
    ]
    timed.sort(
        key=lambda each: (
            each.step.seconds,
            each.layout.zero,
            RECOMPUTED.index(each.layout.recompute),
        )
    )
    return timed


def search(shape: Shape, gpus: int, sequence: int, batch: int, gpu: Gpu, wanted: int):
    """Layouts that fit, fastest first; faster ones that nearly fit; the number of layouts."""
    timed = timed_layouts(shape, gpus, sequence, batch, gpu)
    fit, rejected = [], []  # of these, at least how many bytes each needs
    room = CONSTANTS["memory"]["room"] * gpu.memory

    def weighed(each: Candidate) -> float:
        each.memory = weigh(shape, each.layout, sequence, gpu, each.step)
        return each.memory.needed

    for each in timed:
        if len(fit) >= wanted:
            break
        needed = sum(closed_form(shape, each.layout, sequence, 0).values())
        if needed > room or (needed := weighed(each)) > room:  # the replay can only add
            rejected.append((needed, each))
        else:
            fit.append(each)
    close = [each for _, each in sorted(rejected, key=lambda one: one[0])[:CLOSE]]
    for each in close:
        each.memory or weighed(each)
    nearest = sorted(close, key=lambda each: each.memory.needed)[:NEAREST]
    return fit, nearest, len(timed)


# --8<-- [end:search]


def called(layout: Layout) -> str:
    extra = f" CP {layout.cp}" * (layout.cp > 1) + f" EP {layout.ep}" * (layout.ep > 1)
    zero = ("", " ZeRO-1", " ZeRO-2", " FSDP")[layout.zero]
    again = {"": "", "mlp": " recompute MLP", "layer": " recompute"}[layout.recompute]
    chunks = f"×{layout.virtual}" * (layout.virtual > 1)
    cut = f"DP {layout.dp} PP {layout.pp}{chunks} TP {layout.tp}{extra}"
    return f"{cut} b {layout.micro_batch}{zero}{again}"


def mfu(
    shape: Shape, tokens: float, sequence: int, seconds: float, layout: Layout, gpu: Gpu
) -> float:
    """By products and whole scores, as PaLM, Megatron-LM and nanotron count."""
    flops = flops_per_token(shape, sequence, causal=False) * tokens
    return flops / seconds / layout.gpus / gpu.flops


def explain(shape: Shape, each: Candidate, args: argparse.Namespace, gpu: Gpu) -> None:
    layout, step, memory = each.layout, each.step, each.memory
    assert memory is not None
    parts = ", ".join(f"{name} {size / GIB:.1f}" for name, size in memory.parts.items() if size)
    print(f"memory of stage {memory.stage}, GiB: {memory.needed / GIB:.1f} = {parts}")
    for sent in traffic(shape, layout, args.sequence, gpu.node):
        link = "inside a node" if sent.in_node == sent.ranks else "between nodes"
        print(
            f"{sent.name} over {sent.ranks} ranks sends {sent.bytes / 1e9:.1f} GB a step {link}"
        )
    spent = sorted(step.parts.items(), key=lambda part: -part[1])
    print(f"{step.seconds:.2f} s a step: ", end="")
    print(
        ", ".join(
            f"{name} {s / step.seconds:.0%}" for name, s in spent if s > 0.005 * step.seconds
        )
    )
    if args.tokens:
        cost(step, args, gpu)


# --8<-- [start:remedy]
def remedy(part: str, layout: Layout) -> str:
    """What this layout can still change to make this part smaller. If all GPUs already share
    this part of the state, no other layout makes it smaller.
    """
    stage = STATE.index(part) + 1 if part in STATE else 0
    if stage and (layout.zero >= stage or layout.dp * layout.cp == 1):
        return "more GPUs or smaller optimizer states"
    if stage:
        return f"more TP or PP, or ZeRO-{stage}"
    if part == "logits":
        return "a chunked loss or more TP"
    choices = ["recomputation"] * (layout.recompute != "layer")
    choices += ["a smaller micro-batch"] * (layout.micro_batch > 1)
    return ", or ".join([*choices, "more TP or CP"])


# --8<-- [end:remedy]


def rejected_why(each: Candidate, gpu: Gpu) -> str:
    memory = each.memory
    assert memory is not None
    over = memory.needed - CONSTANTS["memory"]["room"] * gpu.memory
    part = max(memory.parts, key=memory.parts.__getitem__)
    return (
        f"{called(each.layout)}, {each.step.seconds:.2f} s: {over / GIB:.1f} GiB too much on "
        f"stage {memory.stage}, most of it {part} ({memory.parts[part] / GIB:.1f}); "
        f"try {remedy(part, each.layout)}"
    )


# --8<-- [start:goodput]
def goodput(gpus: int, save: float, restart: float) -> tuple[float, float, float]:
    """Hours between failures, minutes between saves, share of the time that is kept
    (Training at scale, "How often to save"): Young's interval in Daly's cost.
    """
    between = BETWEEN_FAILURES / gpus * 3600
    interval = math.sqrt(2 * save * between)
    kept = interval / between * math.exp(-restart / between)
    return between / 3600, interval / 60, kept / math.expm1((interval + save) / between)


# --8<-- [end:goodput]


def whole_run(step: Step, args: argparse.Namespace) -> tuple[float, float]:
    """Days and GPU-hours of all tokens, with what failures and saves cost."""
    seconds = args.tokens / (args.batch // args.sequence * args.sequence) * step.seconds
    if args.save is not None:
        seconds /= goodput(args.gpus, args.save, args.restart)[2]
    return seconds / 86400, seconds / 3600 * args.gpus


def cost(step: Step, args: argparse.Namespace, gpu: Gpu) -> None:
    """Days, GPU-hours, dollars and energy of the whole run."""
    if args.save is not None:
        between, every, kept = goodput(args.gpus, args.save, args.restart)
        print(f"a failure every {between:,.0f} h; save every {every:.0f} min; ", end="")
        print(f"{kept:.1%} of the time is kept")
    days, hours = whole_run(step, args)
    print(f"{args.tokens:.3g} tokens take {days:.1f} days, {hours:,.0f} GPU-hours")
    if args.price:
        print(f"at ${args.price:g} a GPU-hour: ${hours * args.price:,.0f}")
    if gpu.watts:
        print(f"at most {hours * gpu.watts / 1e6:,.1f} MWh, by the GPUs' rated power alone")


def report(shape: Shape, args: argparse.Namespace, gpu: Gpu) -> bool:
    """Print the layouts that fit; return whether there is one."""
    sequences = args.batch // args.sequence
    fit, nearest, count = search(shape, args.gpus, args.sequence, sequences, gpu, args.top)
    if not count:
        stop(
            "--gpus",
            f"no layout shares {sequences} sequences evenly over {args.gpus} GPUs; batch and "
            "number of GPUs need common factors",
        )
    tokens = sequences * args.sequence
    print(
        f"{parameters(shape) / 1e9:.1f} B parameters, "
        f"{sequences} sequences of {args.sequence:,} tokens on {args.gpus} GPUs"
    )
    if not fit:
        print(f"none of {count} layouts fits")
    else:
        print(f"{len(fit)} of {count} layouts, fastest first; GiB of the fullest stage")
        for rank, each in enumerate(fit, 1):
            share = mfu(shape, tokens, args.sequence, each.step.seconds, each.layout, gpu)
            bubble = each.step.parts["bubble"] / each.step.seconds
            speed = tokens / each.step.seconds / args.gpus
            line = f"{rank:2} {called(each.layout):44} {each.step.seconds:7.2f} s {speed:7,.0f}"
            line += f" tokens/s/GPU  MFU {share:3.0%}  bubble {bubble:3.0%}"
            line += f" {each.memory.needed / GIB:6.1f} GiB"
            if args.tokens:
                days, hours = whole_run(each.step, args)
                line += f" {days:6.1f} days"
                line += f"  ${hours * args.price:,.0f}" if args.price else ""
            print(line)
        print("the first:")
        explain(shape, fit[0], args, gpu)
    if nearest:
        print("faster, but they do not fit; the nearest:" if fit else "the nearest:")
        for each in nearest:
            print("  " + rejected_why(each, gpu))
    if fit and args.emit:
        print(emit(args.emit, args, shape, fit[0].layout, gpu))
    elif args.emit:
        print("--emit: no layout fits, so there is nothing to launch")
    return bool(fit)


def advise(
    shape: Shape, args: argparse.Namespace, gpu: Gpu, only: Layout | None = None
) -> None:
    """Print what would make the training fit: each option of advice.py with its best layout,
    and more GPUs. With `only`, print the options of this one layout.
    """
    sequences = args.batch // args.sequence
    limit = CONSTANTS["memory"]["room"] * gpu.memory
    timed = timed_layouts(shape, args.gpus, args.sequence, sequences, gpu)
    found = [only] if only else [each.layout for each in timed]
    step = Step(1.0, 1.0, 1.0, {})  # what is allocated does not depend on it

    def weighed(layout: Layout) -> float:
        return weigh(shape, layout, args.sequence, gpu, step).needed

    most = f"{limit / GIB:.1f} of {gpu.memory / GIB:g} GiB may be used"
    what = (
        "this layout" if only else f"{args.gpus} GPUs, each with its fastest layout that fits"
    )
    print(f"options for {what}; {most}:")
    options = advice.OPTIONS
    if only:
        parts = weigh(shape, only, args.sequence, gpu, step).parts
        options = advice.options_for(only, max(parts, key=parts.__getitem__) in STATE)
    limits = args.sequence, limit, gpu.node
    rows = list(advice.lines(options, shape, found, *limits, weighed, called))
    print("\n".join(rows))
    if only:
        if not any(row.startswith("  fits") for row in rows):
            print("none of these is enough; without --why all layouts are tried")
        return
    for gpus in (args.gpus * 2**k for k in range(1, 8)):
        fit, _, _ = search(shape, gpus, args.sequence, sequences, gpu, 1)
        if fit:
            need, name = fit[0].memory.needed / GIB, called(fit[0].layout)
            print(f"  fits      {need:6.1f} GiB: {gpus} GPUs, nothing else changed ({name})")
            return
    print(f"  too large: with as many as {gpus} GPUs no layout of these sequences fits")


def emit(target: str, args: argparse.Namespace, shape: Shape, layout: Layout, gpu: Gpu) -> str:
    """Settings and the line that starts the run; data, tokenizer and schedule are yours.

    Names as in torchtitan 0.2.2 at b5bcd76c (configurations are functions there), Megatron-LM
    0.20 at d98e8a64, DeepSpeed 0.19.8, and torch 2.13.
    """
    nodes = -(-layout.gpus // gpu.node)
    launch = f"torchrun --nnodes={nodes} --nproc-per-node={min(layout.gpus, gpu.node)}"
    if nodes > 1:
        launch += " --rdzv-backend=c10d --rdzv-endpoint=$FIRST_NODE:29500"
    sequence = args.sequence
    batch = layout.micro_batch * layout.micro_batches * layout.dp
    again = f"# each block{'.feed_forward' * (layout.recompute == 'mlp')} through "
    again = f"{again}torch.utils.checkpoint.checkpoint\n" * (layout.recompute > "")
    if target in ("deepspeed", "fsdp") and layout.gpus * layout.ep > layout.dp:
        return f"--emit: {target} is written for DP alone; {called(layout)} needs more"
    if target == "deepspeed":
        settings = {
            "train_batch_size": batch,
            "train_micro_batch_size_per_gpu": layout.micro_batch,
            "gradient_accumulation_steps": layout.micro_batches,
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": layout.zero},
        }
        if layout.zero in (1, 2):
            settings["data_types"] = {"grad_accum_dtype": "fp32"}
        if layout.zero == 2:
            layer = sum(stage_parameters(shape, Stage(1, False, False, False, 1), 1))
            settings["zero_optimization"] |= {
                "reduce_bucket_size": layer,
                "use_multi_rank_bucket_allreduce": False,
            }
            settings["communication_data_type"] = "fp32"
        start = f"{launch} train.py --deepspeed --deepspeed_config ds.json"
        return f"{json.dumps(settings, indent=2)}\n{again}{start}"
    if target == "fsdp":
        if not layout.zero:
            return f"--emit: {called(layout)} shards nothing; DistributedDataParallel does it"
        keeps = "# before each backward; last: whether it is a step's last\n"
        keeps += "model.set_requires_gradient_sync(last)\n" * (layout.zero == 1)
        keeps += "model.set_reshard_after_backward(last)\n"
        keeps *= layout.zero < 3
        return (
            f'mesh = init_device_mesh("cuda", ({layout.dp},))\n'
            "policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)\n"
            f"{again}for block in model.layers:\n    fully_shard(block, mesh=mesh, "
            f"mp_policy=policy, reshard_after_forward={layout.zero == 3})\n"
            f"fully_shard(model, mesh=mesh, mp_policy=policy)  # {layout.micro_batches} "
            f"micro-batches of {layout.micro_batch}\n{keeps}{launch} train.py"
        )
    if target == "torchtitan":
        base = args.model.replace("llama-3-", "llama3_")
        if base not in ("llama3_8b", "llama3_70b", "llama3_405b"):
            return f"--emit: torchtitan's own Llama 3 has 8b, 70b and 405b, not {args.model}"
        shard = layout.dp if layout.zero else 1
        settings = {
            "training.num_tokens_per_microbatch_per_dp_rank": layout.micro_batch * sequence,
            "training.num_tokens_per_train_step": batch * sequence,
            "training.max_context_length": sequence,
            "parallelism.data_parallel_replicate_degree": layout.dp // shard,
            "parallelism.data_parallel_shard_degree": shard,
            "parallelism.fsdp_reshard_after_forward": "always" if layout.zero == 3 else "never",
            "parallelism.tensor_parallel_degree": layout.tp,
            "parallelism.context_parallel_degree": layout.cp,
            "parallelism.pipeline_parallel_degree": layout.pp,
        }
        if layout.pp > 1:
            ends = 1 if shape.layers % layout.pp else 0  # a layer each, as in `stages`
            chunks = layout.pp * layout.virtual
            settings |= {
                "training.disable_cuda_graphs": True,  # it refuses both at once
                "parallelism.pipeline_parallel_schedule": "Interleaved1F1B"
                if layout.virtual > 1
                else "1F1B",
                "parallelism.num_pp_microbatches": layout.micro_batches,
                "parallelism.pipeline_parallel_first_stage_less_layers": ends,
                "parallelism.pipeline_parallel_last_stage_less_layers": ends,
                "parallelism.pipeline_parallel_layers_per_stage": (shape.layers + 2 * ends)
                // chunks,
            }
        lines = [
            "# planned.py, for torchtitan",
            "from torchtitan.distributed.activation_checkpoint import FullAC",
            "from torchtitan.models.llama3 import model_registry",
            f"from torchtitan.models.llama3.config_registry import {base}",
            *(MLP_ALONE if layout.recompute == "mlp" else []),
            "def planned():",
            f"    config = {base}()",
            f"    config.model_spec = model_registry({base[7:].upper()!r})",
            *(f"    config.{name} = {value!r}" for name, value in settings.items()),
            f"    config.activation_checkpoint = {'FullAC.Config()' if again else None}",
            "    return config",
            f"{launch} -m torchtitan.train --module planned --config planned",
        ]
        return "\n".join(lines)
    flags = {
        "num-layers": shape.layers,
        "hidden-size": shape.hidden,
        "num-attention-heads": shape.heads,
        "ffn-hidden-size": shape.ffn,
        "seq-length": sequence,
        "max-position-embeddings": sequence,
        "tensor-model-parallel-size": layout.tp,
        "pipeline-model-parallel-size": layout.pp,
        "context-parallel-size": layout.cp,
        "micro-batch-size": layout.micro_batch,
        "global-batch-size": batch,
    }
    words = [f"--{name} {value}" for name, value in flags.items()]
    words += ["--bf16", "--position-embedding-type rope", "--normalization RMSNorm"]
    words += ["--disable-bias-linear", "--attention-dropout 0", "--hidden-dropout 0"]
    if shape.head_dim:
        words.append(f"--kv-channels {shape.head_dim}")
    if shape.kv_heads < shape.heads:
        words.append(f"--group-query-attention --num-query-groups {shape.kv_heads}")
    if layout.virtual > 1:
        words.append(f"--num-virtual-stages-per-pipeline-rank {layout.virtual}")
    if shape.layers % layout.pp:
        words.append("--account-for-embedding-in-pipeline-split")
        words.append("--account-for-loss-in-pipeline-split")
    if shape.gated:
        words.append("--swiglu")
    if not shape.tied:
        words.append("--untie-embeddings-and-output-weights")
    if layout.tp > 1:
        words.append("--sequence-parallel")
    if layout.zero:
        words.append("--use-distributed-optimizer")
    if layout.zero >= 2:
        shards = "optim_grads" + "_params" * (layout.zero == 3)
        words.append(f"--use-megatron-fsdp --data-parallel-sharding-strategy {shards}")
        words.append("--no-gradient-accumulation-fusion --ckpt-format fsdp_dtensor")
    if layout.recompute == "layer":
        words.append(
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
        )
    elif layout.recompute:
        module = "moe" if shape.experts > 1 else "mlp"
        words.append(f"--recompute-granularity selective --recompute-modules {module}")
    if shape.experts > 1:
        words.append(f"--num-experts {shape.experts} --moe-router-topk {shape.active}")
        words.append(f"--expert-model-parallel-size {layout.ep}")
    if layout.tp * layout.cp > 1 and layout.zero < 2:  # else it stops, before Blackwell
        launch = f"CUDA_DEVICE_MAX_CONNECTIONS=1 {launch}"
    return f"{launch} pretrain_gpt.py \\\n  " + " \\\n  ".join(words)


# --8<-- [start:post_training]
PARTS_OF_JOB = {"prompt": 512, "answer": 2048, "reference": 1, "critic": 0, "tp": 0}


def the_job(text: str, sequence: int, batch: int) -> post_training.Job:
    """Return the job. Its number of answers is the batch divided by prompt + answer."""
    values = dict(PARTS_OF_JOB)
    for part in text.split(",") if text else ():
        name, _, value = part.partition("=")
        if name not in values:
            stop("--post-training", f"unknown setting {name!r}; allowed: {', '.join(values)}")
        switch = name in ("reference", "critic")
        if not value.isdecimal() or (switch and value not in ("0", "1")):
            what = "0 or 1" if switch else "a whole number"
            stop("--post-training", f"{name} must be {what}, not {value!r}")
        values[name] = int(value)
    prompt, answer = values["prompt"], values["answer"]
    if not 0 < answer <= sequence - prompt:
        stop("--post-training", f"an answer must have at least 1 token, and prompt {prompt} "
             f"plus answer {answer} at most the {sequence:,} tokens of a sequence")  # fmt: skip
    answers = batch // (prompt + answer)
    switches = bool(values["reference"]), bool(values["critic"])
    return post_training.Job(
        answers, prompt, answer, sequence - prompt, *switches, tp=values["tp"]
    )


def post_train(shape: Shape, args: argparse.Namespace, gpu: Gpu) -> None:
    """Print a step of post-training on the same GPUs in turn, and on separate GPUs."""
    job = the_job(args.post_training, args.sequence, args.batch)
    room, c = CONSTANTS["memory"]["room"] * gpu.memory, CONSTANTS["time"]
    sequences = args.batch // args.sequence

    def trained(gpus: int) -> post_training.Trainer | None:
        less = sum(job.extra_parts(shape, gpus).values()) / CONSTANTS["memory"]["room"]
        if less >= gpu.memory:
            return None
        left = replace(gpu, memory=gpu.memory - less)
        fit, _, _ = search(shape, gpus, args.sequence, sequences, left, 1)
        if not fit:
            return None
        best = fit[0]
        name, again = called(best.layout), best.layout.recompute
        return post_training.Trainer(gpus, name, best.step.seconds, again, best.memory.parts)

    trainer = trained(args.gpus)
    if trainer is None:
        stop("--post-training", f"no layout trains this model on all {args.gpus} GPUs; "
             "without --post-training, the planner prints what is missing")  # fmt: skip
    turns = post_training.in_turn(shape, job, trainer, room, gpu, c)
    if turns is None:
        stop("--post-training", "no engine has room for the weights and the longest answer")
    print(
        f"{job.answers:,} answers of {job.answer:,} tokens on average and at most "
        f"{job.longest:,}, prompts of {job.prompt:,} tokens; {room / GIB:.1f} GiB of a GPU "
        "may be used"
    )
    print(f"{args.gpus} GPUs in turn: {turns.seconds:.1f} s a step")
    print("\n".join(post_training.lines(turns)))
    apart = post_training.separate(shape, job, turns, args.gpus, room, gpu, c, trained)
    if apart is None:
        print("separate GPUs: no split fits")
        return
    trains = apart.trainer.gpus
    print(
        f"{trains} GPUs train while {args.gpus - trains} sample: {apart.seconds:.1f} s a step; "
        f"by the formula {apart.balance:.1f} train"
    )
    print("\n".join(post_training.lines(apart)))
    print(f"  the longest answer lasts {apart.span:.1f} steps")


# --8<-- [end:post_training]


# --- held to measured runs -------------------------------------------------------------------


@dataclass
class Row:
    model: str
    nodes: int
    layout: Layout
    seconds: float  # measured; nan if the run failed
    memory: float  # GiB
    named: str  # by what it is said to stall, if it is
    predicted: Step | None = None
    either: tuple[float, float] = (0.0, 0.0)  # seconds, if it does not stall, and if it does
    planned: Memory | None = None
    fits: bool = False
    found: dict[int, tuple[float, float]] | None = None  # replayed once

    @property
    def ran(self) -> bool:
        return not math.isnan(self.seconds)

    @property
    def nearer(self) -> bool:
        """Whether its time is rather that of a pipeline that stalls."""
        steady, stalled = (abs(math.log(self.seconds / each)) for each in self.either)
        return stalled < steady

    @property
    def consistent(self) -> bool:
        """Whether the batch it was counted with is the batch that its columns make."""
        layout = self.layout
        return layout.micro_batch * layout.micro_batches * layout.dp == 256


SEQUENCE = 4096  # of all rows
COLUMNS = ["nodes", "micro_batch", "accumulation", "dp", "pp", "tp", "zero"]
COLUMNS += ["global_batch_sequences", "tokens_per_s", "memory_gib"]
CUTS = ("reached", "passed")  # of pipelines that do not stall, and of those that do


# --8<-- [start:stalls]
def not_repeated(shape: Shape, layout: Layout, nodes: int) -> str:
    """The benchmark ran its pipelines once, with software in which every slot waits half a
    second for each neighbour, and repeated some later. Which ones, its table does not say; by
    their times not those named here. Nothing that was repeated took 70 GiB.
    """
    kept = sum(closed_form(shape, layout, SEQUENCE, 0).values())
    zero, many, one = layout.zero, layout.dp >= 32, layout.micro_batch == 1
    named = {
        "64 nodes": nodes >= 64,
        "TP 32": layout.tp >= 32,
        "4 to 16 nodes, DP 2 to 16 without ZeRO, b 1": (
            4 <= nodes <= 16 and zero == 0 and layout.dp > 1 and not many and one
        ),
        "32 nodes, DP 32 and more with ZeRO-1": nodes == 32 and zero == 1 and many,
        "32 nodes, 8B and 80B, b above 1": nodes == 32 and shape.hidden >= 4096 and not one,
        "ZeRO-1, first stage above 56 GiB": zero == 1 and kept > 56 * GIB,
    }
    return next((name for name, holds in named.items() if holds and layout.pp > 1), "")


# --8<-- [end:stalls]


def cell(line: dict, name: str, where: str) -> float:
    """What stands in one column of a row; nan where a failed run has nothing."""
    measured = name in ("tokens_per_s", "memory_gib")
    try:
        value = float(line[name] or "nan") if measured else int(line[name])
    except KeyError:
        stop("--score", f"there is no column {name}")
    except (TypeError, ValueError):
        stop("--score", f"{where}: {name} is {line[name]!r}, and no number")
    least, most = (0, 3) if name == "zero" else (1e-9, 1e15)
    if value < least or value > most:
        stop("--score", f"{where}: {name} cannot be {value:g}")
    return value


def read_rows(path: str) -> list[Row]:
    rows, models = [], the_models()
    try:
        with open(path, encoding="utf-8-sig") as file:
            lines = list(csv.DictReader(each for each in file if not each.startswith("#")))
    except OSError as error:
        stop("--score", f"{path} cannot be read: {error.strerror}")
    except (csv.Error, ValueError) as error:  # of CSV, or of UTF-8
        stop("--score", f"{path} is no CSV: {error}")
    for at, line in enumerate(lines, 1):
        where = f"row {at} of {path}"
        nodes, b, m, d, p, t, z, batch, speed, memory = (
            cell(line, name, where) for name in COLUMNS
        )
        name = line.get("model")
        if name not in models:
            stop("--score", f"{where}: model {name!r} is not in models.toml")
        layout = Layout(d, p, t, 1, 1, b, m, zero=z, cut=CUTS[0])
        named = not_repeated(models[name], layout, nodes)
        layout = replace(layout, cut=CUTS[named > ""], stalls=named > "")
        rows.append(Row(name, nodes, layout, batch * SEQUENCE / speed, memory, named))
    return rows


def predict(rows: list[Row], models: dict[str, Shape], gpu: Gpu, constants: dict) -> None:
    room = constants["memory"]["room"] * gpu.memory
    for row in rows:
        shape = models[row.model]
        steps = [
            step_time(
                shape, replace(row.layout, stalls=stalls, cut=CUTS[stalls]), SEQUENCE, gpu,
                constants["time"],
            )
            for stalls in (False, True)
        ]  # fmt: skip
        row.predicted = steps[row.layout.stalls]
        row.either = steps[0].seconds, steps[1].seconds
        row.found = row.found or fullest(shape, row.layout, SEQUENCE)
        args = shape, row.layout, SEQUENCE, gpu, constants["memory"], row.predicted
        row.planned = memory_of(*args, row.found)
        row.fits = row.planned.needed <= room and not why_not(shape, row.layout, SEQUENCE)


def predicted_rows(path: str) -> list[Row]:
    """The rows of a file, each with what the planner says of it on an H100."""
    rows = read_rows(path)
    predict(rows, the_models(), the_gpu("h100"), CONSTANTS)
    return rows


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def within(errors: list[float], bound: float) -> str:
    if not errors:
        return "no rows"
    errors = [abs(each) for each in errors]
    share = sum(each <= bound for each in errors) / len(errors)
    return (
        f"median {quantile(errors, 0.5):.1%}, nine of ten within {quantile(errors, 0.9):.1%}, "
        f"{share:.1%} within {bound:.0%} ({len(errors)} rows)"
    )


def memory_error(row: Row) -> float:
    return row.planned.first / GIB / row.memory - 1


def speed_error(row: Row) -> float:
    """Of predicted throughput over measured."""
    return row.seconds / row.predicted.seconds - 1


def apart(rows: list[Row], piped: bool) -> str:
    """Of the pairs that differ in ZeRO's stage alone, those that differ by more than 30%."""
    pairs: dict[tuple, list[float]] = {}
    for row in rows:
        if (row.layout.pp > 1) == piped:
            plain = replace(row.layout, zero=0, stalls=False, cut="")
            pairs.setdefault((row.model, plain), []).append(row.seconds)
    both = [pair for pair in pairs.values() if len(pair) == 2]
    return f"{sum(max(pair) > 1.3 * min(pair) for pair in both)} of {len(both)}"


def score(rows: list[Row], whole: bool = True) -> None:
    if not rows:
        stop("--score", "the file has no rows")
    ran = [row for row in rows if row.ran]
    sized = [row for row in ran if row.memory == row.memory]  # else its memory is nan
    timed = [row for row in ran if row.consistent]
    print(f"{len(rows)} layouts, {len(ran)} measured, {len(rows) - len(ran)} failed")
    print(f"memory of rank 0: {within([memory_error(row) for row in sized], 0.12)}")
    counts = {(row.ran, row.fits): 0 for row in rows} | {
        (a, b): 0 for a in (0, 1) for b in (0, 1)
    }
    for row in rows:
        counts[row.ran, row.fits] += 1
    right = (counts[True, True] + counts[False, False]) / len(rows)
    print(f"fits or not: {right:.1%} right; ran and said to: {counts[True, True]}, ", end="")
    print(f"ran though said not to: {counts[True, False]}, failed and said to: ", end="")
    print(f"{counts[False, False]}, failed though said to fit: {counts[False, True]}")
    models = the_models()
    failed = [row for row in rows if not row.ran]
    broken = sum(bool(why_not(models[row.model], row.layout, SEQUENCE)) for row in failed)
    print(f"  of those that failed, {broken} would on any GPU: a stage is left without work")
    print(f"throughput: {within([speed_error(row) for row in timed], 0.3)}")
    steady = [row for row in timed if not row.layout.stalls]
    print(f"  without the {len(timed) - len(steady)} pipelines said to stall: ", end="")
    print(within([speed_error(row) for row in steady], 0.3))
    print("  all, were it not known which stall: ", end="")
    print(within([row.seconds / row.either[0] - 1 for row in timed], 0.3))
    print("  all, were it known of each: ", end="")
    print(within([row.seconds / row.either[row.nearer] - 1 for row in timed], 0.3))
    missed = [row for row in timed if abs(speed_error(row)) > 0.3]
    wrong = sum(row.nearer != row.layout.stalls for row in missed)
    alone = sum(row.layout.pp == 1 and row.nodes >= 64 for row in missed)
    print(f"  {len(missed)} misses: {wrong} said wrong, {alone} on 64 nodes without a pipeline")
    cells: dict[tuple, list[Row]] = {}
    for row in rows:
        if row.fits and (row.consistent or not row.ran):
            cells.setdefault((row.model, row.nodes), []).append(row)
    best: dict[tuple, Row] = {}
    for row in timed:
        key = row.model, row.nodes
        if key not in best or row.seconds < best[key].seconds:
            best[key] = row
    ranked = {k: sorted(v, key=lambda row: row.predicted.seconds) for k, v in cells.items()}
    hits = sum(any(row is best[k] for row in ranked.get(k, [])[:3]) for k in best)
    measured = sum(
        any(r is best[k] for r in [r for r in ranked.get(k, []) if r.ran][:3]) for k in best
    )
    print(f"fastest measured layout among the first three: {hits} of {len(best)} cells", end="")
    print(f", {measured} where layouts that failed are left out")
    if not whole:
        return
    pipelines = [row for row in timed if row.layout.pp > 1]
    print(
        f"pipelines that stall, by their times, {sum(row.nearer for row in pipelines)} of ",
        end="",
    )
    print(f"{len(pipelines)}; of those said to, by what")
    said: dict[str, dict[str, list[bool]]] = {}
    for row in pipelines:
        said.setdefault(row.named, {}).setdefault(row.model, []).append(row.nearer)
    for name, by in sorted(said.items()):
        parts = (f"{m} {sum(by[m])} of {len(by[m])}" for m in models if m in by)
        print(f"  {name or 'none'}: {', '.join(parts)}")
    print("pairs that differ in ZeRO alone, and by more than 30% in time: ", end="")
    print(f"{apart(timed, False)} without a pipeline, {apart(timed, True)} with one")
    for name in ("tp", "pp"):
        for value in sorted({getattr(row.layout, name) for row in sized}):
            some = [row for row in sized if getattr(row.layout, name) == value]
            speeds = [abs(speed_error(row)) for row in steady if row in some]
            sizes = [abs(memory_error(row)) for row in some]
            print(
                f"  {name.upper()} {value:2}: median of memory {quantile(sizes, 0.5):5.1%}",
                end="",
            )
            print(f", of steady throughput {quantile(speeds, 0.5):5.1%}" if speeds else "")
    print("the five worst of each")
    for name, error, some in (
        ("memory", memory_error, sized),
        ("throughput", speed_error, timed),
    ):
        worst = sorted(some, key=lambda row: -abs(math.log(1 + error(row))))[:5]
        for row in worst:
            print(
                f"  {name} {error(row):+.0%}: {row.model} on {row.nodes} nodes, "
                f"{called(row.layout)}"
            )


# --- the command line ------------------------------------------------------------------------


def number(text: str, field: str) -> float:
    scale = {"K": 2**10, "M": 2**20, "G": 1e9, "B": 1e9, "T": 1e12}.get(text[-1:].upper(), 1)
    try:
        value = float(text[:-1] if scale != 1 else text) * scale
    except ValueError:
        stop(field, f"{text!r} is no number, such as 4096, 4M or 15T")
    if not 0 < value < math.inf:
        stop(field, f"{text} is not above zero")
    return value


def rate(text: str, field: str, node: int) -> float:
    """Bytes a second that each GPU sends: 1.5GB/s, 12Gb/s, or 100Gb/s/node, which all GPUs of
    a node share.
    """
    found = re.fullmatch(r"([\d.]+(?:e\d+)?)\s*([KMGT]?)(?:(b|B)/s(/node)?)?", text)
    try:
        size = float(found[1])
    except (TypeError, ValueError):
        stop(field, f"{text!r} is no rate, such as 1.5GB/s, 12Gb/s or 100Gb/s/node")
    prefix = {"": 1, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}[found[2] or ""]
    value = size * prefix / (8 if found[3] == "b" else 1) / (node if found[4] else 1)
    if not 1e4 < value < 1e13:
        given = f"{text} is {value:g} bytes per second for each GPU"
        stop(field, f"{given}, which no network has; write a unit, such as 1.5GB/s")
    return value


def whole(text: str, field: str) -> int:
    value = number(text, field)
    if value != int(value):
        stop(field, f"{text} is no whole number")
    return int(value)


def a_shape(values: dict, field: str) -> Shape:
    known = {each.name: each.default for each in fields(Shape)}
    for name, value in values.items():
        if name not in known:
            stop(field, f"{name!r} is no part of a shape; those are {', '.join(known)}")
        kind = bool if isinstance(known[name], bool) else int
        if type(value) is not kind:
            wanted = "neither true nor false" if kind is bool else "no whole number"
            stop(field, f"{name} is {value!r}, and {wanted}")
    missing = [n for n in list(known)[:6] if n not in values and n != "kv_heads"]
    if missing:
        stop(field, f"a shape needs {', '.join(missing)}")
    shape = Shape(**({"kv_heads": values["heads"]} | values))
    for name in known:
        least = name not in ("tied", "gated", "head_dim")
        if getattr(shape, name) < least:
            stop(field, f"{name} must be at least {least:d}, not {getattr(shape, name)}")
    if shape.heads % shape.kv_heads or (not shape.head_dim and shape.hidden % shape.heads):
        stop(field, "heads must divide hidden, and kv_heads must divide heads")
    if shape.active > shape.experts:
        stop(field, f"a token cannot visit {shape.active} of {shape.experts} experts")
    return shape


def the_models() -> dict[str, Shape]:
    return {name: a_shape(values, name) for name, values in table("models.toml").items()}


def the_model(name: str) -> Shape:
    models = the_models()
    if name in models:
        return models[name]
    if "=" in name:
        values = {}
        for part in name.split(","):
            try:
                values |= tomllib.loads(part)
            except ValueError:
                stop("--model", f"{part!r} is no part such as layers=32 or tied=true")
        return a_shape(values, "--model")
    if name.endswith(".toml"):
        try:
            return a_shape(tomllib.loads(Path(name).read_text("utf-8")), "--model")
        except OSError as error:
            stop("--model", f"{name} cannot be read: {error.strerror}")
        except ValueError as error:  # of TOML, or of UTF-8
            stop("--model", f"{name} is not TOML: {error}")
    if name.endswith(".json") or (Path(name) / "config.json").exists():
        try:
            config = config_json.read(Path(name))
            if back := config_json.window(config):
                print(
                    f"--model: in {name}, attention is limited to a window of {back:,} tokens; "
                    "the planner counts full attention",
                    file=sys.stderr,
                )
            return a_shape(vars(config_json.shape_of(config)), "--model")
        except config_json.Unreadable as error:
            stop("--model", f"{name} {error}")
    stop(
        "--model",
        f"{name!r} is not in models.toml ({', '.join(models)}), nor a shape, nor a file",
    )


MACHINE = ("flops", "memory_gib", "bandwidth", "link", "network", "node", "watts")


PLAUSIBLE = {  # of each GPU; a number outside is nearly always in another unit
    "flops": (1e12, 1e17, "FLOP per second (312e12 for 312 TFLOP/s)"),
    "memory_gib": (1, 4096, "GiB (80 for 80 GiB)"),
    "bandwidth": (1e10, 1e14, "bytes per second (2.039e12 for 2,039 GB/s)"),
    "link": (1e8, 1e14, "bytes per second one way (32e9 for 32 GB/s)"),
    "network": (1e6, 1e13, "bytes per second one way for each GPU (12.5e9 for 100 Gb/s)"),
    "node": (1, 4096, "the number of GPUs that the link joins"),
    "watts": (1, 1e5, "watts"),
}


def own_hardware(path: str) -> dict:
    """The GPUs of a file in the form of hardware.toml; only watts and source may be missing."""
    try:
        found = tomllib.loads(Path(path).read_text("utf-8"))
    except OSError as error:
        stop("--hardware", f"{path} cannot be read: {error.strerror}")
    except ValueError as error:  # of TOML, or of UTF-8
        stop("--hardware", f"{path} is not TOML: {error}")
    if not found:
        stop("--hardware", f"{path} is empty; a GPU is a table, such as [my-gpu]")
    for name, entry in found.items():
        if not isinstance(entry, dict):
            stop("--hardware", f"{path}: {name} is outside of a table, such as [my-gpu]")
        for key, value in entry.items():
            if key not in (*MACHINE, "source"):
                known = ", ".join((*MACHINE, "source"))
                stop("--hardware", f"{path}: [{name}] has {key!r}; a GPU has {known}")
            if key == "source":
                continue
            low, high, unit = PLAUSIBLE[key]
            number = type(value) in (int, float) and (key != "node" or type(value) is int)
            if not number or not low <= value <= high:
                stop("--hardware", f"{path}: [{name}] {key} is {value!r}, and must be {unit}")
        missing = [key for key in MACHINE[:-1] if key not in entry]
        if missing:
            stop("--hardware", f"{path}: [{name}] lacks {', '.join(missing)}")
    return found


def the_gpu(name: str | None, path: str | None = None, **changed: float) -> Gpu:
    """A GPU of hardware.toml, or of a file of the reader's own, with changes."""
    known = own_hardware(path) if path else table("hardware.toml")
    if name is None:
        if path and len(known) > 1:
            stop("--gpu", f"which of {', '.join(known)}? {path} has several")
        name = next(iter(known)) if path else "h100"
    if name not in known:
        stop(
            "--gpu",
            f"{name!r} is not in {path or 'hardware.toml'}, which has {', '.join(known)}",
        )
    entry = {each: known[name].get(each, 0.0) for each in MACHINE} | changed
    return Gpu(memory=entry.pop("memory_gib") * GIB, **entry)


FOR_A_LIST = ("top", "tokens", "price", "save", "restart", "emit")
NOT_TOGETHER = {  # what an option does not use, and why
    "score": (("model", "gpus", "gpu", "hardware", "inter_node", "sequence", "batch", "why",
               "what_if", *FOR_A_LIST), "the rows of the file say what was run"),
    "what_if": (FOR_A_LIST, "it prints one line for each value"),
    "why": (("top",), "it is about one layout"),
    "post_training": (("why", "what_if", "score", *FOR_A_LIST),
                      "it prints one plan for GPUs in turn and one for separate GPUs"),
}  # fmt: skip
NEEDS = {"price": "tokens", "save": "tokens", "restart": "save"}


def check_options(args: argparse.Namespace) -> None:
    """Stop if one option would have no effect because of another, or without another."""
    given = {name for name, value in vars(args).items() if value is not None}
    for name, (others, why) in NOT_TOGETHER.items():
        for other in others:
            if {name, other} <= given:
                names = [f"--{each.replace('_', '-')}" for each in (name, other)]
                stop(names[0], f"it cannot be combined with {names[1]}, since {why}")
    for name, other in NEEDS.items():
        if name in given and other not in given:
            what = {"tokens": "the length of the run", "save": "the seconds of a save"}[other]
            stop(f"--{name}", f"it also needs --{other}, which gives {what}")


def what_if(shape: Shape, args: argparse.Namespace) -> None:
    """The fastest layout, or the one of --why, for each value of one number."""
    name, _, values = args.what_if.partition("=")
    numbers, machine = ("gpus", "batch", "sequence"), MACHINE[:-1]
    if name not in numbers + machine or not values:
        stop("--what-if", f"NAME=VALUE,VALUE…, with one of {', '.join(numbers + machine)}")
    if name in args.given or (name == "network" and args.inter_node):
        twice = "inter-node" if name == "network" else name
        stop(
            "--what-if", f"it cannot be combined with --{twice}, since it varies {name} itself"
        )
    if args.why and name == "gpus":
        stop(
            "--what-if",
            "it cannot vary gpus with --why, since a layout says how many there are",
        )
    for value in values.split(","):
        if name == "network":
            found = rate(value, "--what-if", the_gpu(args.gpu, args.hardware).node)
        else:
            found = (whole if name in (*numbers, "node") else number)(value, "--what-if")
        trial = argparse.Namespace(**vars(args))
        gpu = the_machine(args, **({} if name in numbers else {name: found}))
        if name in numbers:
            setattr(trial, name, found)
        sequences = trial.batch // trial.sequence
        if not sequences:
            stop("--what-if", f"{name} = {value}: a step has less than one sequence")
        if (args.inter_node or name == "network") and trial.gpus <= gpu.node:
            alone(trial.gpus, "--inter-node" if args.inter_node else "--what-if")
        if args.why:
            each = asked(shape, trial, gpu)
            room = CONSTANTS["memory"]["room"] * gpu.memory
            line = f"{called(each.layout)}, {each.step.seconds:.2f} s a step, "
            line += f"{speed(each, trial):,.0f} tokens/s/GPU"
            over = (each.memory.needed - room) / GIB
            line += f"; {over:.1f} GiB too much" if over > 0 else ""
            print(f"{name} = {value}: {line}")
            continue
        fit, _, count = search(shape, trial.gpus, trial.sequence, sequences, gpu, 1)
        if fit:
            print(
                f"{name} = {value}: {called(fit[0].layout)}, {fit[0].step.seconds:.2f} s a step"
            )
        else:
            print(
                f"{name} = {value}: "
                + ("nothing fits" if count else "no layout shares the batch evenly")
            )


def alone(gpus: int, field: str) -> None:
    stop(field, f"{gpus} GPUs share one node, so the network between nodes changes nothing")


def the_machine(args: argparse.Namespace, **changed: float) -> Gpu:
    """The GPU with the network that --inter-node gives."""
    if args.inter_node:
        node = the_gpu(args.gpu, args.hardware, **changed).node
        changed["network"] = rate(args.inter_node, "--inter-node", node)
    return the_gpu(args.gpu, args.hardware, **changed)


def asked(shape: Shape, args: argparse.Namespace, gpu: Gpu) -> Candidate:
    """The layout of --why, timed and weighed."""
    layout = one_layout(args.why, shape, args)
    step = step_time(shape, layout, args.sequence, gpu, CONSTANTS["time"])
    return Candidate(layout, step, weigh(shape, layout, args.sequence, gpu, step))


def speed(each: Candidate, args: argparse.Namespace) -> float:
    """Tokens per second and GPU."""
    tokens = args.batch // args.sequence * args.sequence
    return tokens / each.step.seconds / each.layout.gpus


def one_layout(text: str, shape: Shape, args: argparse.Namespace) -> Layout:
    values = {"micro_batch": 1, "zero": 1, "recompute": "", "virtual": 1}
    short = {"b": "micro_batch", "v": "virtual"}
    for part in text.split(","):
        key, _, value = part.partition("=")
        key = short.get(key, key)
        if key not in (*values, "dp", "pp", "tp", "cp", "ep"):
            stop("--why", "such as dp=16,pp=2,tp=8,b=1,v=2,zero=1,recompute=mlp")
        if key == "recompute":
            if value not in RECOMPUTED:
                stop("--why", f"recompute is mlp or layer, not {value}")
            values[key] = value
            continue
        values[key] = (
            int(value) if value.isdecimal() else stop("--why", f"{part!r} has no number")
        )
    if values["zero"] > 3:
        stop("--why", f"zero is 0, 1, 2 or 3, not {values['zero']}")
    layout = Layout(**values)
    sequences = args.batch // args.sequence
    if min(layout.micro_batch, layout.virtual, layout.ep) < 1:
        stop("--why", "b, v and ep are at least 1")
    if layout.gpus != args.gpus:
        stop("--why", f"{text} makes {layout.gpus} GPUs, not {args.gpus}")
    if math.gcd(layout.dp, shape.experts) % layout.ep:
        stop("--why", f"EP {layout.ep} does not divide DP and {shape.experts} experts")
    count, rest = divmod(sequences, layout.dp * layout.micro_batch)
    if rest:
        stop("--why", f"{sequences} sequences are not shared evenly by {called(layout)}")
    layout = replace(layout, micro_batches=count)
    if reason := why_not(shape, layout, args.sequence):
        stop("--why", reason)
    return layout


DEFAULTS = {"model": "llama-3-70b", "gpus": "256", "sequence": "8192", "batch": "4M"}
DEFAULTS |= {"restart": "900", "top": "5"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="name, file.toml, config.json, or layers=…,…")
    parser.add_argument("--gpus", help="how many; 256")
    parser.add_argument("--gpu", help="a name in hardware.toml; h100")
    parser.add_argument("--hardware", metavar="FILE.toml", help="GPUs of your own")
    parser.add_argument(
        "--inter-node", metavar="RATE", help="network: 1.5GB/s a GPU, 100Gb/s/node"
    )
    parser.add_argument("--sequence", help="tokens of a sequence; 8192")
    parser.add_argument("--batch", help="tokens of a step; 4M")
    parser.add_argument("--tokens", help="of the whole run, such as 15T: days and GPU-hours")
    parser.add_argument("--price", help="dollars for a GPU-hour")
    parser.add_argument("--save", help="seconds that a save holds training up")
    parser.add_argument("--restart", help="seconds from failure to training; 900")
    parser.add_argument("--top", help="how many to list; 5")
    parser.add_argument("--emit", choices=["torchtitan", "megatron", "deepspeed", "fsdp"])
    parser.add_argument("--why", metavar="LAYOUT", help="dp=16,pp=2,tp=8,b=1,zero=1")
    parser.add_argument("--what-if", metavar="NAME=V,V", help="network=25e9,50e9")
    parser.add_argument(
        "--post-training", metavar="PARTS", nargs="?", const="", help="prompt=512,answer=2048"
    )
    parser.add_argument("--score", metavar="FILE.csv", help="hold the planner to measured runs")
    parser.error = sys.exit  # its sentence names the argument
    args = parser.parse_args()
    check_options(args)
    if args.score:
        score(predicted_rows(args.score))
        return
    args.given = {name for name, value in vars(args).items() if value is not None}
    for name, value in DEFAULTS.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    for name in ("gpus", "sequence", "batch", "top"):
        setattr(args, name, whole(getattr(args, name), f"--{name}"))
    for name in ("tokens", "price", "save", "restart"):
        text = getattr(args, name)
        setattr(args, name, None if text is None else number(text, f"--{name}"))
    if args.save and args.save + args.restart > 36_000 * BETWEEN_FAILURES / args.gpus:
        stop(
            "--save",
            "with its restarts it takes ten times as long as the GPUs run between failures",
        )
    if args.batch < args.sequence:
        stop(
            "--batch", f"{args.batch:,} tokens are less than one sequence of {args.sequence:,}"
        )
    shape, gpu = the_model(args.model), the_machine(args)
    if args.what_if:
        what_if(shape, args)
        return
    if args.inter_node and args.gpus <= gpu.node:
        alone(args.gpus, "--inter-node")
    if args.post_training is not None:
        post_train(shape, args, gpu)
    elif args.why:
        each = asked(shape, args, gpu)
        fits = each.memory.needed <= CONSTANTS["memory"]["room"] * gpu.memory
        print(
            f"{called(each.layout)} fits, {speed(each, args):,.0f} tokens/s/GPU"
            if fits
            else rejected_why(each, gpu)
        )
        explain(shape, each, args, gpu)
        if not fits:
            advise(shape, args, gpu, each.layout)
        if args.emit:
            print(emit(args.emit, args, shape, each.layout, gpu))
    elif not report(shape, args, gpu):
        advise(shape, args, gpu)


if __name__ == "__main__":
    main()
