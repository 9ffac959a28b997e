"""The steps of lab 08: what each must do, how that is measured, and the hint for each symptom.

Every step is graded on its own: whatever the learner's functions of that step call is taken
from the finished lab, which lies beside this folder. The models here are small and of other
sizes. Bytes are counted by the finished lab's `Memory`. Where a number is wrong, it is compared
with the numbers that the common mistakes give, and the one that it equals names the hint.
"""

import functools
import math
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch._dynamo  # optimizers import it: once here, not in every process
from torch import nn

from graders.tools import Lab, Wrong, ask, named, near, same, verdict

HINTS = {
    "biases": "Count all parameters: a linear layer has i·o weights and o biases, LayerNorm "
    "has 2h.",
    "states": "Gradients are as large as the parameters, 4Ψ bytes. Adam keeps two moments: 8Ψ.",
    "missing_part": "In each block 4bh bytes are missing: the mask of dropout (4h elements of "
    "one byte a row), or one of two inputs. LayerNorm saves its own, and the linear layer "
    "behind it saves what LayerNorm made.",
    "mask_bytes": "A mask of bools has one byte for each element, not four.",
    "not_saved": "Not every result is saved. GELU's derivative needs its input; its output "
    "lives only until dropout has read it.",
    "last_layer": "The last linear layer saves its input, bh, and the loss the difference of "
    "outputs and targets, b times the width.",
    "batch_counted": "The first layer saves the batch, which exists anyway: it costs nothing.",
    "differences": "memory.used is the sum of everything. Subtract what was there before.",
    "after_backward": "Backward frees the activations: read memory.used between forward and "
    "backward.",
    "moments_when": "Adam makes its moments in its first step: read memory.used after it, with "
    "the gradients still there.",
    "warm_up": "The first call makes what stays anyway: let it pass before you read "
    "memory.used.",
    "not_divided": "Divide by the number of calls between the two readings.",
    "peak_read": "memory.peak does not grow with every step, and a leak below it is not seen: "
    "read memory.used.",
    "graph_after": "The second loss is logged with its graph, through which backward never "
    "went: everything saved for it stays. Log .item() or .detach().",
    "graph_before": "The first loss still has its graph. Backward has freed what it held, but "
    "its skeleton stays for as long as the log: log .item() or .detach().",
    "retained": "retain_graph=True keeps what backward would have freed, as long as something "
    "refers to the loss. Nobody calls backward twice here: leave it out.",
    "log_values": "The log gets one pair for each call: the loss before the update, then the "
    "loss of the same batch after it.",
    "no_grad_all": "Under no_grad nothing is recorded and backward has nowhere to go: only the "
    "second forward goes into it.",
    "zero_grad": "The gradients of this step are still there in the next one, and add up: "
    "adam.zero_grad() after the update.",
    "evaluation_graph": "Forward still records for backward. Run it under torch.no_grad() or "
    "torch.inference_mode(): neither eval() nor detach() does that.",
    "dropout": "Dropout was active: call model.eval() before the first forward.",
    "mode": "Leave the model as you found it: remember model.training, and model.train(that).",
    "mean_of_means": "The last batch is smaller. Weight each batch's mean by its rows, and "
    "divide by all rows.",
    "outputs": "Return the outputs of all batches, one below the other, in order: torch.cat.",
    "in_place": "p, m and v must change themselves, all three: use the methods whose name ends "
    "with _. `p = p - …` only makes a new tensor with an old name.",
    "temporaries": "The numbers are right, but more than one temporary of the parameter's size "
    "lives at a time: use lerp_, addcmul_ and addcdiv_.",
    "bias_correction": "In the first steps the moments are too small: divide m by 1 - β₁ᵗ and "
    "v by 1 - β₂ᵗ.",
    "epsilon": "ε is added to the root of the corrected v, not below the root and not before "
    "the correction.",
    "no_hook": "Nothing happened in backward: register self.ready with every parameter, in the "
    "constructor.",
    "hook_kind": "register_hook calls with the gradient, before it is in .grad. Take "
    "register_post_accumulate_grad_hook, which calls with the parameter.",
    "grad_kept": "Gradients are still there after backward: set p.grad to None in ready(). "
    "Zeros take as many bytes.",
    "count_t": "t counts the steps of a parameter from 1 on: every call of ready adds one to "
    "state['t'] before the update.",
    "rows_fixed": "What is there in any case has to fit too: subtract `fixed` first.",
    "rows_round": "Part of a row does not fit: round down, to a whole number.",
    "rows_none": "Where not even one row fits, raise OutOfMemory.",
    "padding_alone": "A micro-batch of padding alone has no mean: 0 / 0. Sum its rows, and "
    "divide by the number of kept rows of the whole batch.",
    "means_added": "Micro-batches have different numbers of kept rows, so their means have no "
    "equal weight. Divide each sum by the kept rows of the whole batch.",
    "padding_counted": "Divide by the rows that count, keep.sum(), not by all rows.",
    "keep_ignored": "Rows of padding took part in the loss: multiply by keep before the sum.",
    "share": "The gradients are too large: each sum has to be divided by the number of kept "
    "rows.",
    "zeroed": "Only the last micro-batch is left in .grad. Gradients add up by themselves: do "
    "not set them to None in between.",
    "backward_late": "Backward came after all forwards, so the activations of all micro-"
    "batches lived at a time. Call it for each micro-batch.",
    "rows_at_once": "More rows than `rows` went through the model at a time: split by rows.",
    "loss_returned": "Return the mean over all kept rows: the sum of what the micro-batches "
    "contributed.",
    "recorded": "As much is kept as without a checkpoint. In forward, nothing may be recorded "
    "and nothing but x saved: just run the block.",
    "enable_grad": "In backward autograd does not record unless told to: run the block under "
    "torch.enable_grad(), on an input that requires a gradient.",
    "cut_off": "Backward ran on into the layers before the block: let it run on "
    "x.detach().requires_grad_(), which is a leaf.",
    "input_gradient": "The layers before the block got no gradient: return x.grad of the "
    "detached input.",
    "returns": "Return one gradient for each argument of forward: None for the block, then "
    "that of x.",
    "ones": "The gradient that comes from above was not used: output.backward(gradient).",
    "mask_again": "Without dropout the gradients are right: the second forward drew another "
    "mask. Save the generator's state before the first, set it before the second.",
    "put_back": "After backward the generator is where an earlier forward was, and draws the "
    "same numbers again: read its state before you set the old one, then put it back.",
    "save_for_backward": "x stays in memory after backward. An attribute of ctx lives as long "
    "as the graph: ctx.save_for_backward(x) is freed.",
    "torch_plain": "checkpoint_by_torch keeps all activations: call checkpoint(block, x, …).",
    "reentrant": "Where the input requires no gradient, the parameters get none: that is the "
    "reentrant variant. Pass use_reentrant=False.",
    "torch_mask": "The gradients are those of another mask: leave preserve_rng_state as it is.",
    "computed_again": "When backward comes to a checkpointed unit, it is computed again and "
    "holds everything: unit i counts with `held`, chosen or not.",
    "freed_already": "Units behind unit i have been freed when backward comes to it: sum those "
    "before it, and take the largest of these sums.",
    "input_twice": "`held` includes the unit's input: do not add `kept` to it.",
    "does_not_fit": "What was chosen does not fit: ask predicted_peak of every candidate.",
    "too_dear": "Another choice fits with fewer FLOPs. Greedy rules miss it: try all subsets.",
    "nothing_fits": "Where no choice fits, return None.",
    "stale_request": "A free block still has the requested_size of its last tensor: only "
    "active blocks count.",
    "pending": "active_pending_free is no tensor's any more, and no other tensor can get it "
    "yet. It is requested, but neither allocated nor free.",
    "rounded": "Allocated are whole blocks, `size`; tensors asked for `requested_size` of it.",
    "reserved": "Reserved is all that came from the driver: the total_size of each segment.",
    "largest_sum": "A tensor needs one block: the largest free one, not their sum.",
    "nothing_free": "Where no block is free the largest has 0 bytes: max(…, default=0).",
    "free_requested": "A block can be given away from free_completed on, not from "
    "free_requested. Of the two, count one.",
    "unknown_free": "What was there before the history began goes without having come: look "
    "whether its addr is known, and leave it alone if not.",
    "other_actions": "Only alloc, free_requested and free_completed are of tensors.",
    "held_late": "Note who holds at the highest point, at the moment when it is reached: what "
    "lives at the end is something else.",
    "held_ever": "That is all that was ever allocated. Take out what goes, by its addr.",
    "held_order": "Add up the bytes by maker(entry), most bytes first.",
    "last_maker": "The last is the allocation that reached the peak, whatever its size and "
    "whatever came later.",
    "no_memory": "The trace does not know of memory: profile_memory=True.",
    "no_trace": "profiler.export_chrome_trace(str(path)) writes the file, after the `with`.",
    "run_outside": "The profiler sees what runs within its `with`, and run() is called once.",
    "not_first": "Tensors without an event of size 0 are never freed: they come before all "
    "others.",
    "order_kept": "Within each group the events keep their order: a tensor must come before it "
    "goes.",
    "events_lost": "The new trace must have the same events, each once.",
    "other": "The numbers fit no common mistake. Print what you have beside what you expect, "
    "for one row and one block.",
}  # fmt: skip


