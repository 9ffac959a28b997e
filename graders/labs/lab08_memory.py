"""Grade lab 08: test each step, and choose the hint that fits the mistake.

Each step is graded separately. All functions that a step does not grade come from the finished
lab. The models here are small, and their sizes differ from those of the lab. Bytes are counted
by the `Memory` of the finished lab. If a number is wrong, it is compared with the numbers that
common mistakes give. If it equals one of these, this mistake determines the hint.
"""

import functools
import math
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch._dynamo  # optimizers import it; import it here once for all processes
from torch import nn

from graders.dsl import (
    Lab,
    Wrong,
    allclose,
    describe_error,
    isclose,
    matching_hint,
    matching_name,
    require,
    show,
)

LAB = Lab()
RETURNED = {  # errors that occur if a function of the learner returns None
    "cannot unpack non-iterable NoneType|'NoneType' object is not iterable": "returned",
    "unsupported format string passed to NoneType": "returned",
}


def small_model(
    reference: ModuleType, dropout: float = 0.5, blocks: int = 3, width: int = 4
) -> nn.Module:
    torch.manual_seed(3)
    return reference.Net(width, 8, [reference.Block(8, dropout) for _ in range(blocks)])


def rows_of(n: int, seed: int = 5, width: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, width, generator=generator)
    return x, torch.sin(3 * x)


# --- step 1 -------------------------------------------------------------------------------


@LAB.alone(
    1, "where the bytes are",
    "the prediction and the measurement of all four parts are right",
    "predict measure_parts", crashes=RETURNED,
)  # fmt: skip
def parts(submission, reference, lesson):
    # for these sizes, each mistake gives a different number
    for width, hidden, blocks, rows in ((12, 8, 3, 7), (32, 64, 8, 256)):
        p, g, s, saved = submission.predict(width, hidden, blocks, rows)
        true = reference.predict(width, hidden, blocks, rows)
        where = f"width {width}, h = {hidden}, {blocks} blocks, {rows} rows"
        what = f"{where}: predicted {p:,} bytes of parameters, and not {true.parameters:,}"
        require(isclose(p, true.parameters), what, "biases")
        what = f"{where}: predicted {g:,} bytes of gradients and {s:,} of states, and not"
        what += f" {true.gradients:,} and {true.states:,}"
        require(isclose(g, true.gradients) and isclose(s, true.states), what, "states")
        each, last = blocks * rows * hidden, 4 * rows * (hidden + width)
        wrong_by = {
            "missing_part": -4 * each,
            "missing_wide": -16 * each,
            "statistics": [-8 * blocks * rows, -4 * blocks * rows],
            "mask_bytes": [12 * each, -3.5 * each],
            "not_saved": 16 * each,
            "residual": 4 * each,
            "one_block": (true.activations - last) / blocks + last - true.activations,
            "last_input": -4 * rows * hidden,
            "last_loss": [-4 * rows * width, 4 * rows * (hidden - width)],
            "last_layer": -last,
            "batch_counted": 4 * rows * width,
        }
        what = (
            f"{where}: predicted {saved:,} bytes of activations, and not {true.activations:,}"
        )
        mistakes = {
            hint: [true.activations + n for n in (by if isinstance(by, list) else [by])]
            for hint, by in wrong_by.items()
        }
        require(isclose(saved, true.activations), what, matching_hint(saved, mistakes))
    yield "predict"

    inputs, targets = (each.double() for each in rows_of(40, width=16))

    def measured(measure: Callable) -> Sequence[int]:
        """Measure in float64, because the formulas of this step are wrong for float64."""
        with reference.Memory("cpu") as memory:
            build = functools.partial(small_model, reference, blocks=2, width=16)
            return measure(memory, lambda: build().double(), inputs, targets)

    p, g, s, a = measured(submission.measure_parts)
    true = measured(reference.measure_parts)
    what = f"measured {p:,}, {g:,}, {s:,} and {a:,} bytes, and not "
    what += ", ".join(f"{n:,}" for n in true)
    slack = 8 * 40 * 16  # bytes of the outputs of the model, to which a variable may refer
    require(sorted((p, g, s, a)) != sorted(true) or (p, g, s, a) == true, what, "parts_order")
    require(not isclose(2 * p, true.parameters), what, "formula")
    require(not isclose(g, true.gradients - true.activations, 0.05), what, "gradients_when")
    sums = 0 <= a - true.parameters - true.activations <= slack or g >= 2 * true.gradients
    require(not sums and s <= 1.5 * true.states, what, "differences")
    require(a > 0.2 * true.activations, what, "after_backward")
    require(isclose(s, true.states, 0.05), what, "moments_when")
    require(a <= true.activations + slack, what, "peak_of_forward")
    good = isclose(p, true.parameters) and 0 <= g - true.gradients <= slack
    require(good and a >= true.activations, what, "other")


# --- step 2 -------------------------------------------------------------------------------


class SimulatedMemory:
    """A simulated memory, in which only the numbers of bytes exist."""

    def __init__(self) -> None:
        self.used, self.peak, self.calls = 100, 10_000, 0
        self.left = (1000, 10, 30, 15, 6)  # bytes that each call leaves

    def step(self) -> None:
        self.used += self.left[self.calls] if self.calls < len(self.left) else 9
        self.calls += 1


