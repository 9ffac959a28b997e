"""Time and memory of a step of post-training: the same GPUs in turn, or separate GPUs.

    python post_training.py

`plan.py --post-training` prints both. plan.py gives the time of a training step. Sampling reads
all weights and the cache of all running answers for every token, so its time is the longer of
what the products and the memory need, at the rates of constants.toml. No measured run of
sampling was compared with this estimate. The reference model and the critic are sharded over
all training GPUs. The latency of collectives inside an engine is not counted.
"""

import math
import random
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from step_time import Gpu
from transformer import Shape, layer_matrices, parameters

GIB = 2**30
HOST = 50e9  # bytes/s between a GPU and its host: about 80% of a PCIe 5 link with 16 lanes


@dataclass(frozen=True)
class Job:
    """The answers of one step."""

    answers: int
    prompt: int  # tokens
    answer: float  # tokens of an answer on average
    longest: int  # tokens of the longest answer
    reference: bool = True  # a frozen copy of the model, for a KL penalty
    critic: bool = False  # a second trained model of the same size, for PPO
    tp: int = 0  # GPUs of a sampling engine; 0 chooses the fastest

    def extra_parts(self, shape: Shape, gpus: int) -> dict[str, float]:
        """Bytes of reference and critic on each training GPU: 2 and 18 per parameter."""
        bytes_each = {"reference": 2 * self.reference, "critic": 18 * self.critic}
        return {name: n * parameters(shape) / gpus for name, n in bytes_each.items() if n}

    def training_seconds(self, step: float, recompute: str) -> tuple[float, float]:
        """Seconds of the reference's forward pass, and of training the policy and the critic.

        A forward pass is a third of a step, or a quarter if all layers are recomputed.
        """
        forward = step / (4 if recompute == "layer" else 3)
        return forward * self.reference, step * (1 + self.critic)


@dataclass(frozen=True)
class Trainer:
    """Training on some GPUs, as plan.py found it."""

    gpus: int
    name: str  # of the layout
    seconds: float  # of a step of the policy alone
    recompute: str
    parts: dict[str, float]  # bytes on the fullest GPU


@dataclass(frozen=True)
class Sampler:
    engines: int
    tp: int
    together: int  # answers that an engine samples at the same time
    token: float  # seconds in which each running answer grows by one token
    work: float  # seconds of all answers of a step, if the engines are always full
    tail: float  # seconds more until the longest answer ends, if a batch must be complete
    weights: float  # bytes on each GPU
    cache: float  # bytes on each GPU


# --8<-- [start:sampler]
def cache_bytes(s: Shape) -> float:
    """Keys and values of one token in all layers."""
    return 4.0 * s.layers * s.kv_width


def token_seconds(shape: Shape, together: int, context: float, tp: int, gpu: Gpu, c: dict):
    """Seconds in which one engine adds a token to each of `together` answers."""
    head = shape.vocabulary * shape.hidden
    products = shape.layers * layer_matrices(shape, shape.active) + head
    # experts that at least one of the tokens visits
    visited = shape.experts * (1 - (1 - shape.active / shape.experts) ** together)
    read = shape.layers * layer_matrices(shape, visited) + head
    flops = together * (2 * products + 4 * shape.layers * shape.attention_width * context)
    moved = 2 * read + together * context * cache_bytes(shape)
    sent = 2 * shape.layers * 2 * together * shape.hidden * 2 * (tp - 1) / tp  # all-reduces
    compute = flops / tp / (c["products"] * gpu.flops)
    memory = moved / tp / (c["memory"] * gpu.bandwidth)
    return max(compute, memory) + sent / (c["link"] * gpu.link)