LAB = Lab(HINTS)


def small(lab: ModuleType, dropout: float = 0.5, blocks: int = 3, width: int = 4) -> nn.Module:
    torch.manual_seed(3)
    return lab.Net(width, 8, [lab.Block(8, dropout) for _ in range(blocks)])


def rows_of(n: int, seed: int = 5, width: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, width, generator=generator)
    return x, torch.sin(3 * x)


# --- step 1 -------------------------------------------------------------------------------


@LAB.alone(
    1, "where the bytes are",
    "parameters, gradients, states and activations are predicted, and measured",
    "predict measure_parts",
)  # fmt: skip
def parts(module, lab, lesson):
    for width, hidden, blocks, rows in ((16, 8, 2, 5), (32, 64, 8, 256)):
        p, g, s, saved = module.predict(width, hidden, blocks, rows)
        true = lab.predict(width, hidden, blocks, rows)
        where = f"width {width}, h = {hidden}, {blocks} blocks, {rows} rows"
        what = f"{where}: {p:,} bytes of parameters, not {true.parameters:,}"
        ask(near(p, true.parameters, 0.05), what, "biases")
        what = f"{where}: {g:,} bytes of gradients and {s:,} of states, not"
        what += f" {true.gradients:,} and {true.states:,}"
        ask(near(g, true.gradients, 0.05) and near(s, true.states, 0.05), what, "states")
        each = blocks * rows * hidden
        mistakes = {
            "missing_part": true.activations - 4 * each,
            "mask_bytes": true.activations + 12 * each,
            "not_saved": true.activations + 16 * each,
            "last_layer": true.activations - 4 * rows * (hidden + width),
            "batch_counted": true.activations + 4 * rows * width,
        }
        what = f"{where}: {saved:,} bytes of activations, not {true.activations:,}"
        ask(near(saved, true.activations, 0.05), what, named(saved, mistakes))
    yield "predict"

    inputs, targets = rows_of(40, width=16)
    true = lab.predict(16, 8, 2, 40)
    with lab.Memory("cpu") as memory:
        build = functools.partial(small, lab, blocks=2, width=16)
        p, g, s, a = module.measure_parts(memory, build, inputs, targets)
    what = f"measured {p:,}, {g:,}, {s:,} and {a:,} bytes, not "
    what += ", ".join(f"{n:,}" for n in true)
    sums = near(a, true.parameters + true.activations, 0.05) or g >= 2 * true.gradients
    ask(not sums and s <= 1.5 * true.states, what, "differences")
    ask(a > 0.2 * true.activations, what, "after_backward")
    ask(near(s, true.states, 0.05), what, "moments_when")
    good = near(p, true.parameters, 0.05) and near(g, true.gradients, 0.05)
    ask(good and abs(a - true.activations) < 0.1 * a, what, "other")