@LAB.alone(
    2, "what the log keeps",
    "a leak is found, and each batch leaves only two numbers in the log",
    "growth logged_step", crashes={"does not require grad": "no_grad_all"},
)  # fmt: skip
def leak(submission, reference, lesson):
    memory = SimulatedMemory()
    found = submission.growth(memory, memory.step, 4)
    require(found is not None, "growth returns None", "returned")
    what = f"five calls leave 1000, 10, 30, 15 and 6 bytes, and growth(…, 4) returns {found};"
    mistakes = {
        "not_subtracted": [1161, 290.25, 232.2],
        "peak_read": 0,
        "warm_up": [263.75, 1055, 1061, 265.25, 212.2],
        "not_divided": [61, 12.2],
        "few_calls": [9, 6, 10, 15, 2.5, 1.5],
    }
    other = "other" if memory.calls == 5 else "few_calls"
    hint = matching_hint(found, mistakes, other=other)
    hint = "rounded_down" if found == 15 and memory.calls == 5 else hint
    require(found == 15.25, f"{what} it should return 15.25", hint)
    yield "growth"

    def train(step: Callable) -> tuple[list[torch.Tensor], list, int]:
        """Return the parameters, the log, and the growth by the last of three calls."""
        log, used = [], []
        with reference.Memory("cpu") as memory:
            model = small_model(reference)
            adam = reference.make_adam(model)
            model.register_forward_pre_hook(lambda model, _: modes.append(model.training))
            torch.manual_seed(7)
            for seed in range(3):
                step(model, adam, *batches[seed], log)
                used.append(memory.used)
            modes.append(model.training)
            return [p.detach().clone() for p in model.parameters()], log, used[2] - used[1]

    batches, modes = [rows_of(24, seed) for seed in range(3)], []
    parameters, log, grown = train(submission.logged_step)
    true, true_log, _ = train(reference.logged_step)
    pairs = len(log) == 3 and all(isinstance(x, (tuple, list)) and len(x) == 2 for x in log)
    pairs = pairs and all(isinstance(x, (float, torch.Tensor)) for pair in log for x in pair)
    what = (
        f"after 3 calls the log has {len(log)} entries, and it should have 3 pairs of numbers"
    )
    require(pairs, what, "log_values")
    before, after = (
        any(getattr(pair[i], "requires_grad", False) for pair in log) for i in (0, 1)
    )
    is_trained = allclose(parameters, true)
    if grown > 0:
        what = f"each call leaves {grown:,} bytes behind"
        require(not after, what, "graph_after")
        require(not before, what, "retained")
        raise Wrong(what, "other" if is_trained else "zero_grad")
    require(not (before or after), "a number in the log has a graph", "graph_before")
    first, true_first = [float(x) for x in log[0]], list(true_log[0])
    is_unchanged = allclose(parameters, list(small_model(reference).parameters()))
    require(not is_unchanged, "the model is the same after three calls", "no_update")
    require(all(modes), "in one of three calls the model is in eval mode", "log_mode")
    what = f"the first pair is {first}, not {true_first}"
    require(allclose(first, true_first), what, "log_values")
    require(is_trained, "after three calls the parameters have wrong values", "zero_grad")


# --- step 3 -------------------------------------------------------------------------------


@LAB.alone(
    3, "evaluation",
    "the loss is that of all rows, there is no graph, and the mode of the model is restored",
    "evaluate", crashes=RETURNED | {
        "non-iterable (float|Tensor)|iteration over a 0-d": "pair", "stack expects": "outputs",
        "division by zero|non-empty list|'generator' object|object of type 'generator'": (
            "batches_once"
        ),
    },
)  # fmt: skip
def evaluation(submission, reference, lesson):
    batches = [rows_of(n, n) for n in (60, 60, 60, 7)]

    def run(evaluate: Callable, training: bool) -> tuple[Any, int, list[tuple], nn.Module]:
        """Return result, peak, (training, recorded, rows) of each forward, and model."""
        forwards: list[tuple] = []
        with reference.Memory("cpu") as memory:
            model = small_model(reference).train(training)
            model.blocks[0].dropout.register_forward_pre_hook(
                lambda dropout, inputs: forwards.append(
                    (dropout.training, inputs[0].requires_grad, len(inputs[0]))
                )
            )
            result = evaluate(model, (pair for pair in batches))
        return result, memory.peak, forwards, model

    (loss, outputs), peak, forwards, model = run(submission.evaluate, True)
    is_recording = torch.is_grad_enabled()
    torch.set_grad_enabled(True)
    (true_loss, true), enough, _, _ = run(reference.evaluate, True)
    require(forwards, "the model did not run", "batches_once")
    modes, recorded, rows = zip(*forwards, strict=True)
    what = f"evaluate returns outputs of the type {type(outputs).__name__}"
    require(isinstance(outputs, torch.Tensor), what, "outputs")
    what = f"the peak is {peak:,} bytes, and {enough:,} bytes are enough"
    require(not any(recorded), what, "evaluation_graph")
    require(not outputs.requires_grad, "the outputs require a gradient", "evaluation_graph")
    what = f"the model processed {max(rows)} rows at a time, but a batch has at most 60 rows"
    require(max(rows) <= 60, what, "all_at_once")
    what = f"the peak is {peak:,} bytes, and {enough:,} bytes are enough"
    require(peak < 1.4 * enough, what, "evaluation_memory")
    yield "nothing is recorded"
    require(not any(modes), "the model was in training mode during the forward", "dropout")
    require(
        allclose(outputs, true),
        f"the outputs, of shape {list(outputs.shape)}, are not those of the batches in order",
        "outputs",
    )
    targets = [y for _, y in batches]
    means = map(reference.mean_square, true.split(60), targets)
    loss, means = float(loss), [each.item() for each in means]
    hint = matching_hint(loss, {
        "mean_of_means": sum(means) / 4, "loss_sum": [187 * true_loss, 4 * true_loss],
        "last_batch": [means[-1], 7 * means[-1], 7 * means[-1] / 187],
    }, 1e-4)  # fmt: skip
    require(allclose(loss, true_loss), f"the loss is {loss:.4f}, not {true_loss:.4f}", hint)
    exact = math.isclose(loss, true_loss, rel_tol=1e-5)
    require(exact, f"the loss is {loss:.7f}, not {true_loss:.7f}", "loss_rounded")
    yield "outputs and loss"
    require(is_recording, "after evaluate, autograd does not record", "grad_left_off")
    frozen = sum(not p.requires_grad for p in model.parameters())
    what = f"after evaluate, {frozen} parameters do not require a gradient"
    require(not frozen, what, "frozen")
    evaluating = sum(not part.training for part in model.modules())
    what = f"{evaluating} parts of a model in training mode were left in eval mode"
    require(not evaluating, what, "mode")
    *_, model = run(submission.evaluate, False)
    training = any(part.training for part in model.modules())
    require(not training, "a model in eval mode was left in training mode", "mode")