def sampler(
    shape: Shape, job: Job, gpus: int, tp: int, free: float, gpu: Gpu, c: dict
) -> Sampler | None:
    """Engines of `tp` GPUs, each with `free` bytes. None if the longest answer does not fit."""
    if gpus % tp or tp > gpu.node or shape.kv_heads % tp:
        return None
    engines, weights = gpus // tp, 2 * parameters(shape) / tp
    cache = free - weights
    room = cache * tp / cache_bytes(shape)  # tokens
    if room < job.prompt + job.longest:
        return None
    context = job.prompt + job.answer
    together = max(1, min(math.floor(room / context), math.ceil(job.answers / engines)))
    token = token_seconds(shape, together, context, tp, gpu, c)
    alone = token_seconds(shape, 1, job.prompt + job.longest / 2, tp, gpu, c)
    products = shape.layers * layer_matrices(shape, shape.active)
    prefill = 2 * products * job.answers * job.prompt / gpus / (c["products"] * gpu.flops)
    tokens = job.answers * job.answer / (engines * together)  # one after the other
    work = tokens * token + prefill
    tail = max(0.0, job.longest - tokens) * alone
    return Sampler(engines, tp, together, token, work, tail, weights, cache)


# --8<-- [end:sampler]


@dataclass(frozen=True)
class Plan:
    seconds: float
    parts: dict[str, float]  # seconds of each activity
    memory: dict[str, dict[str, float]]  # bytes on a GPU by phase and part
    trainer: Trainer
    sampler: Sampler
    balance: float = 0.0  # training GPUs by the formula, if the GPUs are separate
    span: float = 0.0  # steps that the longest answer lasts


def sync_seconds(weights: float, gpus: int, gpu: Gpu, c: dict) -> float:
    """Each sampler GPU receives its weights, inside a node or over its network card."""
    link = c["link"] * gpu.link if gpus <= gpu.node else c["network"] * gpu.network
    return weights / link


# --8<-- [start:in_turn]
def in_turn(shape: Shape, job: Job, trainer: Trainer, room: float, gpu: Gpu, c: dict):
    """All GPUs sample, then all GPUs train. Returns the fastest plan that fits, or None.

    Either the training state stays on the GPUs and the cache is smaller, or the state is
    offloaded to the host and back in every step.
    """
    gpus, extra, plans = trainer.gpus, job.extra_parts(shape, trainer.gpus), []
    # gradients and activations are freed at the end of a step
    state = {name: trainer.parts[name] for name in ("parameters", "optimizer")} | extra
    for offload in (False, True):
        free = room - (0 if offload else sum(state.values()))
        for tp in (job.tp,) if job.tp else (1, 2, 4, 8):
            made = sampler(shape, job, gpus, tp, free, gpu, c)
            if made is None:
                continue
            reference, train = job.training_seconds(trainer.seconds, trainer.recompute)
            parts = {
                "sample": made.work + made.tail,
                "reference": reference,
                "train": train,
                "weight sync": sync_seconds(made.weights, gpus, gpu, c),
                "offload": 2 * sum(state.values()) / HOST * offload,
            }
            stays = {} if offload else state
            memory = {
                "sample": {"sampler weights": made.weights, "cache": made.cache} | stays,
                "switch": {"sampler weights": made.weights} | (stays or {
                    "parameters": state["parameters"]}),
                "train": trainer.parts | extra,
            }  # fmt: skip
            plans.append(Plan(sum(parts.values()), parts, memory, trainer, made))
    return min(plans, key=lambda plan: plan.seconds, default=None)


# --8<-- [end:in_turn]