# --- step 2 -------------------------------------------------------------------------------


class Scale:
    """A memory of which only the numbers are there."""

    def __init__(self) -> None:
        self.used, self.peak, self.calls = 100, 10_000, 0

    def step(self) -> None:
        self.calls += 1
        self.used += 1000 if self.calls == 1 else 10


@LAB.alone(
    2, "what the log keeps",
    "a leak is seen, and the log keeps two numbers for each batch and nothing else",
    "growth logged_step", crashes={"does not require grad": "no_grad_all"},
)  # fmt: skip
def leak(module, lab, lesson):
    scale = Scale()
    found = module.growth(scale, scale.step, 4)
    what = f"the first call leaves 1000 bytes, each further one 10: growth says {found}"
    mistakes = {
        "peak_read": 0,
        "warm_up": [257.5, 1030, 1040, 260, 208],
        "not_divided": [40, 8],
    }
    ask(found == 10, what, named(found, mistakes))
    yield "growth"

    def train(step: Callable) -> tuple[list[torch.Tensor], list, int]:
        """Parameters and log of three calls, and by how much the last one grew the memory."""
        log, used = [], []
        with lab.Memory("cpu") as memory:
            model = small(lab)
            adam = lab.make_adam(model)
            torch.manual_seed(7)
            for seed in range(3):
                step(model, adam, *batches[seed], log)
                used.append(memory.used)
            return [p.detach().clone() for p in model.parameters()], log, used[2] - used[1]

    batches = [rows_of(24, seed) for seed in range(3)]
    (ours, log, grown), (true, true_log, _) = train(module.logged_step), train(lab.logged_step)
    pairs = len(log) == 3 and all(isinstance(x, (tuple, list)) and len(x) == 2 for x in log)
    ask(pairs, f"after 3 calls the log has {len(log)} entries", "log_values")
    before, after = (
        any(getattr(pair[i], "requires_grad", False) for pair in log) for i in (0, 1)
    )
    trained = same(ours, true)
    if grown > 0:
        what = f"each call leaves {grown:,} bytes behind"
        ask(not after, what, "graph_after")
        ask(not before, what, "retained")
        raise Wrong(what, "other" if trained else "zero_grad")
    ask(not (before or after), "what is logged has a graph", "graph_before")
    first, true_first = [float(x) for x in log[0]], list(true_log[0])
    what = f"the first pair is {first}, not {true_first}"
    ask(same(first, true_first), what, "log_values")
    ask(trained, "the model is another one after three calls", "zero_grad")