# --- step 4 -------------------------------------------------------------------------------


def adam_once(
    p, g, m, v, t: int, corrected: bool = True, epsilon: str = "behind", rate: float = 0.5,
    late: bool = False, power: int = 0, only: str = "mv", first: bool = True,
) -> list[torch.Tensor]:  # fmt: skip
    """Return p, m and v after a step of Adam with η = 0.5 and ε = 0.1, not in place.

    `late`: p uses the old moments. `power` is added to t in the correction of v. `only` names
    the moments that are corrected. `first`: p is updated with m, and not with g.
    """
    old = m, v
    m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
    new = m, v
    if late:
        m, v = old
    m = m if first else g
    c1, c2 = (1 - 0.9**t, 1 - 0.999 ** (t + power)) if corrected else (1.0, 1.0)
    c1, c2 = c1 if "m" in only else 1.0, c2 if "v" in only else 1.0
    roots = {
        "behind": (v / c2).sqrt() + 0.1,
        "below": (v / c2 + 0.1).sqrt(),
        "before": (v.sqrt() + 0.1) / math.sqrt(c2),
        "missing": (v / c2).sqrt(),
        "no root": v / c2 + 0.1,
        "outside": v.sqrt() / c2 + 0.1,
    }
    return [p - rate * m / c1 / roots[epsilon], *new]


@LAB.alone(
    4, "the peak of a step",
    "Adam works in place with one temporary tensor, and backward leaves no gradient",
    "update AdamInBackward", crashes={
        r"^tensor\(|NoneType": "hook_kind", "division by zero": "count_t",
    },
)  # fmt: skip
def peak(submission, reference, lesson):
    submission.ETA, submission.EPSILON = 0.5, 0.1
    for t in (1, 3):
        generator = torch.Generator().manual_seed(t)
        p, g, m = (torch.randn(1000, generator=generator) for _ in range(3))
        v = torch.rand(1000, generator=generator)
        old = p.clone(), m.clone(), v.clone()
        with reference.Memory("cpu") as memory:
            try:
                submission.update(p, gradient := g.clone(), m, v, t)
            except ZeroDivisionError as error:
                what = f"t = {t}: {describe_error(error, submission)[0]}"
                raise Wrong(what, "bias_correction") from error
        peak = memory.peak / g.nbytes - 1  # g's copy was made inside
        unchanged = [
            n for n, a, b in zip("pmv", (p, m, v), old, strict=True) if torch.equal(a, b)
        ]
        require(not unchanged, f"t = {t}: {' and '.join(unchanged)} did not change", "in_place")
        before = old[0], g, *old[1:], t
        true, *moments = adam_once(*before)
        corrected = allclose(m, moments[0] / (1 - 0.9**t)) or allclose(
            v, moments[1] / (1 - 0.999**t)
        )
        hint = "moments_corrected" if corrected else "moments"
        require(allclose([m, v], moments), f"t = {t}: m or v is not right", hint)
        found = matching_name(
            p,
            right=true,
            bias_correction=adam_once(*before, corrected=False)[0],
            epsilon=adam_once(*before, epsilon="below")[0],
            epsilon_=adam_once(*before, epsilon="before")[0],
            bias_correction_=adam_once(*before[:-1], t=1)[0],
            bias_correction__=adam_once(*before, power=1)[0],
            bias_correction___=adam_once(*before[:-1], t=max(1, t - 1))[0],
            bias_correction____=adam_once(*before, only="m")[0],
            bias_correction_____=adam_once(*before, only="v")[0],
            epsilon__=adam_once(*before, epsilon="missing")[0],
            root=adam_once(*before, epsilon="no root")[0],
            root_=adam_once(*before, epsilon="outside")[0],
            gradient_used=adam_once(*before, first=False)[0],
            old_moments=adam_once(*before, late=True)[0],
            rate=adam_once(*before, rate=1.0)[0],
            wrong_sign=2 * old[0] - true,
        ).rstrip("_")
        require(found == "right", f"t = {t}: p is not right", found)
        what = f"the temporary tensors have {peak:.0f} times the size of the parameter, and "
        what += "one of this size is enough"
        require(peak <= 1.1, what, "temporaries")
        require(torch.equal(gradient, g), f"t = {t}: g has changed", "gradient_changed")
    yield "update is Adam's step, in place"

    # from here on, use the update of the finished lab with its learning rate
    submission.update, submission.ETA, submission.EPSILON = (
        reference.update,
        reference.ETA,
        reference.EPSILON,
    )
    model, true_model = (small_model(reference, dropout=0.0) for _ in range(2))
    try:
        adam = submission.AdamInBackward(model)
    except (AttributeError, TypeError) as error:
        require("None" not in str(error), "the constructor uses a gradient", "hook_called")
        raise
    true_adam = reference.make_adam(true_model)
    start = [p.detach().clone() for p in model.parameters()]
    for seed in range(3):
        x, y = rows_of(6, seed)
        reference.mean_square(true_model(x), y).backward()
        loss = reference.mean_square(model(x), y)
        try:
            loss.backward()
        except (AttributeError, TypeError) as error:
            has_hook = any(p._post_accumulate_grad_hooks for p in model.parameters())
            require(
                not has_hook or "None" not in f"{error}",
                describe_error(error, submission)[0],
                "gradient_none",
            )
            raise
        if seed == 0:
            is_unchanged = list(map(torch.equal, model.parameters(), start))
            what = f"{is_unchanged.count(False)} of {len(is_unchanged)} parameters changed in"
            require(not any(is_unchanged), f"{what} backward", "no_hook")
        left = sum(p.grad is not None for p in model.parameters())
        require(not left, f"after backward, {left} gradients are not None", "grad_kept")
        true_adam.step()
        true_adam.zero_grad()
    counts = {int(state["t"]) for state in adam.states.values()}
    require(counts == {3}, f"after 3 steps t is {sorted(counts)}", "count_t")
    good = allclose(list(model.parameters()), list(true_model.parameters()), 0, 1e-4)
    require(
        good, "after three steps the parameters are not those of torch.optim.Adam", "count_t"
    )
    with reference.Memory("cpu") as memory:
        used = []
        for seed in range(2):
            reference.mean_square(*map(model, [rows_of(6, seed)[0]]), y).backward()
            used.append(memory.used)
    what = f"each step leaves {used[1] - used[0]:,} bytes behind"
    require(used[1] <= used[0], what, "grad_kept")


