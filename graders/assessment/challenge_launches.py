"""The steps of the launches challenge: numbers, waits, launches, compilation, and a GPU."""

import json
import math
from importlib.util import find_spec

import torch
import torch._dynamo  # imported here once, so that the ranks do not have to import it

from graders.dsl import Condition, Lab, at_most, import_late_parts, require, require_equal

import_late_parts()
LAB = Lab()


def make_optimizer(submission, reference, count: int = 6):
    """Return parameters with first gradients, and the learner's optimizer of them."""
    parameters = reference.parameters(count)
    optimizer = submission.FastLamb(parameters)
    before = [p.detach().flatten().tolist() for p in reference.parameters(count)]
    fact = "largest change of a parameter when FastLamb is created"
    require_equal(fact, max(differences(parameters, before)), at_most(0), "moved")
    reference.backward(parameters)
    return parameters, optimizer


def expected(reference, steps: int) -> list[list[float]]:
    """Return all numbers of six parameters after this number of steps.

    They are computed one by one in fp64, without the operators of torch.
    """
    parameters, results = reference.parameters(6), []
    grads = []
    for step in range(steps):
        reference.backward(parameters, step)
        grads.append([p.grad.flatten().tolist() for p in parameters])
    for i, p in enumerate(parameters):
        x = p.detach().flatten().tolist()
        m = v = [0.0] * len(x)
        for t in range(1, steps + 1):
            g = grads[t - 1][i]
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


def differences(parameters, true: list[list[float]]) -> list[float]:
    """Return for each parameter the largest difference from its true numbers.

    A NaN counts as a difference of 9e9.
    """
    return [
        (p.detach().flatten() - torch.tensor(x)).abs().max().nan_to_num(9e9).item()
        for p, x in zip(parameters, true, strict=True)
    ]


@LAB.alone(1, "the same numbers", "three steps as in fp64, parameters of zeros too", "FastLamb")
@torch.no_grad()
def numbers(submission, reference, lesson):
    parameters, optimizer = make_optimizer(submission, reference)
    others, other_optimizer = make_optimizer(submission, reference)
    reference.backward(others, 1)
    before = [p.grad.clone() for p in parameters]
    optimizer.step(), other_optimizer.step()
    pairs = zip(parameters, before, strict=True)
    unchanged = all(torch.equal(p.grad, grad) for p, grad in pairs)
    require_equal("the gradients stay as they are", unchanged, True, "gradients")
    pairs = zip(parameters, others, strict=True)
    uses_gradients = not all(torch.equal(p, q) for p, q in pairs)
    fact = "different gradients lead to different parameters"
    require_equal(fact, uses_gradients, True, "gradients")
    lengths = [
        (p - q).norm() / q.norm() / reference.RATE
        for p, q in zip(parameters, reference.parameters(6), strict=True)
        if q.any()
    ]  # the trust ratio makes every update as long as its parameter, before the learning rate
    error, bound = max(abs(length.item() - 1) for length in lengths), at_most(1e-5)
    require_equal("relative error of an update's length", error, at_most(1e-3), "ratio")
    first = differences(parameters, expected(reference, 1))
    moved = parameters[1].detach().isfinite().all() and parameters[1].any()
    hint = "update" if moved else "zeros"
    require_equal("error of the parameter of zeros after a step", first[1], bound, hint)
    for step in (1, 2):
        reference.backward(parameters, step)
        optimizer.step()
    error = max(*first, *differences(parameters, expected(reference, 3)))
    require_equal("largest error in three steps", error, bound, "update")


@LAB.alone(2, "bronze", "the host waits for nothing", "FastLamb", needs=(1,))
@torch.no_grad()
def waits(submission, reference, lesson):
    _, optimizer = make_optimizer(submission, reference)
    with reference.Counted() as counts:
        optimizer.step()
    require_equal("numbers for which the host waits in a step", counts.waits, 0, "waits")


@LAB.alone(3, "silver", "as many launches for 24 parameters as for 6", "FastLamb", needs=(1,))
@torch.no_grad()
def launches(submission, reference, lesson):
    found = []
    for count in (6, 24):
        _, optimizer = make_optimizer(submission, reference, count)
        with reference.Counted() as counts:
            optimizer.step()
        found.append(counts.launches)
    fact = f"launches for 24 parameters; for 6 there are {found[0]}"
    require_equal(fact, found[1], found[0], "grows")


@LAB.alone(4, "gold", "one graph for all steps, of at most eight kernels", "FastLamb",
           needs=(1, 2, 3), compiles=True)  # fmt: skip
@torch.no_grad()
def graph(submission, reference, lesson):
    parameters, optimizer = make_optimizer(submission, reference)
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, examples: list):
        graphs.append(graph)
        return graph.forward

    step = torch.compile(optimizer.step, fullgraph=True, backend=backend)
    for number in range(3):
        reference.backward(parameters, number)
        try:
            step()
        except torch._dynamo.exc.TorchDynamoException as error:
            require(False, f"torch.compile: {str(error).strip().splitlines()[0]}", "graph")
    require_equal("graphs made for three steps", len(graphs), 1, "again")
    error = max(differences(parameters, expected(reference, 3)))
    require_equal("largest error after three compiled steps", error, at_most(1e-5), "again")
    if find_spec("triton"):
        _, optimizer = make_optimizer(submission, reference, 24)
        found = reference.kernels(optimizer.step)
        require_equal(
            "kernels that Inductor writes for 24 parameters", found, at_most(8), "kernels"
        )


MEASURE = """
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
        yield "triton is not installed on this machine, so step 4 counted no kernels"
    if not workspace.has_gpus:
        yield "--gpu was not said: the counts are the verdict"
        return
    result = workspace.run("python", "-B", "-c", MEASURE, LAB.path.parents[2], workspace.path)
    last_line = (result.stderr.strip().splitlines() or ["no output"])[-1]
    require(not result.status, f"on this machine's GPU it failed: {last_line}", "gpu")
    error, slow, fast = json.loads(result.stdout.splitlines()[-1])
    require_equal(
        "largest error after ten steps, nine of them replays", error, at_most(5e-5), "again"
    )
    fact = f"times as fast as SlowLamb's ≈{slow:.0f} µs"
    enough = Condition("30 or more", lambda speedup: speedup >= 30)
    require_equal(fact, slow / fast, enough, "gpu")
    yield f"≈{fast:.0f} µs for a step of 48 parameters, {slow / fast:.0f} times as fast"