# --- step 3 -------------------------------------------------------------------------------


@LAB.alone(
    3, "evaluation",
    "the loss over all rows and all outputs, without a graph, and the mode as before",
    "evaluate",
)  # fmt: skip
def evaluation(module, lab, lesson):
    batches = [rows_of(n, n) for n in (60, 60, 60, 7)]

    def run(evaluate: Callable, training: bool) -> tuple[Any, int, list[bool], bool]:
        modes: list[bool] = []
        with lab.Memory("cpu") as memory:
            model = small(lab).train(training)
            model.blocks[0].dropout.register_forward_pre_hook(
                lambda module, _: modes.append(module.training)
            )
            result = evaluate(model, batches)
        return result, memory.peak, modes, model.training

    (loss, outputs), peak, modes, after = run(module.evaluate, True)
    (true_loss, true), enough, _, _ = run(lab.evaluate, True)
    what = f"{peak:,} bytes in use at most, {enough:,} are enough"
    ask(peak < 1.4 * enough, what, "evaluation_graph")
    ask(not outputs.requires_grad, "the outputs require a gradient", "evaluation_graph")
    yield "nothing is recorded"
    ask(not any(modes), "the model was in training mode during the forward", "dropout")
    ask(same(outputs, true), f"outputs of shape {list(outputs.shape)}", "outputs")
    targets = [y for _, y in batches]
    means = map(lab.mean_square, true.split(60), targets)
    loss = float(loss)
    hint = "mean_of_means" if same(loss, sum(means).item() / 4) else "other"
    ask(same(loss, true_loss), f"the loss is {loss:.4f}, not {true_loss:.4f}", hint)
    yield "outputs and loss"
    ask(after, "a model in training mode was left in eval mode", "mode")
    *_, after = run(module.evaluate, False)
    ask(not after, "a model in eval mode was left in training mode", "mode")


# --- step 4 -------------------------------------------------------------------------------


def adam_once(
    p, g, m, v, t: int, corrected: bool = True, epsilon: str = "behind"
) -> list[torch.Tensor]:
    """Adam's step, out of place, with η = 1 and ε = 0.1: the new p, m, v."""
    m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
    c1, c2 = (1 - 0.9**t, 1 - 0.999**t) if corrected else (1.0, 1.0)
    roots = {
        "behind": (v / c2).sqrt() + 0.1,
        "below": (v / c2 + 0.1).sqrt(),
        "before": (v.sqrt() + 0.1) / math.sqrt(c2),
    }
    return [p - m / c1 / roots[epsilon], m, v]