# --- step 5 -------------------------------------------------------------------------------


@LAB.alone(
    5, "the batch in pieces",
    "all rows that fit are used, and loss and gradients are those of the whole batch",
    "rows_that_fit accumulate",
    crashes={
        "through the graph a second time": "added_twice",
        "must match the size of tensor": "pieces_differ",
    },
)  # fmt: skip
def accumulation(submission, reference, lesson):
    for limit, fixed, each, true in (
        (1000, 100, 70, 12),
        (1000, 100, 90, 10),
        (160, 70, 90, 1),
    ):
        try:
            found = submission.rows_that_fit(limit, fixed, each)
        except reference.OutOfMemory as error:
            what = f"rows_that_fit({limit}, {fixed}, {each}) raises OutOfMemory, but {true}"
            raise Wrong(f"{what} row{'s' * (true > 1)} would fit", "rows_exact") from error
        what = f"rows_that_fit({limit}, {fixed}, {each}) is {found!r}, not {true}"
        require(found is not None, what, "returned")
        far = isinstance(found, (int, float)) and abs(found - true) > 1
        hint = "rows_fixed" if far or found == limit // each else "rows_round"
        require(isinstance(found, int) and found == true, what, hint)
    for limit in (150, 50):
        try:
            found = submission.rows_that_fit(limit, 100, 70)
        except reference.OutOfMemory:
            continue
        except NotImplementedError:
            raise
        except (ArithmeticError, ValueError, RuntimeError, MemoryError) as error:
            found = type(error).__name__
        raise Wrong(f"rows_that_fit({limit}, 100, 70) is {found!r}", "rows_none")
    yield "rows_that_fit"
    check_pieces(submission, reference, [1, 1, 1, 0, 1, 0, 0, 0, 1, 0], 4)
    check_pieces(submission, reference, [1, 1, 1, 0, 0, 0, 0, 0, 1, 0], 2)


