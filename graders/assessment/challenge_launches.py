"""The launches challenge: numbers, waits, launches, the compiled graph; a GPU's verdict."""

import json
import math
from importlib.util import find_spec

import torch
import torch._dynamo  # once here, not in every process

from graders.dsl import Condition, Lab, at_most, import_late_parts, require, require_equal

import_late_parts()
LAB = Lab()


def made(submission, reference, count: int = 6):
    """Parameters with first gradients, and the learner's optimizer of them."""
    own = reference.parameters(count)
    optimizer = submission.FastLamb(own)
    apart = apart_from(
        own, [p.detach().flatten().tolist() for p in reference.parameters(count)]
    )
    fact = "largest change of a parameter when FastLamb is made"
    require_equal(fact, max(apart), at_most(0), "moved")
    reference.backward(own)
    return own, optimizer


def wanted(reference, steps: int) -> list[list[float]]:
    """All numbers of all parameters, one by one, in fp64 and without torch's operators."""
    own, results = reference.parameters(6), []
    grads = []
    for step in range(steps):
        reference.backward(own, step)
        grads.append([p.grad.flatten().tolist() for p in own])
    for at, p in enumerate(own):
        x = p.detach().flatten().tolist()
        m = v = [0.0] * len(x)
        for t in range(1, steps + 1):
            g = grads[t - 1][at]
            m = [
                reference.BETA1 * a + (1 - reference.BETA1) * b
                for a, b in zip(m, g, strict=True)
            ]
            v = [
                reference.BETA2 * a + (1 - reference.BETA2) * b * b
                for a, b in zip(v, g, strict=True)
            ]
            c1, c2 = 1 - reference.BETA1**t, 1 - reference.BETA2**t
            u = [a / c1 / (math.sqrt(b / c2) + reference.EPSILON) + reference.DECAY * c
                 for a, b, c in zip(m, v, x, strict=True)]  # fmt: skip
            ratio = math.hypot(*x) / math.hypot(*u) if any(x) and any(u) else 1.0
            x = [a - reference.RATE * ratio * b for a, b in zip(x, u, strict=True)]
        results.append(x)
    return results


def apart_from(own, true: list[list[float]]) -> list[float]:
    """Of each parameter, the largest difference; NaN counts as infinite."""
    return [
        (p.detach().flatten() - torch.tensor(x)).abs().max().nan_to_num(9e9).item()
        for p, x in zip(own, true, strict=True)
    ]


@LAB.alone(1, "the same numbers", "three steps as in fp64, parameters of zeros too", "FastLamb")
@torch.no_grad()
def numbers(submission, reference, lesson):
    own, optimizer = made(submission, reference)
    other, blind = made(submission, reference)
    reference.backward(other, 1)
    before = [p.grad.clone() for p in own]
    optimizer.step(), blind.step()
    kept = all(torch.equal(p.grad, grad) for p, grad in zip(own, before, strict=True))
    require_equal("the gradients stay as they are", kept, True, "gradients")
    seen = not all(torch.equal(p, q) for p, q in zip(own, other, strict=True))
    require_equal("another gradient makes a difference", seen, True, "gradients")
    lengths = [
        (p - q).norm() / q.norm() / reference.RATE
        for p, q in zip(own, reference.parameters(6), strict=True)
        if q.any()
    ]  # a ratio makes the update as long as the parameter, whatever the update is
    off, bound = max(abs(length.item() - 1) for length in lengths), at_most(1e-5)
    require_equal("relative error of an update's length", off, at_most(1e-3), "ratio")
    first = apart_from(own, wanted(reference, 1))
    moved = own[1].detach().isfinite().all() and own[1].any()
    hint = "update" if moved else "zeros"
    require_equal("error of the parameter of zeros after a step", first[1], bound, hint)
    for step in (1, 2):
        reference.backward(own, step)
        optimizer.step()
    error = max(*first, *apart_from(own, wanted(reference, 3)))
    require_equal("largest error in three steps", error, bound, "update")


@LAB.alone(2, "bronze", "the host waits for nothing", "FastLamb", needs=(1,))
@torch.no_grad()
def waits(submission, reference, lesson):
    _, optimizer = made(submission, reference)
    with reference.Counted() as counted:
        optimizer.step()
    require_equal("numbers the host waits for in a step", counted.waits, 0, "waits")


@LAB.alone(3, "silver", "as many launches for 24 parameters as for 6", "FastLamb", needs=(1,))
@torch.no_grad()
def launches(submission, reference, lesson):
    found = []
    for count in (6, 24):
        _, optimizer = made(submission, reference, count)
        with reference.Counted() as counted:
            optimizer.step()
        found.append(counted.launches)
    fact = f"launches for 24 parameters; for 6 there are {found[0]}"
    require_equal(fact, found[1], found[0], "grows")


@LAB.alone(4, "gold", "one graph for all steps, of at most eight kernels", "FastLamb",
           needs=(1, 2, 3), compiles=True)  # fmt: skip
@torch.no_grad()
def graph(submission, reference, lesson):
    own, optimizer = made(submission, reference)
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, examples: list):
        graphs.append(graph)
        return graph.forward

    step = torch.compile(optimizer.step, fullgraph=True, backend=backend)
    for number in range(3):
        reference.backward(own, number)
        try:
            step()
        except torch._dynamo.exc.TorchDynamoException as error:
            require(False, f"torch.compile: {str(error).strip().splitlines()[0]}", "graph")
    require_equal("graphs made for three steps", len(graphs), 1, "again")
    error = max(apart_from(own, wanted(reference, 3)))
    require_equal("largest error after three compiled steps", error, at_most(1e-5), "again")
    if find_spec("triton"):
        _, optimizer = made(submission, reference, 24)
        found = reference.kernels(optimizer.step)
        require_equal(
            "kernels that Inductor writes for 24 parameters", found, at_most(8), "kernels"
        )


CLOCK = """
import json, sys
sys.path.insert(0, sys.argv[1])
from graders.rank import load
from graders.step import lab_of
finished = lab_of("challenge_launches").finished
true, slow = finished.ten(finished.SlowLamb)
found, fast = finished.ten(load(sys.argv[2]).FastLamb, captured=True)
print(json.dumps([(found - true).abs().max().nan_to_num(9e9).item(), slow, fast]))
"""


@LAB.trial(
    5, "on a GPU", "nothing contradicts the counts", needs=(1, 2, 3, 4), world_sizes=(1,)
)
def gpu(workspace):
    if not find_spec("triton"):
        yield "triton is not on this machine: step 4 counted no kernels"
    if not workspace.has_gpus:
        yield "--gpu was not said: the counts are the verdict"
        return
    done = workspace.run("python", "-B", "-c", CLOCK, LAB.path.parents[2], workspace.path)
    last = (done.stderr.strip().splitlines() or ["no output"])[-1]
    require(not done.status, f"on this machine's GPU it failed: {last}", "gpu")
    error, slow, fast = json.loads(done.stdout.splitlines()[-1])
    require_equal(
        "largest error after ten steps, nine of them replays", error, at_most(5e-5), "again"
    )
    fact = f"times as fast as SlowLamb's ≈{slow:.0f} µs"
    require_equal(fact, slow / fast, Condition("30 or more", lambda gain: gain >= 30), "gpu")
    yield f"≈{fast:.0f} µs for a step of 48 parameters, {slow / fast:.0f} times as fast"