@LAB.alone(
    4, "the peak of a step",
    "Adam in place with one temporary, and in backward without a gradient left",
    "update AdamInBackward", crashes={r"^tensor\(|NoneType": "hook_kind"},
)  # fmt: skip
def peak(module, lab, lesson):
    module.ETA, module.EPSILON = 1.0, 0.1
    for t in (1, 3):
        generator = torch.Generator().manual_seed(t)
        p, g, m = (torch.randn(1000, generator=generator) for _ in range(3))
        v = torch.rand(1000, generator=generator)
        old = p.clone(), m.clone(), v.clone()
        with lab.Memory("cpu") as memory:
            module.update(p, g.clone(), m, v, t)
        peak = memory.peak / g.nbytes - 1  # g's copy was made inside
        kept = [n for n, a, b in zip("pmv", (p, m, v), old, strict=True) if torch.equal(a, b)]
        ask(not kept, f"t = {t}: {' and '.join(kept)} did not change", "in_place")
        before = old[0], g, *old[1:], t
        true, *moments = adam_once(*before)
        ask(same([m, v], moments), f"t = {t}: m or v is wrong", "other")
        found = verdict(
            p,
            right=true,
            bias_correction=adam_once(*before, corrected=False)[0],
            epsilon=adam_once(*before, epsilon="below")[0],
            epsilon_=adam_once(*before, epsilon="before")[0],
        ).rstrip("_")
        ask(found == "right", f"t = {t}: p is wrong", found)
        what = f"temporaries of {peak:.0f} times the parameter, once is enough"
        ask(peak <= 1.1, what, "temporaries")
    yield "update is Adam's step, in place"

    # the one of the lab, whose updates are as small as usual
    module.update, module.ETA, module.EPSILON = lab.update, lab.ETA, lab.EPSILON
    model, plain = small(lab, dropout=0.0), small(lab, dropout=0.0)
    ours, adam = module.AdamInBackward(model), lab.make_adam(plain)
    start = [p.detach().clone() for p in model.parameters()]
    for seed in range(3):
        x, y = rows_of(6, seed)
        for each in (model, plain):
            lab.mean_square(each(x), y).backward()
        if seed == 0:
            kept = list(map(torch.equal, model.parameters(), start))
            what = f"{kept.count(False)} of {len(kept)} parameters changed in backward"
            ask(not any(kept), what, "no_hook")
        left = sum(p.grad is not None for p in model.parameters())
        ask(not left, f"{left} gradients are there after backward", "grad_kept")
        adam.step()
        adam.zero_grad()
    counts = {int(state["t"]) for state in ours.states.values()}
    ask(counts == {3}, f"after 3 steps t is {sorted(counts)}", "count_t")
    good = same(list(model.parameters()), list(plain.parameters()), 0, 1e-4)
    ask(good, "after three steps the parameters are not those of torch.optim.Adam", "count_t")


# --- step 5 -------------------------------------------------------------------------------


@LAB.alone(
    5, "the batch in pieces",
    "as many rows as fit, and the loss and gradients of the whole batch",
    "rows_that_fit accumulate",
)  # fmt: skip
def accumulation(module, lab, lesson):
    for limit, fixed, each, true in (
        (1000, 100, 70, 12),
        (1000, 100, 90, 10),
        (160, 70, 90, 1),
    ):
        found = module.rows_that_fit(limit, fixed, each)
        what = f"rows_that_fit({limit}, {fixed}, {each}) is {found!r}, not {true}"
        hint = "rows_fixed" if found == limit // each else "rows_round"
        ask(isinstance(found, int) and found == true, what, hint)
    for limit in (150, 50):
        try:
            found = module.rows_that_fit(limit, 100, 70)
        except lab.OutOfMemory:
            continue
        raise Wrong(f"rows_that_fit({limit}, 100, 70) is {found!r}", "rows_none")
    yield "rows_that_fit"
    check_pieces(module, lab, [1, 1, 1, 0, 1, 0, 0, 0, 1, 0])
    check_pieces(module, lab, [1, 1, 1, 0, 0, 0, 0, 0, 1, 0])


def check_pieces(module: ModuleType, lab: ModuleType, kept: list[int]) -> None:
    """Ten rows, four at a time."""
    x, y = rows_of(10)
    keep, everything = torch.tensor(kept).bool(), torch.ones(10).bool()
    whole, n = (x, y, keep), sum(kept)
    pieces = list(zip(x.split(4), y.split(4), keep.split(4), strict=True))

    def part(model: nn.Module, piece: Sequence, by: float | None = None) -> torch.Tensor:
        a, b, k = piece
        total = (lab.square_of_rows(model(a), b) * k).sum()
        return total / (k.sum().clamp(min=1) if by is None else by)

    def gradients(*some: Sequence, by: float | None = None, share: float = 1) -> list:
        model = small(lab, 0.0)
        (sum(part(model, piece, by) for piece in some) / share).backward()
        return [p.grad for p in model.parameters()]

    model, seen = small(lab, 0.0), []
    model.register_forward_pre_hook(
        lambda module, inputs: seen.append((len(inputs[0]), module.last.bias.grad is not None))
    )
    loss = module.accumulate(model, x, y, keep, 4)
    ask(loss is not None, "accumulate returns nothing", "loss_returned")
    ours = [p.grad for p in model.parameters()]
    most = max((rows for rows, _ in seen), default=0)
    ask(most <= 4, f"{most} rows went through at a time, 4 were allowed", "rows_at_once")
    found = verdict(
        ours,
        right=gradients(whole, by=n),
        share=gradients(whole, by=1),
        padding_counted=gradients(whole, by=10),
        keep_ignored=gradients((x, y, everything), by=10),
        keep_ignored_=gradients((x, y, everything), by=n),
        means_added=gradients(*pieces, share=3),
        means_added_=gradients(*pieces),
        zeroed=gradients(pieces[-1], by=n),
    ).rstrip("_")
    if math.isnan(loss) or (ours[0] is not None and ours[0].isnan().any()):
        found = "padding_alone"
    ask(found == "right", "loss or gradients are not those of the whole batch", found)
    late = any(not graded for _, graded in seen[1:])
    ask(not late, "the second forward came before the first backward", "backward_late")
    true = part(small(lab, 0.0), whole, n).item()
    what = f"the loss returned is {float(loss):.4f}, not {true:.4f}"
    ask(same(float(loss), true), what, "loss_returned")