def check_pieces(
    submission: ModuleType, reference: ModuleType, mask: list[int], rows: int
) -> None:
    """Test `accumulate` on ten rows, with `rows` rows at a time. `mask` is 0 for padding."""
    x, y = rows_of(10)
    keep, all_rows = torch.tensor(mask).bool(), torch.ones(10).bool()
    whole, n = (x, y, keep), sum(mask)
    pieces = list(zip(x.split(rows), y.split(rows), keep.split(rows), strict=True))

    def part(model: nn.Module, piece: Sequence, by: float | str | None = None) -> torch.Tensor:
        a, b, k = piece
        total = (reference.square_of_rows(model(a), b) * k).sum()
        if by is None:
            return total / k.sum().clamp(min=1)
        return total / (len(a) if by == "rows" else by)

    def gradients(*some: Sequence, by: float | str | None = None, share: float = 1) -> list:
        model = small_model(reference, 0.0)
        (sum(part(model, piece, by) for piece in some) / share).backward()
        return [p.grad for p in model.parameters()]

    model, seen = small_model(reference, 0.0), []
    model.register_forward_pre_hook(
        lambda model, inputs: seen.append((len(inputs[0]), model.last.bias.grad is not None))
    )
    with reference.Memory("cpu") as memory:
        loss = submission.accumulate(model, x, y, keep, rows)
    true_model = small_model(reference, 0.0)
    with reference.Memory("cpu") as needed:
        reference.accumulate(true_model, x, y, keep, rows)
    require(loss is not None, "accumulate returns nothing", "loss_returned")
    found_gradients = [p.grad for p in model.parameters()]
    most = max((n for n, _ in seen), default=0)
    what = f"{most} rows were processed together, and {rows} are allowed"
    require(most <= rows, what, "rows_at_once")
    found = matching_name(
        found_gradients,
        right=gradients(whole, by=n),
        share=gradients(whole, by=1),
        share_=gradients(whole, by=rows),
        divided_again=gradients(whole, by=n, share=len(pieces)),
        padding_counted=gradients(whole, by=10),
        keep_ignored=gradients((x, y, all_rows), by=10),
        keep_ignored_=gradients((x, y, all_rows), by=n),
        means_added=gradients(*pieces, share=len(pieces)),
        means_added_=gradients(*pieces),
        means_added__=gradients(*pieces, by="rows"),
        means_added___=gradients(*pieces, by="rows", share=len(pieces)),
        keep_ignored__=gradients((x, y, ~keep), by=n),
        first_only=gradients(pieces[0], by=n),
        zeroed=gradients(pieces[-1], by=n),
        rows_lost=gradients(*pieces[:-1], by=n),
        added_twice=gradients(*pieces, *pieces[:2], pieces[0], by=n),
    ).rstrip("_")
    if all(gradient is None for gradient in found_gradients):
        found = "no_backward"
    if found == "rows_lost" and len(x) % rows == 0:  # then no micro-batch is smaller
        found = "stopped_early"
    if math.isnan(loss) or (
        found_gradients[0] is not None and found_gradients[0].isnan().any()
    ):
        found = "padding_alone"
    require(found == "right", "loss or gradients are not those of the whole batch", found)
    is_late = any(not has_gradient for _, has_gradient in seen[1:])
    require(
        not is_late,
        "the second forward pass came before the first backward pass",
        "backward_late",
    )
    each = reference.predict(4, 8, 3, 4).activations
    what = f"the peak is {memory.peak:,} bytes, and {needed.peak:,} are enough for {rows} rows"
    require(memory.peak < needed.peak + each / 2, what, "backward_late")
    graph = getattr(loss, "requires_grad", False)
    require(not graph, "the loss that accumulate returns has a graph", "loss_returned")
    true = part(small_model(reference, 0.0), whole, n).item()
    what = f"the loss returned is {float(loss):.4f}, not {true:.4f}"
    require(allclose(float(loss), true), what, "loss_returned")


# --- step 6 -------------------------------------------------------------------------------


def run_chain(reference: ModuleType, run: Callable, dropout: float) -> tuple[Any, list, bool]:
    """Run three blocks, and return the output, the gradients, and a boolean.

    The boolean is True if backward has not changed the state of the random generator. The input
    of the first block is not a leaf.
    """
    model = small_model(reference, dropout)
    for p in model.parameters():
        p.grad = torch.ones_like(p)  # as if from an earlier micro-batch
    x = rows_of(6, width=8)[0].requires_grad_()
    torch.manual_seed(9)
    y = 2 * x
    for block in model.blocks:
        y = run(block, y)
    state = torch.get_rng_state()
    (y * y.detach().cos()).sum().backward()
    is_restored = torch.equal(state, torch.get_rng_state())
    return y, [x.grad, *(p.grad for p in model.blocks.parameters())], is_restored


def saved_bytes(reference: ModuleType, run: Callable) -> int:
    """Return the bytes in use between forward and backward, without the parameters."""
    with reference.Memory("cpu") as memory:
        model, x = small_model(reference), torch.randn(50, 8, requires_grad=True)
        y, before = 2 * x, memory.used
        for block in model.blocks:
            y = run(block, y)
            name = getattr(run, "__name__", "Checkpoint.forward")
            require(y is not None, f"{name} returns None", "returned")
        return memory.used - before