# --8<-- [start:separate]
def separate(
    shape: Shape, job: Job, first: Plan, gpus: int, room: float, gpu: Gpu, c: dict,
    trained: Callable[[int], Trainer | None],
) -> Plan | None:  # fmt: skip
    """Some GPUs train while the others sample the answers of later steps.

    The formula gives the balance: both sides need the same time. The plan uses the better of
    the nearest numbers of GPUs below and above for which a layout fits. `first` is the plan in
    turn, whose times give the work of both sides.
    """
    train = (first.parts["reference"] + first.parts["train"]) * first.trainer.gpus
    sample = first.sampler.work * first.trainer.gpus
    balance = gpus * train / (train + sample)
    unit = gpu.node if gpus > gpu.node else 1
    below = range(math.floor(balance / unit) * unit, 0, -unit)
    above = range((math.floor(balance / unit) + 1) * unit, gpus, unit)
    plans = []
    for side in (below, above):
        for x in side:
            trainer = trained(x)
            degrees = (job.tp,) if job.tp else (1, 2, 4, 8)
            options = [sampler(shape, job, gpus - x, tp, room, gpu, c) for tp in degrees]
            best = min(filter(None, options), key=lambda each: each.work, default=None)
            if trainer is None or best is None:
                continue
            reference, train = job.training_seconds(trainer.seconds, trainer.recompute)
            sync = sync_seconds(best.weights, gpus, gpu, c)
            parts = {
                "sample": best.work,
                "weight sync": sync,
                "reference": reference,
                "train": train,
            }
            seconds = max(best.work + sync, reference + train)
            memory = {
                "sampler": {"sampler weights": best.weights, "cache": best.cache},
                "trainer": trainer.parts | job.extra_parts(shape, x),
            }
            span = job.longest * best.token / seconds
            plans.append(Plan(seconds, parts, memory, trainer, best, balance, span))
            break
    return min(plans, key=lambda plan: plan.seconds, default=None)


# --8<-- [end:separate]


def lines(plan: Plan) -> list[str]:
    """Return the lines that plan.py prints: times, and memory of one GPU in each phase."""
    made, rows = plan.sampler, []
    notes = {
        "sample": f"engines of TP {made.tp}: {made.engines}, each with {made.together} answers "
        f"at a time, {made.token * 1e3:.1f} ms a token",
        "train": plan.trainer.name,
        "weight sync": f"{made.weights / GIB:.1f} GiB to each sampling GPU",
        "offload": "of the training state to the host and back",
    }
    for name, seconds in plan.parts.items():
        if seconds:
            rows.append(f"  {name:12}{seconds:8.1f} s  {notes.get(name, '')}".rstrip())
            if name == "sample" and seconds > made.work:
                rows.append(f"{'':25}of which {made.tail:.1f} s until the longest answer ends")
    for name, sizes in plan.memory.items():
        text = ", ".join(f"{part} {size / GIB:.1f}" for part, size in sizes.items() if size)
        rows.append(f"  {name:8}{sum(sizes.values()) / GIB:6.1f} GiB = {text}")
    return rows