# --- step 6 -------------------------------------------------------------------------------


def run_chain(lab: ModuleType, run: Callable, dropout: float) -> tuple[Any, list, bool]:
    """Output and gradients of three blocks, the first of which gets a leaf's product by 2.

    And whether backward left the state of the generator as it was.
    """
    model = small(lab, dropout)
    x = rows_of(6, width=8)[0].requires_grad_()
    torch.manual_seed(9)
    y = 2 * x
    for block in model.blocks:
        y = run(block, y)
    state = torch.get_rng_state()
    (y * y.detach().cos()).sum().backward()
    kept = torch.equal(state, torch.get_rng_state())
    return y, [x.grad, *(p.grad for p in model.blocks.parameters())], kept


def held_by(lab: ModuleType, run: Callable) -> int:
    """Bytes that are alive between forward and backward, beside parameters."""
    with lab.Memory("cpu") as memory:
        model, x = small(lab), torch.randn(50, 8, requires_grad=True)
        y, before = 2 * x, memory.used
        for block in model.blocks:
            y = run(block, y)
        return memory.used - before


@LAB.alone(
    6, "compute it again",
    "only inputs are kept, and gradients and random numbers are those of the plain run",
    "Checkpoint checkpoint_by_torch", crashes={
        "does not require grad": "enable_grad",
        "incorrect number of gradients|not enough values": "returns",
    },
)  # fmt: skip
def checkpoint(module, lab, lesson):
    run = module.Checkpoint.apply
    held, plainly, enough = held_by(lab, run), held_by(lab, lab.plain), 3 * 50 * 8 * 4
    what = f"{held:,} bytes are kept for backward, {enough:,} are enough, plain {plainly:,}"
    ask(held < (enough + plainly) / 2, what, "recorded")

    leaf = torch.randn(6, 8, requires_grad=True)
    block, x = lab.Block(8, 0.0), 2 * leaf
    (gradient,) = torch.autograd.grad(run(block, x).sum(), x, allow_unused=True)
    what = "backward of the block reached what was computed before it"
    ask(leaf.grad is None, what, "cut_off")
    ask(gradient is not None, "no gradient for the input comes back", "input_gradient")
    for dropout in (0.0, 0.5):
        y, gradients, kept = run_chain(lab, run, dropout)
        true_y, true, _ = run_chain(lab, lab.plain, dropout)
        ask(same(y, true_y), "the output is not that of the block", "other")
        if dropout:
            what = "with dropout, the gradients are not those of the plain run"
            ask(same(gradients, true), what, "mask_again")
            ask(kept, "backward changed the state of the generator", "put_back")
        elif not same(gradients, true):
            (first,) = torch.autograd.grad(run(block, x).sum(), x)
            (twice,) = torch.autograd.grad(2 * run(block, x).sum(), x)
            raise Wrong("the gradients are wrong", "ones" if same(first, twice) else "other")
        yield "with dropout, too" if dropout else "without dropout, gradients as plain"

    with lab.Memory("cpu") as memory:
        leaf = torch.randn(50, 8, requires_grad=True)
        block, x = lab.Block(8), 2 * leaf
        size, y = x.nbytes, run(block, x)
        y.sum().backward()
        before = memory.used
        del x
    ask(memory.used <= before - size, "after backward the input is kept", "save_for_backward")
    yield "the input is freed"

    run = module.checkpoint_by_torch
    held = held_by(lab, run)
    what = f"checkpoint_by_torch keeps {held:,} bytes, {enough:,} are enough"
    ask(held < (enough + plainly) / 2, what, "torch_plain")
    _, gradients, _ = run_chain(lab, run, 0.5)
    ask(same(gradients, true), "checkpoint_by_torch: the gradients are others", "torch_mask")
    y = run(lab.Block(8, 0.0), torch.randn(6, 8))
    what = "checkpoint_by_torch: for an input without gradient, nothing is recorded"
    ask(y.requires_grad, what, "reentrant")