@LAB.alone(
    6, "compute it again",
    "only inputs are saved, and gradients and random numbers are those without checkpoints",
    "Checkpoint checkpoint_by_torch", crashes={
        "does not require grad": "enable_grad", "implicitly created only": "ones",
        "incorrect number of gradients|not enough values|gradient different than": "returns",
        "'Tensor' object is not callable": "torch_plain",
        "'NoneType' object has no attribute 'device'|not NoneType": "returned",
    },
)  # fmt: skip
def checkpoint(submission, reference, lesson):
    run, names = submission.Checkpoint.apply, set(vars(submission.Checkpoint))
    saved, without = saved_bytes(reference, run), saved_bytes(reference, reference.plain)
    enough = 3 * 50 * 8 * 4
    what = f"{saved:,} bytes are saved for backward; {enough:,} are enough, and without a "
    what += f"checkpoint {without:,} bytes are saved"
    require(saved < (enough + without) / 2, what, "recorded")
    require(saved < 2 * enough, what, "kept_twice")
    new = ", ".join(sorted(set(vars(submission.Checkpoint)) - names))
    require(not new, f"forward sets attributes of the class Checkpoint: {new}", "class_state")

    leaf = torch.randn(6, 8, requires_grad=True)
    block, x = reference.Block(8, 0.0), 2 * leaf
    (gradient,) = torch.autograd.grad(run(block, x).sum(), x, allow_unused=True)
    what = "backward of the block also ran backward of the computation before the block"
    require(leaf.grad is None, what, "cut_off")
    require(
        gradient is not None, "backward returns no gradient for the input", "input_gradient"
    )
    for dropout in (0.0, 0.5):
        y, gradients, is_restored = run_chain(reference, run, dropout)
        true_y, true, _ = run_chain(reference, reference.plain, dropout)
        hint = "forward_seeded" if dropout else "other"
        require(allclose(y, true_y), "the output is not that of the block", hint)
        if dropout:
            what = "with dropout, the gradients are not those without a checkpoint"
            require(allclose(gradients, true), what, "mask_again")
            require(is_restored, "backward changed the state of the generator", "put_back")
        elif not allclose(gradients, true):
            (first,) = torch.autograd.grad(run(block, x).sum(), x)
            (twice,) = torch.autograd.grad(2 * run(block, x).sum(), x)
            hint = "parameters_missed" if allclose(gradients[0], true[0]) else "other"
            hint = "ones" if allclose(first, twice) else hint
            hint = "input_gradient" if allclose(first, torch.ones_like(first)) else hint
            raise Wrong("the gradients are not those without a checkpoint", hint)
        yield "with dropout, too" if dropout else "without dropout, gradients as plain"

    with reference.Memory("cpu") as memory:
        leaf = torch.randn(50, 8, requires_grad=True)
        block, x = reference.Block(8), 2 * leaf
        size, y = x.nbytes, run(block, x)
        y.sum().backward()
        before = memory.used
        del x
    require(
        memory.used <= before - size,
        "after backward, the input is still in memory",
        "save_for_backward",
    )
    yield "the input is freed"

    run = submission.checkpoint_by_torch
    saved = saved_bytes(reference, run)
    what = f"checkpoint_by_torch saves {saved:,} bytes, and {enough:,} are enough"
    require(saved < (enough + without) / 2, what, "torch_plain")
    _, gradients, _ = run_chain(reference, run, 0.5)
    what = "checkpoint_by_torch: the gradients are not those without a checkpoint"
    require(allclose(gradients, true), what, "torch_mask")
    y = run(reference.Block(8, 0.0), torch.randn(6, 8))
    what = "checkpoint_by_torch records nothing if the input requires no gradient"
    require(y.requires_grad, what, "reentrant")


# --- step 7 -------------------------------------------------------------------------------

UNITS = ((50, 10, 90), (20, 10, 3), (70, 12, 60), (33, 10, 4), (41, 9, 31), (60, 11, 20))
EARLY = ((20, 10, 3), (90, 10, 50), (30, 10, 5), (12, 4, 2))  # the peak is not at the end


@LAB.alone(
    7, "what to compute again",
    "the peaks are right, and the chosen units have the fewest FLOPs that fit",
    "predicted_peak choose",
    crashes=RETURNED | {"'NoneType' object is not subscriptable": "nothing_fits"},
)  # fmt: skip
def choice(submission, reference, lesson):
    all_units, early = ([reference.Unit(*unit) for unit in each] for each in (UNITS, EARLY))
    choices = [(all_units, c) for c in ((), (5,), (0, 2), (1, 3, 4), range(6), (2, 3, 5))]
    for units, chosen in [*choices, (early, (1, 3)), (early, (0, 1, 2))]:
        found, true = (
            submission.predicted_peak(units, chosen),
            reference.predicted_peak(units, chosen),
        )
        stored = [u.input if i in chosen else u.saved for i, u in enumerate(units)]
        # bytes when backward begins with unit i
        whole = [sum(stored[:i]) + u.saved for i, u in enumerate(units)]
        again = max((units[i].saved - units[i].input for i in chosen), default=0)
        mistakes = {
            "computed_again": sum(stored),
            "freed_already": sum(stored) + again,
            "not_largest": whole[-1],
            "left_behind": [
                max(u.saved + sum((b.input, b.saved)[which(j)] for j, b in enumerate(units[:i]))
                    for i, u in enumerate(units))
                for which in (lambda j: True, lambda j: False, chosen.__contains__)
            ],
            "input_twice": [
                max(each + sign * u.input * (i in chosen or always)
                    for i, (each, u) in enumerate(zip(whole, units, strict=True)))
                for always in (False, True) for sign in (1, -1)
            ],
        }  # fmt: skip
        what = f"with {set(chosen) or 'no unit'} checkpointed, the peak is {found}, not {true}"
        require(found is not None, "predicted_peak returns None", "returned")
        require(found == true, what, matching_hint(found, mistakes))
    found, true = (
        submission.predicted_peak(early, iter((1, 2))),
        reference.predicted_peak(early, (1, 2)),
    )
    what = f"with an iterator over 1 and 2 as `chosen`, the peak is {found}, not {true}"
    require(found == true, what, "chosen_once")
    yield "predicted_peak"
    submission.predicted_peak = reference.predicted_peak
    units = all_units
    cases = [(units, budget) for budget in (300, 250, 214, 190, 160, 130, 115, 105, 60, 40)]
    cases += [(units[:3], 100), (units[::-1], 170), (early, 110), (early, 100), (early, 200)]
    for some, budget in cases:
        true, what = reference.choose(some, budget), f"budget {budget} for {len(some)} units: "
        try:
            found = submission.choose(some, budget)
        except reference.OutOfMemory as error:
            require(true is not None, f"{what}choose raises OutOfMemory", "nothing_fits")
            raise Wrong(f"{what}choose raises OutOfMemory, but {true} fits", "other") from error
        what += repr(found)
        if true is None:
            require(found is None, what, "nothing_fits")
            continue
        name = true or "the empty set"
        require(
            found is not None, f"{what}, although {name} fits", "other" if true else "empty_set"
        )
        numbers = list(found) if isinstance(found, Iterable) else [found]
        good = all(type(each) is int and 0 <= each < len(some) for each in numbers)
        require(good and len(set(numbers)) == len(numbers), what, "choose_kind")
        from_0 = [each - 1 for each in numbers]  # if the learner counts from 1
        require(not (from_0 and min(from_0) >= 0 and set(from_0) == true), what, "choose_kind")
        require(reference.predicted_peak(some, found) <= budget, what, "does_not_fit")
        cost, least = (sum(some[i].flops for i in which) for which in (found, true))
        hint = "exact_fit" if reference.predicted_peak(some, true) == budget else "too_dear"
        what = f"{what} costs {cost} FLOPs, and {name} costs {least}"
        if not true and cost == min(unit.flops for unit in some):
            hint = "empty_set"  # the best of all other sets
        require(cost == least, what, hint)