def main() -> None:
    shape = Shape(32, 4096, 32, 8, 14336, 128256)  # Llama 3 8B
    gpu = Gpu(989e12, 80 * GIB, 3.35e12, 450e9, 50e9, node=8)  # H100
    constants = tomllib.loads(Path(__file__).with_name("constants.toml").read_text("utf-8"))
    c, room = constants["time"], constants["memory"]["room"] * gpu.memory
    context = 2048

    print("Llama 3 8B on one H100: ms for a token of each answer, tokens/s of all answers")
    for together in (1, 16, 64, 256):
        seconds = token_seconds(shape, together, context, 1, gpu, c)
        # by hand, element by element: the weights without the embedding, and the caches, at
        # 70% of the memory's bandwidth
        weights = 2 * (parameters(shape) - shape.vocabulary * shape.hidden)
        norms = 2 * shape.hidden * (2 * shape.layers + 1)
        caches = sum(2 * 2 * 8 * 128 * context for _ in range(together * shape.layers))
        by_hand = (weights - norms + caches) / (0.7 * 3.35e12)
        assert math.isclose(seconds, by_hand)
        print(f"  {together:4} {seconds * 1e3:6.1f} {together / seconds:8.0f}")
    few, many = (token_seconds(shape, n, 0, 1, gpu, c) for n in (1, 1024))
    assert few < many / 2  # without a cache, many answers are bound by the products

    # a mixture of experts reads the experts that its tokens visit: with one token two of eight
    mixture = Shape(32, 4096, 32, 8, 14336, 32000, experts=8, active=2)
    one, all_experts = (token_seconds(mixture, n, 0, 1, gpu, c) for n in (1, 64))
    ratio = all_experts / one
    print(f"Mixtral 8x7B: a token of 64 answers takes {ratio:.1f} times as long as that of one")
    assert 3.4 < ratio < 3.7

    # lengths drawn at random: an engine becomes faster while its answers end one by one
    job = Job(answers=2048, prompt=512, answer=1024, longest=7680)
    made = sampler(shape, job, 8, 1, room, gpu, c)
    assert made is not None and made.weights + made.cache <= room
    rng = random.Random(0)
    lengths = sorted(rng.expovariate(1 / job.answer) for _ in range(made.together))
    lengths = [length * job.longest / lengths[-1] for length in lengths]
    simulated, before, running = 0.0, 0.0, made.together
    for length in lengths:
        step = token_seconds(shape, running, job.prompt + job.answer, 1, gpu, c)
        simulated += (length - before) * step
        before, running = length, running - 1
    formula = sampler(
        shape, replace(job, answer=sum(lengths) / made.together), 8, 1, room, gpu, c
    )
    print(f"{job.answers} answers on 8 GPUs, {made.together} at a time on each: ", end="")
    print(f"{formula.work + formula.tail:.1f} s by formula, {simulated:.1f} s simulated")
    assert abs((formula.work + formula.tail) / simulated - 1) < 0.1
    assert formula.tail > 0.2 * simulated  # without the tail, the formula would be wrong

    # with a trainer that is equally efficient on all numbers of GPUs, the balance is best
    def trained(x: int) -> Trainer:
        size = parameters(shape)
        parts = {"parameters": 2.0 * size, "gradients": 4.0 * size, "optimizer": 12.0 * size}
        return Trainer(x, f"FSDP {x}", 240 / x, "", {k: v / x for k, v in parts.items()})

    turns = in_turn(shape, job, trained(8), room, gpu, c)
    apart = separate(shape, job, turns, 8, room, gpu, c, trained)
    assert turns is not None and apart is not None

    def seconds(x: int) -> float:
        options = [sampler(shape, job, 8 - x, tp, room, gpu, c) for tp in (1, 2, 4, 8)]
        sync = sync_seconds(made.weights, 8, gpu, c)
        return max(min(o.work for o in options if o) + sync, 240 / x * 4 / 3)

    best = min(range(1, 8), key=seconds)
    print(f"separate: {apart.trainer.gpus} of 8 GPUs train, the formula says ", end="")
    print(f"{apart.balance:.2f}; {apart.seconds:.1f} s a step, in turn {turns.seconds:.1f} s")
    assert apart.trainer.gpus == best and abs(apart.balance - best) < 1
    assert math.isclose(apart.seconds, seconds(best))
    engine = apart.sampler  # the longest answer grows by one token at a time
    context = job.prompt + job.answer
    token = token_seconds(shape, engine.together, context, engine.tp, gpu, c)
    assert math.isclose(sum(token for _ in range(job.longest)), apart.span * apart.seconds)

    # the state either makes the cache smaller or costs time; both fit
    for plan in (turns, apart):
        for phase, sizes in plan.memory.items():
            assert 0 < sum(sizes.values()) < room * (1 + 1e-12), phase
    assert turns.parts["offload"] == 0  # the cache is still large enough next to the state
    crowded = in_turn(shape, Job(2048, 512, 1024, 7680, critic=True), trained(4), room, gpu, c)
    assert crowded is not None and crowded.parts["offload"] > 0
    # 60 s train the policy, and 60 s the critic; the reference makes only the forward pass
    assert (crowded.parts["train"], crowded.parts["reference"]) == (120.0, 20.0)
    state = 14 + 2 + 18  # bytes per parameter that are moved: policy, reference and critic
    moved = 2 * state * parameters(shape) / 4 / HOST
    print(
        f"with a critic on 4 GPUs, offloading {moved * HOST / 2 / GIB:.1f} GiB there and ",
        end="",
    )
    print(f"back takes {crowded.parts['offload']:.1f} s")
    assert math.isclose(crowded.parts["offload"], moved)


if __name__ == "__main__":
    main()