# --- step 7 -------------------------------------------------------------------------------

UNITS = ((50, 10, 90), (20, 10, 3), (70, 12, 60), (33, 10, 4), (41, 9, 31), (60, 11, 20))


@LAB.alone(
    7, "what to compute again", "peaks as they come, and the fewest FLOPs that fit",
    "predicted_peak choose",
)  # fmt: skip
def choice(module, lab, lesson):
    units = [lab.Unit(*unit) for unit in UNITS]
    for chosen in ((), (5,), (0, 2), (1, 3, 4), range(6), (2, 3, 5)):
        found, true = module.predicted_peak(units, chosen), lab.predicted_peak(units, chosen)
        left = [u.kept if i in chosen else u.held for i, u in enumerate(units)]
        whole = [sum(left[:i]) + u.held for i, u in enumerate(units)]  # as backward reaches i
        again = max((units[i].held - units[i].kept for i in chosen), default=0)
        mistakes = {
            "computed_again": sum(left),
            "freed_already": sum(left) + again,
            "input_twice": [
                max(each + u.kept * (i in chosen or always)
                    for i, (each, u) in enumerate(zip(whole, units, strict=True)))
                for always in (False, True)
            ],
        }  # fmt: skip
        what = f"with {set(chosen) or 'none'} checkpointed, the peak is {found}, not {true}"
        ask(found == true, what, named(found, mistakes))
    yield "predicted_peak"
    module.predicted_peak = lab.predicted_peak
    cases = [(units, budget) for budget in (300, 250, 214, 190, 160, 130, 115, 105, 60, 40)]
    for some, budget in [*cases, (units[:3], 100), (units[::-1], 170)]:
        true, found = lab.choose(some, budget), module.choose(some, budget)
        what = f"budget {budget} for {len(some)} units: {found!r}"
        if true is None:
            ask(found is None, what, "nothing_fits")
            continue
        ask(found is not None, f"{what}, though {true} fits", "other")
        ask(lab.predicted_peak(some, found) <= budget, what, "does_not_fit")
        cost, least = (sum(some[i].flops for i in which) for which in (found, true))
        ask(cost == least, f"{what} costs {cost} FLOPs, {true} {least}", "too_dear")


# --- step 8 -------------------------------------------------------------------------------


def block_of(address: int, size: int, asked: int, state: str) -> dict:
    block = {"address": address, "size": size, "requested_size": asked, "state": state}
    return block | {"frames": []}


def segment_of(address: int, kind: str, *blocks: tuple[int, int, str]) -> dict:
    """A segment as `torch.cuda.memory._snapshot()` has it, of blocks (size, asked, state)."""
    made, sizes = [], {"a": 0, "p": 0, "i": 0}
    states = {"a": "active_allocated", "p": "active_pending_free", "i": "inactive"}
    for size, asked, state in blocks:
        made.append(block_of(address + sum(sizes.values()), size, asked, states[state]))
        sizes[state] += size
    return {
        "device": 0, "address": address, "total_size": sum(sizes.values()), "stream": 0,
        "allocated_size": sizes["a"], "active_size": sizes["a"] + sizes["p"],
        "requested_size": sum(asked for _, asked, state in blocks if state != "i"),
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
    (8192 * KIB, 8_100_000, "p"), (3072 * KIB, 1_100_000, "i"),
)  # fmt: skip
FULL = segment_of(0x7F00_0200_0000, "small", (2048 * KIB, 2_000_000, "a"))


def device_trace(*entries: tuple[str, int | None, int, str]) -> list[dict]:
    """A device's history, of (action, addr, size, who); an error has no addr."""
    history = []
    for time, (action, addr, size, who) in enumerate(entries):
        frame = {"filename": "train.py", "line": 7, "name": who}
        entry = {"action": action, "size": size, "stream": 0, "time_us": time}
        place = {"addr": addr} if addr is not None else {"device_free": 9}
        history.append(entry | place | {"pool_id": (0, 0), "frames": [frame] * bool(who)})
    return history


HISTORY = device_trace(  # the peak comes while what was at 512 still waits: 300 + 400 + 350
    ("free_requested", 900, 5000, ""), ("free_completed", 900, 5000, ""),
    ("segment_alloc", 0, 20480, "step"), ("alloc", 0, 300, "step"), ("alloc", 512, 400, "load"),
    ("free_requested", 512, 400, "load"), ("alloc", 1024, 350, "step"),
    ("free_completed", 512, 400, "load"), ("alloc", 512, 100, "log"),
    ("alloc", 2048, 150, "load"), ("oom", None, 9000, "load"),
    ("free_requested", 0, 300, "step"), ("free_completed", 0, 300, "step"),
    ("alloc", 0, 200, "eval"), ("snapshot", 0, 800, ""),
)  # fmt: skip