# --- step 8 -------------------------------------------------------------------------------


def block_of(address: int, size: int, requested: int, state: str) -> dict:
    block = {"address": address, "size": size, "requested_size": requested, "state": state}
    return block | {"frames": []}


def segment_of(address: int, kind: str, *blocks: tuple[int, int, str]) -> dict:
    """Return a segment like those of `torch.cuda.memory._snapshot()`.

    A block is given as (size, requested size, state).
    """
    made, sizes = [], {"a": 0, "p": 0, "i": 0}
    states = {"a": "active_allocated", "p": "active_pending_free", "i": "inactive"}
    for size, requested, state in blocks:
        made.append(block_of(address + sum(sizes.values()), size, requested, states[state]))
        sizes[state] += size
    return {
        "device": 0, "address": address, "total_size": sum(sizes.values()), "stream": 0,
        "allocated_size": sizes["a"], "active_size": sizes["a"] + sizes["p"],
        "requested_size": sum(requested for _, requested, state in blocks if state != "i"),
        "segment_type": kind, "segment_pool_id": (0, 0), "is_expandable": False,
        "frames": [], "blocks": made,
    }  # fmt: skip


KIB = 2**10
SMALL = segment_of(
    0x7F00_0000_0000, "small", (512, 4, "a"), (1536, 1300, "i"), (1024, 1000, "p"),
    (2045 * KIB, 0, "i"),
)  # fmt: skip
LARGE = segment_of(
    0x7F00_0040_0000, "large", (4096 * KIB, 4_000_000, "a"), (5120 * KIB, 4_900_000, "i"),
    (8192 * KIB, 8_100_000, "p"), (2560 * KIB, 1_100_000, "i"),
)  # fmt: skip
FULL = segment_of(0x7F00_0200_0000, "small", (2048 * KIB, 2_000_000, "a"))


def device_trace(*entries: tuple[str, int | None, int, str]) -> list[dict]:
    """Return the history of a device. Each entry is (action, address, size, maker).

    The action "oom" has no address.
    """
    history = []
    for time, (action, addr, size, maker) in enumerate(entries):
        frame = {"filename": "train.py", "line": 7, "name": maker}
        entry = {"action": action, "size": size, "stream": 0, "time_us": time}
        place = {"addr": addr} if addr is not None else {"device_free": 9}
        history.append(entry | place | {"pool_id": (0, 0), "frames": [frame] * bool(maker)})
    return history


HISTORY = device_trace(  # at the peak of 1,050 bytes, the free at 512 is not completed
    ("free_requested", 900, 5000, ""), ("free_completed", 900, 5000, ""),
    ("alloc", 4096, 120, "warm"), ("free_requested", 4096, 120, ""),
    ("free_completed", 4096, 120, ""),
    ("segment_alloc", 0, 20480, "step"), ("alloc", 512, 400, "load"), ("alloc", 0, 300, "step"),
    ("alloc", 1720, 20, "bias"), ("free_requested", 512, 400, "load"),
    ("alloc", 1024, 270, "step"), ("alloc", 1536, 60, "sum"),
    ("free_completed", 512, 400, "load"),
    ("alloc", 512, 100, "log"),
    ("alloc", 2048, 150, "load"), ("oom", None, 9000, "load"),
    ("free_requested", 0, 300, "step"), ("free_completed", 0, 300, "step"),
    ("alloc", 0, 200, "eval"), ("snapshot", 0, 800, ""),
)  # fmt: skip


TRACE = (  # names and bytes; 0 bytes mean that the tensor is freed
    ("a keep", 2560), ("a go", 3072), ("b keep", 3584), ("b go", 4096), ("b go", 0),
    ("a go", 0), ("f keep", 1024), ("large", 9000), ("large", 0), ("c keep", 512),
    ("e keep", 1536), ("d keep", 2048),
)  # fmt: skip


@LAB.alone(
    8, "enough, but in pieces",
    "snapshots and profiles are read, and the new order of the trace does not fragment",
    "account at_peak profile_memory long_lived_first", crashes=RETURNED | {
        r"max\(\)": "nothing_free", "'addr'": "other_actions", r"^\d+$": "unknown_free",
        "Path' object has no attribute|NoneType' object has no attribute 'save'": "no_trace",
    },
)  # fmt: skip
def allocator(submission, reference, lesson):
    for segments in ([SMALL, LARGE], [FULL, SMALL], [FULL]):
        blocks = [block for segment in segments for block in segment["blocks"]]

        def total(key: str, *states: str, blocks: list[dict] = blocks) -> int:
            return sum(block[key] for block in blocks if block["state"] in states)

        active = "active_allocated", "active_pending_free"
        true, found = reference.account(segments), submission.account(segments)
        requested, allocated, reserved, largest = found
        in_order = sorted(found) != sorted(true) or tuple(found) == true
        require(in_order, f"account returns {tuple(found)}, not {tuple(true)}", "account_order")
        what = "; ".join(
            f"{b['size']:,} bytes, {b['requested_size']:,} requested, {b['state']}"
            for b in blocks
        )
        hint = matching_hint(requested, {
            "stale_request": total("requested_size", *active, "inactive"),
            "pending": total("requested_size", active[0]),
            "rounded": total("size", *active),
        })  # fmt: skip
        what = (
            f"{{}}: account returns {{:,}} bytes, not {{:,}}, for these blocks: {what}".format
        )
        require(requested == true.requested, what("requested", requested, true.requested), hint)
        hint = matching_hint(allocated, {
            "pending": total("size", *active), "rounded": total("requested_size", active[0])
        })  # fmt: skip
        require(allocated == true.allocated, what("allocated", allocated, true.allocated), hint)
        require(
            reserved == true.reserved, what("reserved", reserved, true.reserved), "reserved"
        )
        free = [block["size"] for block in blocks if block["state"] != active[0]]
        in_segments = [
            sum(b["size"] for b in segment["blocks"] if b["state"] == "inactive")
            for segment in segments
        ]
        hint = matching_hint(largest, {
            "largest_sum": [sum(in_segments), max(in_segments)],
            "pending": max(free, default=0),
            "largest_asked": max(
                (b["requested_size"] for b in blocks if b["state"] == "inactive"), default=0
            ),
        })  # fmt: skip
        require(largest == true.largest, what("free in one piece", largest, true.largest), hint)
    yield "account"

    found = submission.at_peak(HISTORY)
    require(found is not None, "at_peak returns None", "returned")
    kinds = tuple, list
    good = isinstance(found, kinds) and len(found) == 3 and isinstance(found[1], kinds)
    good = good and all(isinstance(each, kinds) and len(each) == 2 for each in found[1])
    require(good, f"at_peak returns {show(found)}", "peak_kind")
    size, owners, last = found
    true = reference.at_peak(HISTORY)
    ever = sum(entry["size"] for entry in HISTORY if entry["action"] == "alloc")
    what = f"at the peak {size} bytes are in use, not {true.size}"
    hint = matching_hint(size, {"free_requested": 900, "held_ever": ever, "unknown_free": 0})
    require(size == true.size, what, hint)
    owners, sizes = [tuple(each) for each in owners], dict(owners)
    what = f"at the peak, the makers and their bytes are {owners}, not {true.owners}"
    bytes_owned = sum(size for _, size in owners)
    # the sizes are bytes, and not numbers of tensors, but the makers are wrong
    is_late = bytes_owned > len(HISTORY) and set(sizes) != set(dict(true.owners))
    is_late = is_late and set(sizes) <= {reference.maker(entry) for entry in HISTORY}
    require(not any("warm" in str(maker) for maker in sizes), what, "held_freed")
    require(sizes == dict(true.owners), what, "held_late" if is_late else "held_order")
    require(owners == true.owners, what, "held_order")
    require(
        last == true.last,
        f"the last maker before the peak is {last}, not {true.last}",
        "last_maker",
    )
    yield "at_peak"

    calls: list[int] = []

    def run() -> None:
        calls.append(1)
        x = torch.ones(1000)
        tensors = [x * 2, x + 1]
        del x
        tensors.append(tensors[0].exp())

    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, name) for name in ("submission.json", "reference.json")]
        submission.profile_memory(run, paths[0])
        require(paths[0].is_file(), "profile_memory writes no trace", "no_trace")
        require(len(calls) == 1, f"run was called {len(calls)} times", "run_outside")
        reference.profile_memory(run, paths[1])
        operators = "aten::exp" in paths[0].read_text()
        require(operators, "the trace has no operators of run", "run_outside")
        histories = list(map(reference.as_history, paths))
    require(histories[0], "the trace has no allocation", "no_memory")
    found, true = map(reference.at_peak, histories)
    require(found == true, f"the peak in the trace is {found}, not {true}", "other")
    yield "profile_memory"

    trace = [reference.Event(*event) for event in TRACE]
    found = submission.long_lived_first(given := list(trace))
    require(found is not None, "long_lived_first returns None", "returned")
    what = "long_lived_first changes the trace that it gets"
    require(given == trace, what, "trace_changed")
    what = "the new trace is " + ", ".join(f"{e.name} {e.size}" for e in found)
    require(sorted(found) == sorted(trace), what, "events_lost")
    require(all(each.name.endswith("keep") for each in found[:6]), what, "not_first")
    require(list(found) == list(reference.long_lived_first(trace)), what, "order_kept")