TRACE = (  # names, bytes; 0: the tensor goes
    ("keep a", 2560), ("go a", 3072), ("keep b", 3584), ("go b", 4096), ("go b", 0),
    ("go a", 0), ("large", 9000), ("large", 0), ("keep c", 512),
)  # fmt: skip


@LAB.alone(
    8, "enough, but in pieces",
    "a snapshot and a profile are read, and a trace that does not fragment",
    "account at_peak profile_memory long_lived_first", crashes={
        r"max\(\)": "nothing_free", "'addr'": "other_actions", r"^\d+$": "unknown_free",
    },
)  # fmt: skip
def allocator(module, lab, lesson):
    for segments in ([SMALL, LARGE], [FULL, SMALL], [FULL]):
        blocks = [block for segment in segments for block in segment["blocks"]]

        def total(key: str, *states: str, blocks: list[dict] = blocks) -> int:
            return sum(block[key] for block in blocks if block["state"] in states)

        active = "active_allocated", "active_pending_free"
        requested, allocated, reserved, largest = module.account(segments)
        true = lab.account(segments)
        what = f"of {[(b['size'], b['requested_size'], b['state']) for b in blocks]} account"
        hint = named(requested, {
            "stale_request": total("requested_size", *active, "inactive"),
            "pending": total("requested_size", active[0]),
            "rounded": total("size", *active),
        })  # fmt: skip
        what = f"{what} says {{}} bytes of {{}}, not {{}}".format
        ask(requested == true.requested, what(requested, "requested", true.requested), hint)
        hint = named(allocated, {
            "pending": total("size", *active), "rounded": total("requested_size", active[0])
        })  # fmt: skip
        ask(allocated == true.allocated, what(allocated, "allocated", true.allocated), hint)
        ask(reserved == true.reserved, what(reserved, "reserved", true.reserved), "reserved")
        free = [block["size"] for block in blocks if block["state"] != active[0]]
        hint = named(largest, {
            "largest_sum": total("size", "inactive"), "pending": max(free, default=0)
        })  # fmt: skip
        ask(largest == true.largest, what(largest, "free in one piece", true.largest), hint)
    yield "account"

    size, held, last = module.at_peak(HISTORY)
    true = lab.at_peak(HISTORY)
    ever = sum(entry["size"] for entry in HISTORY if entry["action"] == "alloc")
    what = f"at the peak {size} bytes live, not {true.size}"
    hint = named(size, {"free_requested": 900, "held_ever": ever, "unknown_free": 0})
    ask(size == true.size, what, hint)
    held, sizes = [tuple(each) for each in held], dict(held)
    what = f"{held} hold the peak, not {true.held}"
    late = sum(size for _, size in held) != true.size
    ask(sizes == dict(true.held), what, "held_late" if late else "held_order")
    ask(held == true.held, what, "held_order")
    ask(last == true.last, f"{last} reached the peak, not {true.last}", "last_maker")
    yield "at_peak"

    calls: list[int] = []

    def run() -> None:
        calls.append(1)
        x = torch.ones(1000)
        kept = [x * 2, x + 1]
        del x
        kept.append(kept[0].exp())

    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, name) for name in ("theirs.json", "ours.json")]
        module.profile_memory(run, paths[0])
        ask(paths[0].is_file(), "profile_memory leaves no trace", "no_trace")
        ask(len(calls) == 1, f"run was called {len(calls)} times", "run_outside")
        lab.profile_memory(run, paths[1])
        operators = "aten::exp" in paths[0].read_text()
        ask(operators, "the trace has no operators of run", "run_outside")
        histories = list(map(lab.as_history, paths))
    ask(histories[0], "the trace has no allocation", "no_memory")
    found, true = map(lab.at_peak, histories)
    ask(found == true, f"the trace has its peak at {found}, not {true}", "other")
    yield "profile_memory"

    trace = [lab.Event(*event) for event in TRACE]
    found = module.long_lived_first(list(trace))
    what = "the new trace is " + ", ".join(f"{e.name} {e.size}" for e in found)
    ask(sorted(found) == sorted(trace), what, "events_lost")
    first = {event.name for event in found[:3]}
    ask(first == {"keep a", "keep b", "keep c"}, what, "not_first")
    ask(list(found) == list(lab.long_lived_first(trace)), what, "order_kept")
