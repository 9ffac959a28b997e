"""The steps of lab 07: what each must do, how that is found, and the hint for each symptom.

Every step is graded on the toy, the device that the lab brings: it puts all work off until
somebody waits, and counts waits, copies and launches. What else a step needs is taken from the
finished lab, which lies beside this folder.
"""

import contextlib
import itertools
import json
import os
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from unittest import mock

import torch
import torch._dynamo  # optimizers import it: once here, not in every process
from torch import nn
from torch.nn import functional as F

from graders.tools import Lab, ask, near, same

HINTS = {
    "not_asked": "Where there is no accelerator, pick_device must return the CPU. "
    "current_accelerator() names what PyTorch was built for, or None: ask is_available() "
    "first.",
    "named": "There is an accelerator, and it is not used. Do not name a kind of device: "
    "torch.accelerator.current_accelerator() says which it is.",
    "attribute": "model.to(device) moves parameters and buffers. A tensor that is a plain "
    "attribute stays on the CPU: register_buffer.",
    "not_saved": "Mean and standard deviation belong to the model: they must be in its "
    "state_dict, as buffers are unless they are made with persistent=False.",
    "trained": "As parameters, mean and standard deviation are trained. They are constants: "
    "register_buffer.",
    "made_on_cpu": "torch.arange makes its numbers on the CPU unless you say where: "
    "device=x.device.",
    "made_and_moved": "The numbers are made on the CPU and copied in every step, and the host "
    "waits for it. Make them on the device: device=x.device.",
    "not_moved": "build must move the model to the device.",
    "moved_late": "The optimizer was made before the model moved, and holds the parameters "
    "that were on the CPU. Move first.",
    "pageable": "The host waits for every copy: its source is not pinned. self.buffers must "
    "be pinned tensors, and the copies must come from them.",
    "blocking": "The host waits for every copy: non_blocking=True lets the call return.",
    "overwritten": "A buffer was filled again while its copy was still to come, and the "
    "device got the later batch. Wait for the event of the slot before you fill it.",
    "one_buffer": "All slots share one buffer: make a tensor for each.",
    "mark_early": "You wait, and still a buffer is filled too early: the event must be "
    "recorded behind the copy, in every send anew.",
    "waits_for_all": "synchronize on the device or the stream waits for everything that was "
    "launched. Wait for the one event of this slot.",
    "waits_for_newest": "You wait for a copy that was launched just before. Only the slot's "
    "own last copy matters, which is `slots` batches old.",
    "pins_each": "Pinning costs more than the copy. Pin `slots` buffers in __init__, and fill "
    "them again and again.",
    "zero_workers": "persistent_workers=True is refused without workers: workers > 0.",
    "reads_itself": "The process that trains also reads: pass num_workers.",
    "workers_end": "The workers of the second epoch are new processes: persistent_workers.",
    "loader_pageable": "The batches are not pinned, so the copy to the device makes the host "
    "wait: pin_memory, where the device is not the CPU.",
    "pinned_for_cpu": "Pinned memory is for copies to an accelerator. For the CPU it only "
    "warns: pin_memory depends on the device.",
    "order": "The samples come in another order than in the CPU script: sampler=order(data), "
    "and no shuffle.",
    "not_waited": "The kernels did not wait for the copy, and used memory that nothing had "
    "been written to. compute.wait_event(arrived).",
    "mark_elsewhere": "compute waits for an event, but not for the one behind the copies. "
    "Record it in the stream of copies, after them.",
    "host_waits": "The host waits where the device should: compute.wait_event lets the stream "
    "wait, and the host goes on.",
    "prefetch_blocking": "The host waits for every copy: non_blocking=True.",
    "same_stream": "The copies are in the stream of the kernels and take turns with them. "
    "Launch them within `with copies:`.",
    "not_ahead": "The copy of the next batch is launched after this one's step. Start it "
    "before you yield this one.",
    "all_at_once": "All batches are copied before the first is used: the device would have to "
    "hold an epoch. One ahead is enough.",
    "batch_lost": "A batch is missing: the last one is still to be handed over when the "
    "source has ended.",
    "empty_source": "A source without batches must give none.",
    "unrecorded": "The numbers are right, by luck: the memory was made in the stream of "
    "copies, and its allocator does not know that compute uses it. "
    "tensor.record_stream(compute).",
    "asks_each_step": "A number goes to the host in every step (item, float, print, an `if` "
    "on a tensor, cpu), and the host waits for it. Sum up on the device, ask at the end.",
    "mask": "An index by a mask makes a tensor whose size only the device knows, and the host "
    "waits for it. ignore_index=-1 in the loss; count with a sum of true values.",
    "graph_kept": "The sum holds on to the graph of every step. Detach the loss before you add "
    "it up.",
    "mean_of_means": "Batches have different numbers of labelled samples. Weigh each mean by "
    "its number before you add it up.",
    "all_counted": "Samples without a label do not count: divide by those with y >= 0.",
    "accumulated": "The gradients of all steps add up: zero_grad before each backward.",
    "not_trained": "The parameters are what they were: backward, then optimizer.step().",
    "sums_dtype": "These sums cannot grow: in 16 bits, 256 + 1 is 256. Keep them in fp32.",
    "converted": "The parameters must stay fp32, or small updates are lost. autocast casts "
    "what goes into each operator; do not convert the model.",
    "no_autocast": "The products run in fp32. autocast works for the type of device it is "
    "given: x.device.type, and dtype=torch.bfloat16.",
    "loss_outside": "Outside of autocast the loss is computed in the dtype of the logits, "
    "bf16 unless you cast them. Move it inside, with logits.float() if you like.",
    "backward_inside": "backward belongs outside of autocast: it takes the dtypes of forward.",
    "not_in_place": "sums of the caller are still 0: add in place, sums += ….",
    "asks_in_step": "The host waits in the step. Leave the numbers on the device.",
    "not_fused": "One update takes a launch for every operator and parameter: fused=True.",
    "not_capturable": "An optimizer whose step is captured has to keep all it needs on the "
    "device: capturable=True.",
    "rate_is_a_number": "A number in Python is frozen when the step is captured. lr must be a "
    "tensor on the device of the parameters.",
    "rate_replaced": "The captured step reads the tensor that the optimizer had. Write into "
    "it, group['lr'].fill_(value), and do not put another one in its place.",
    "stale_input": "Every replay works on the batch of the capture. Copy each batch into the "
    "captured tensors; another tensor under the same name is not seen.",
    "borrowed": "The batch of a caller was overwritten: the captured inputs must be tensors "
    "of your own, clones of the first ones.",
    "not_replayed": "Capturing runs nothing. The batch of that call needs a replay, too.",
    "no_warm_up": "What the step makes once was made while capturing, and every replay makes "
    "it anew. Run the step plainly `warm` times before.",
    "captures_each": "The step is captured again and again. Capture once, when warm is 0, and "
    "replay from then on.",
    "not_captured": "The step is run by Python in every call. After `warm` calls, capture it "
    "and replay.",
    "not_synchronized": "The clock was read when the work was launched, not when it was done: "
    "torch.accelerator.synchronize() before the second reading.",
    "queued_before": "Work that was queued before counts as yours: synchronize before the "
    "first reading, too.",
    "warm_up_measured": "The first calls are slower than the others: make `warm` of them "
    "before you measure.",
    "not_median": "One slow call moved the result. Return statistics.median.",
    "own_clock": "Read the clock that is passed in.",
    "no_trace": "profiler.export_chrome_trace(str(path)) writes the file, after the `with`.",
    "no_schedule": "The trace does not know what a step is: give profile a schedule, and call "
    "profiler.step() after each step. Without repeat=1 another round begins, and its trace is "
    "empty.",
    "step_count": "Call step() `warm` times and then `count` times, within the `with`.",
    "warm_recorded": "The first steps are in the trace: warmup=warm and active=count in the "
    "schedule, and one profiler.step() for each call.",
    "no_shapes": "The events do not say their inputs: record_shapes=True.",
    "total_time": "These are durations. Whatever an operator calls takes of its duration: "
    "subtract that of the operators which lie directly in it.",
    "grandchildren": "What is called by the operators that an operator calls has been "
    "subtracted twice: subtract only those that lie directly in it.",
    "threads": "Operators of two threads may run at one time and do not call each other: a "
    "stack of open operators for each tid.",
    "by_name": "One name with inputs of other shapes is other work: a row for each name with "
    "its shapes.",
    "all_steps": "Calls and times are those of all steps in the trace. Divide by the number of "
    "ProfilerStep events.",
    "row_order": "The hot spot comes first: sort the rows by own time.",
    "wrapper": "That operator only calls another, and its own time is small. Name the one that "
    "does the work.",
    "hot_shapes": "There are products in the model, too. Take the shapes of the row with the "
    "most own time.",
    "hot_calls": "Count the calls in one step: it is a loop, over what?",
    "hot_name": "Another operator has more own time: print the first rows of read_trace.",
    "other": "The numbers fit no common mistake. Compare with the finished lab's check of "
    "this step, and print what differs.",
}


# not early: the finished program makes the toy the accelerator of its process
LAB = Lab(HINTS, borrows=False, early=False)
CPU = torch.device("cpu")


def waits() -> str:
    """The host's waits since start_counting, in words."""
    return ", ".join(f"{number} × {why}" for why, number in torch.toy.waits.items())


# --- 1: to the device ---------------------------------------------------------------------


@LAB.alone(
    1, "to the device", "the model, its constants and its optimizer are where they belong",
    "pick_device Net build",
)  # fmt: skip
def device(theirs, ours, lesson):
    toy, absent = torch.device("toy"), []
    for kind in (torch.device("cuda"), None):
        with (
            mock.patch.object(torch.accelerator, "is_available", lambda: False),
            mock.patch.object(torch.accelerator, "current_accelerator", lambda *_, k=kind: k),
        ):
            absent.append(str(theirs.pick_device()))
    names = " and ".join(name for name in absent if name != "cpu")
    ask(not names, f"without an accelerator pick_device returns {names}", "not_asked")
    here = str(theirs.pick_device())
    ask(here.startswith("toy"), f"the accelerator is toy, pick_device returns {here}", "named")
    yield "pick_device"

    mean, std = ours.Signals().moments()
    net = theirs.Net(mean, std).to(toy)
    for name in ("mean", "std"):
        tensor, what = getattr(net, name, None), f"{name} of the moved model is"
        moved = isinstance(tensor, torch.Tensor) and tensor.device.type == "toy"
        ask(moved, f"{what} plain", "attribute")
        ask(name in net.state_dict(), f"{what} not saved", "not_saved")
        ask(not isinstance(tensor, nn.Parameter), f"{what} parameter", "trained")
    x = torch.zeros(2, 5, ours.CHANNELS).to(toy)
    torch.toy.start_counting()
    places = theirs.Net.places(net, x)
    where, copies = places.device.type, sum(torch.toy.waits.values())
    ask(where == "toy", f"places(x) are on {where}, x is on toy", "made_on_cpu")
    ask(not copies, f"places(x) makes the host wait {copies} time", "made_and_moved")
    numbers = places.tolist()
    ask(numbers == [0, 1, 2, 3, 4], f"the places of 5 points are {numbers}", "other")
    yield "Net"

    model, optimizer = theirs.build(toy)
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    where = next(model.parameters()).device.type
    ask(where == "toy", f"the parameters are on {where}", "not_moved")
    good = held == {id(p) for p in model.parameters()}
    ask(good, "the optimizer does not hold the model's parameters", "moved_late")
    (x, _), *_ = ours.batches(1)
    torch.manual_seed(0)
    truth = ours.CpuNet(mean, std)(x)
    off = (torch.tensor(model(x.to(toy)).tolist()) - truth).abs().max().item()
    ask(off <= 1e-3, f"the logits are off by {off:.3g}", "other")


# --- 2: a ring of pinned buffers ----------------------------------------------------------

SLOTS = 3


@LAB.alone(
    2, "a copy that nobody waits for",
    "every batch arrives, and the host waits only where a buffer is needed again", "Sender",
)  # fmt: skip
def sender(theirs, ours, lesson):
    plain = [x for x, _ in ours.batches()]
    sent, allowed = len(plain), len(plain) - SLOTS
    torch.toy.start_counting()
    sender = theirs.Sender(plain[0], SLOTS, torch.device("toy"))
    pinned = torch.toy.pins
    torch.toy.start_counting()
    there = [sender.send(x) for x in plain]
    counts, pins, waited = dict(torch.toy.waits), torch.toy.pins, waits()
    torch.accelerator.synchronize()
    wrong = [
        str(i)
        for i, (a, b) in enumerate(zip(there, plain, strict=True))
        if not torch.equal(a.cpu(), b)
    ]
    ask(not pins, f"memory was pinned {pins} times in {sent} sends", "pins_each")
    what = f"in {sent} sends the host waited: {waited}"
    ask("copy to the device" not in counts, what, "blocking" if pinned else "pageable")
    ask("synchronize" not in counts, what, "waits_for_all")
    hint = "mark_early" if counts.get("event") else "overwritten"
    if len({buffer.data_ptr() for buffer in getattr(sender, "buffers", [])}) < SLOTS:
        hint = "one_buffer"
    ask(not wrong, f"of {sent} batches these arrived wrong: {', '.join(wrong)}", hint)
    yield f"{sent} batches arrive"
    events = counts.get("event", 0)
    what = f"{events} waits for {sent} batches and {SLOTS} buffers, {allowed} would do"
    ask(events <= allowed, what, "waits_for_newest")


# --- 3: the loader ------------------------------------------------------------------------


@LAB.alone(
    3, "a loader that keeps up",
    "workers read, stay and pin, and the samples come in the order of the CPU script",
    "make_loader", crashes={"persistent_workers option needs": "zero_workers"},
)  # fmt: skip
def loader(theirs, ours, lesson):
    data = ours.WhoReads()
    loader = theirs.make_loader(data, 2, torch.device("toy"))
    epochs = [list(loader) for _ in range(2)]
    found = [[batch[:, 1].tolist() for batch in epoch] for epoch in epochs]
    plain = torch.utils.data.DataLoader(data, ours.BATCH, sampler=ours.order(data))
    truth = [[batch[:, 1].tolist() for batch in plain] for _ in range(2)]
    sizes = [len(batch) for batch in found[0]]
    what = f"batches of {sizes} in the first epoch are not those of the CPU script"
    ask(found[0] == truth[0], what, "order")
    ask(found == truth, "the second epoch is not that of the CPU script", "order")
    yield "the samples and their order"
    first, second = ({int(pid) for batch in epoch for pid in batch[:, 0]} for epoch in epochs)
    itself = os.getpid() in first
    ask(not itself, "with workers=2 the process that trains reads", "reads_itself")
    ask(first == second, "each epoch has workers of its own", "workers_end")
    pinned = all(batch.is_pinned() for batch in epochs[0])
    ask(pinned, "batches for the toy are not pinned", "loader_pageable")
    pinned = theirs.make_loader(data, 0, CPU).pin_memory
    ask(not pinned, "batches for the CPU are pinned", "pinned_for_cpu")


# --- 4: prefetch --------------------------------------------------------------------------


@LAB.alone(
    4, "the next batch crosses",
    "copies are one step ahead in their own stream, and nobody is too early",
    "prefetch", crashes={"generator raised StopIteration": "empty_source"},
)  # fmt: skip
def prefetch(theirs, ours, lesson):
    toy = torch.device("toy")
    source = ours.pinned_batches(6)
    weight = torch.ones(ours.CHANNELS).to(toy)
    compute = torch.accelerator.current_stream()
    torch.toy.start_counting()
    marks_in_compute: list[bool] = []
    record = type(torch.Event()).record

    def noting(event, stream=None):
        marks_in_compute.append((stream or torch.toy.current) is compute)
        return record(event, stream)

    sums, copied = [], []
    with mock.patch.object(type(torch.Event()), "record", noting):
        for x, y in theirs.prefetch(source, toy):
            copied.append(len(torch.toy.copies))
            sums.append((x @ weight).sum() + y.sum())
    counts, waited, unnoted = dict(torch.toy.waits), waits(), torch.toy.unnoted()
    in_compute = sum(stream is compute for stream in torch.toy.copies)
    compute.run()  # as late as possible: the copies only if compute waits for them
    sums = [total.item() for total in sums]
    truth = [(x.sum() + y.sum()).item() for x, y in source]
    list(theirs.prefetch([], toy))
    ask(len(sums) >= 6, f"{len(sums)} batches came of 6", "batch_lost")
    hint = "prefetch_blocking" if "copy to the device" in counts else "host_waits"
    ask(not counts, f"for 6 batches the host waited: {waited}", hint)
    ask(not in_compute, f"{in_compute} of 12 copies are in the compute stream", "same_stream")
    for i, (found, true) in enumerate(zip(sums, truth, strict=True)):
        hint = "mark_elsewhere" if any(marks_in_compute) else "not_waited"
        ask(
            near(found, true, 1e-3), f"batch {i} gave {found:.1f}, its numbers {true:.1f}", hint
        )
    yield "the numbers, without a wait of the host"
    first, second = copied[0] // 2, copied[1] // 2
    what = f"{first} batches were copied when the first was handed over"
    ask(copied[0] <= 4, what, "all_at_once")
    what = f"{second} batches were copied when the second was handed over"
    ask(copied[1] >= 6, what, "not_ahead")
    what = f"{unnoted} tensors of the stream of copies are used in compute"
    ask(not unnoted, what, "unrecorded")


# --- 5: the loop --------------------------------------------------------------------------


def uneven(ours: ModuleType) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Six batches, every second one with few labels."""
    batches = [(x, y.clone()) for x, y in ours.batches(6)]
    for _, y in batches[::2]:
        y[5:] = -1
    return batches


def epochs(ours: ModuleType) -> dict[str, tuple[float, float]]:
    """Mean loss and accuracy, as they are and as common mistakes have them."""
    found = {}
    for name in ("right", "accumulated", "not_trained"):
        model, optimizer = ours.build(CPU)
        means, rights, counts = [], [], []
        for x, y in uneven(ours):
            if name != "accumulated":
                optimizer.zero_grad()
            logits = model(x)
            loss = F.cross_entropy(logits, y, ignore_index=-1)
            loss.backward()
            if name != "not_trained":
                optimizer.step()
            means.append(loss.item())
            rights.append((logits.argmax(1) == y).sum().item())
            counts.append((y >= 0).sum().item())
        total = sum(mean * count for mean, count in zip(means, counts, strict=True))
        found[name] = total / sum(counts), sum(rights) / sum(counts)
        if name == "right":
            found["mean_of_means"] = sum(means) / len(means), found[name][1]
            found["all_counted"] = total / (6 * ours.BATCH), sum(rights) / (6 * ours.BATCH)
            found["all_counted, in the loss"] = sum(means) / len(means), found["all_counted"][1]
    return found


class Trace:
    """Lives as long as the graph that it was left in."""


class LeaveTrace(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.trace = Trace()
        TRACES.append(weakref.ref(ctx.trace))
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


TRACES: list[weakref.ref] = []


@LAB.alone(
    5, "a loop that asks for nothing",
    "loss and accuracy are those of the CPU script, and the host waits at the end",
    "train_epoch",
)  # fmt: skip
def loop(theirs, ours, lesson):
    live, wait, toy = 0, torch.toy.wait, torch.device("toy")

    def noting(*args):
        nonlocal live
        live = sum(trace() is not None for trace in TRACES)
        return wait(*args)

    model, optimizer = ours.build(toy)
    model.register_forward_hook(lambda _model, _inputs, logits: LeaveTrace.apply(logits))
    source = [(x.to(toy), y.to(toy)) for x, y in uneven(ours)]
    torch.toy.start_counting()
    with mock.patch.object(torch.toy, "wait", noting):
        found = theirs.train_epoch(model, optimizer, source)
    counts, waited = dict(torch.toy.waits), waits()
    loss, accuracy = map(float, found)
    known = epochs(ours)
    fits = [
        name
        for name, (mean, share) in known.items()
        if near(loss, mean, 1e-3) and near(accuracy, share, 1e-3)
    ]
    truth = "the CPU script has {:.4f} and {:.4f}".format(*known["right"])
    hint = fits[-1].partition(",")[0] if fits else "other"
    what = f"mean loss {loss:.4f} and accuracy {accuracy:.4f}, {truth}"
    ask("right" in fits, what, hint)
    yield "mean loss and accuracy"
    hint = "mask" if set(counts) & {"mask as an index", "nonzero"} else "asks_each_step"
    ask(sum(counts.values()) <= 2, f"in 6 steps the host waited: {waited}", hint)
    ask(live <= 2, f"after 6 steps the graphs of {live} are still there", "graph_kept")


# --- 6: mixed precision -------------------------------------------------------------------


@LAB.alone(
    6, "16 bits where they do no harm",
    "products in bf16, everything that adds up in fp32, no wait", "new_sums mixed_step",
)  # fmt: skip
def mixed(theirs, ours, lesson):
    toy = torch.device("toy")
    sums = theirs.new_sums(toy)
    ask(sums.dtype == torch.float32, f"the sums of an epoch are {sums.dtype}", "sums_dtype")
    where = sums.device.type
    ask(where == "toy", f"new_sums is on {where}, the device is toy", "other")
    yield "new_sums"
    model, optimizer = ours.build(toy)
    source, kinds, inside = ours.moved(6, toy), set(), set()
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            layer.register_forward_hook(lambda *a: kinds.add(str(a[2].dtype)))

    def noting(name: str, function: Callable) -> Callable:
        def noted(*args, **kwargs):
            inside.add((name, torch.is_autocast_enabled("toy")))
            return function(*args, **kwargs)

        return noted

    with contextlib.ExitStack() as stack:
        for owner, name in ((F, "cross_entropy"), (torch.Tensor, "backward")):
            patched = noting(name, getattr(owner, name))
            stack.enter_context(mock.patch.object(owner, name, patched))
        given = torch.zeros(3).to(toy)
        torch.toy.start_counting()
        for x, y in source:
            theirs.mixed_step(model, optimizer, x, y, given)
    waited = waits()
    parameters = {str(p.dtype) for p in model.parameters()}
    what = f"parameters are {', '.join(sorted(parameters))}"
    ask(parameters == {"torch.float32"}, what, "converted")
    what = f"the outputs of linear layers are {', '.join(sorted(kinds))}"
    ask(kinds == {"torch.bfloat16"}, what, "no_autocast")
    outside = ("cross_entropy", False) in inside
    ask(not outside, "the loss is computed outside of autocast", "loss_outside")
    under = ("backward", True) in inside
    ask(not under, "backward runs under autocast", "backward_inside")
    yield "what runs in which precision"
    ask(not waited, f"in 6 steps the host waited: {waited}", "asks_in_step")
    model, optimizer = ours.build(toy)
    truth = torch.zeros(3).to(toy)
    for x, y in source:
        ours.mixed_step(model, optimizer, x, y, truth)
    sums, truth = given.tolist(), truth.tolist()
    ask(any(sums), "after 6 steps all sums are 0", "not_in_place")
    hint = "mean_of_means" if sums[1:] == truth[1:] and sums[0] < 20 else "other"
    what = f"the sums are {[round(v, 2) for v in sums]}, not {[round(v, 2) for v in truth]}"
    ask(same(sums, truth, 2e-3), what, hint)


# --- 7: fewer launches --------------------------------------------------------------------


@LAB.alone(
    7, "fewer launches", "captured once, replayed on every batch, with a rate that can change",
    "fast_optimizer set_rate Replayed",
)  # fmt: skip
def replay(theirs, ours, lesson):
    toy = torch.device("toy")
    optimizer = theirs.fast_optimizer(ours.build(toy)[0])
    (group,) = optimizer.param_groups
    rate = group["lr"]
    ask(group["fused"], "the optimizer is not fused", "not_fused")
    ask(group["capturable"], "the optimizer may not be captured", "not_capturable")
    where = f"a tensor on {rate.device.type}" if isinstance(rate, torch.Tensor) else "a number"
    ask(where == "a tensor on toy", f"the learning rate is {where}", "rate_is_a_number")
    theirs.set_rate(optimizer, 0.25)
    what = "set_rate puts another object in place of the rate"
    ask(group["lr"] is rate, what, "rate_replaced")
    ask(near(rate, 0.25, 1e-3), f"set_rate(…, 0.25) gives {float(rate)}", "other")
    yield "the optimizer and its rate"

    state: dict[str, torch.Tensor] = {}
    total = torch.zeros((), device=toy)
    calls = 0

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        nonlocal calls
        calls += 1
        if "moment" not in state:
            state["moment"] = torch.zeros((), device=toy)
        state["moment"].add_(x.sum())
        total.add_(state["moment"] * y.sum())

    source = [torch.full((2, 2), float(i)) for i in range(1, 8)]
    there = [(x.to(toy), x.to(toy)) for x in source]
    replayed = theirs.Replayed(step, warm=2)
    seen, replays, replay = [], [], torch.toy.replay
    with mock.patch.object(torch.toy, "replay", lambda g: [replays.append(1), replay(g)]):
        for x, y in there:
            replayed(x, y)
            seen.append(total.item())
    unchanged = all(torch.equal(a.cpu(), b) for (a, _), b in zip(there, source, strict=True))
    ask(unchanged, "a batch of the caller was overwritten", "borrowed")
    ask(replays, "in 7 calls Python ran the step 7 times", "not_captured")
    ask(calls <= 3, f"in 7 calls Python ran the step {calls} times", "captures_each")
    ask(calls == 3, f"with warm=2, Python ran the step {calls} times", "no_warm_up")
    moment = true = 0.0
    for i, found in enumerate(seen, 1):
        moment += 4 * i
        true += moment * 4 * i
        what = f"after call {i} the step's total is {found:g}, not {true:g}"
        ask(found == true, what, "not_replayed" if seen[2] == seen[1] else "stale_input")


# --- 8: measure ---------------------------------------------------------------------------


STEPS = 2  # in the trace below


def made_trace() -> list[dict]:
    """Two steps of two threads and a stream, in no order; one starts with its caller."""
    events: list[dict] = [{"ph": "M", "name": "process_name", "args": {"name": "python"}}]
    for begin in (0.0, 200.0):
        step = {"cat": "user_annotation", "name": f"ProfilerStep#{begin / 200 + 3:.0f}"}
        kernel = {"cat": "kernel", "name": "gemm", "tid": 7, "ts": begin + 15, "dur": 90.0}
        memory = {"ph": "i", "cat": "cpu_instant_event", "name": "[memory]", "tid": 1}
        flow = {"ph": "s", "cat": "fwdbwd", "name": "fwdbwd", "tid": 1, "ts": begin + 60}
        events += [kernel, memory | {"ts": begin + 15}, flow]
        for name, tid, start, duration, *shapes in (
            ("mm", 1, 82, 8, [5, 3], [3, 3]),
            ("copy_", 1, 14, 6, [4, 2], [4, 2]),
            ("addmm", 1, 10, 36, [2], [4, 3], [3, 2]),
            ("linear", 1, 10, 40, [4, 3], [2, 3], [2]),
            ("mm", 1, 60, 10, [4, 4], [4, 2]),
            ("mm", 1, 75, 5, [4, 4], [4, 2]),
            ("mm", 2, 11, 20, [4, 4], [4, 2]),
        ):
            event = {"cat": "cpu_op", "name": f"aten::{name}", "args": {"Input Dims": shapes}}
            events.append(event | {"tid": tid, "ts": begin + start, "dur": float(duration)})
        events.append(step | {"tid": 1, "ts": begin, "dur": 100.0})
    return [{"ph": "X", "pid": 1, "args": {}} | event for event in events]


def table_of(events: list[dict], mistake: str = "") -> dict[tuple[str, str], tuple]:
    """Calls and own time by name and shapes, as they are or by a common mistake."""
    table: dict[tuple[str, str], tuple] = {}
    operators = [event for event in events if event.get("cat") == "cpu_op"]

    def within(a: dict, b: dict) -> bool:
        thread = a["tid"] == b["tid"] or mistake == "threads"
        ends = [event["ts"] + event["dur"] for event in (a, b)]
        return thread and a["dur"] < b["dur"] and b["ts"] <= a["ts"] and ends[0] <= ends[1]

    for event in operators:
        inside = [other for other in operators if within(other, event)]
        if mistake != "grandchildren":
            inside = [a for a in inside if not any(within(a, b) for b in inside)]
        taken = sum(other["dur"] for other in inside) * (mistake != "total_time")
        key = event["name"], json.dumps(event["args"]["Input Dims"])
        calls, own = table.get(key, (0, 0))
        table[key] = calls + 1, own + event["dur"] - taken
    steps = 1 if mistake == "all_steps" else STEPS
    return {key: (calls / steps, own / steps) for key, (calls, own) in table.items()}


@LAB.alone(
    8, "measure, then name what is slow",
    "the time is that of the work, and a trace says which operator takes it",
    "measure record read_trace hot_spot",
)  # fmt: skip
def measured(theirs, ours, lesson):
    toy = torch.toy

    def cases(measure: Callable) -> dict[str, float]:
        x = torch.ones(1 << 16).to(torch.device("toy"))

        def kernels(count: int = 20) -> None:
            for _ in range(count):
                x.add_(1)

        def slow(*which: int) -> Callable[[], None]:
            calls = itertools.count()

            def work() -> None:
                toy.host += 1e-2 if next(calls) in which else 0
                kernels()

            return work

        found = {}
        torch.accelerator.synchronize()
        found["plain"] = measure(kernels, toy.now, warm=1, repeats=3)
        torch.accelerator.synchronize()
        kernels(400)
        found["queued"] = measure(kernels, toy.now, warm=0, repeats=1)
        torch.accelerator.synchronize()
        found["first"] = measure(slow(0, 1, 2), toy.now, warm=3, repeats=1)
        found["once"] = measure(slow(2), toy.now, warm=0, repeats=5)
        torch.accelerator.synchronize()
        return found

    found, truth = cases(theirs.measure), cases(ours.measure)
    launched = near(found["plain"], 20 * ours.LAUNCH, 0.05)
    for name, work, hint in (
        ("plain", "20 kernels on the toy's clock",
         "not_synchronized" if launched else "own_clock"),
        ("queued", "20 kernels, with 400 in the queue", "queued_before"),
        ("first", "work whose first 3 calls are slow, with warm=3", "warm_up_measured"),
        ("once", "work that is slow once in 5 calls", "not_median"),
    ):  # fmt: skip
        took = f"{1e6 * found[name]:.0f} µs, it takes {1e6 * truth[name]:.0f} µs"
        ask(near(found[name], truth[name], 0.02), f"{work}: {took}", hint)
        if name == "plain":
            yield "work is measured to its end"

    with tempfile.TemporaryDirectory() as folder:
        yield from profiled(theirs, ours, Path(folder))
    name, shapes, calls = theirs.hot_spot()
    true_name, true_shapes, true_calls = ours.hot_spot()
    what = f"the hot spot is said to be {name} of {shapes}, {calls} times a step"
    wrapper = name == "aten::matmul"
    ask(name == true_name, what, "wrapper" if wrapper else "hot_name")
    ask([list(shape) for shape in shapes] == true_shapes, what, "hot_shapes")
    ask(calls == true_calls, what, "hot_calls")


def profiled(theirs: ModuleType, ours: ModuleType, folder: Path):
    """The trace of three steps after two, beside one of our own; and a trace that was made."""
    x, path, done = torch.ones(4, 4), folder / "trace.json", []

    def step() -> None:
        done.append(torch.cumsum(x, 0) if len(done) < 2 else x)  # what only first steps do
        torch.stack([x @ x, x @ x]).relu()

    theirs.record(step, path, warm=2, count=3)
    ask(len(done) == 5, f"record called step {len(done)} times, not 5", "step_count")
    ask(path.is_file(), "record leaves no trace", "no_trace")
    events = json.loads(path.read_text())["traceEvents"]
    steps = sum(name.startswith("ProfilerStep") for name in {e.get("name", "") for e in events})
    ask(steps, "the trace has no steps", "no_schedule")
    names = [event.get("name") for event in events if event.get("cat") == "cpu_op"]
    what = f"{steps} steps are in the trace, 3 were asked for"
    ask(steps == 3 and "aten::cumsum" not in names, what, "warm_recorded")
    dims = any("Input Dims" in event.get("args", {}) for event in events)
    ask(dims, "no event has the shapes of its inputs", "no_shapes")
    done.clear()
    ours.record(step, folder / "ours.json", warm=2, count=3)
    calls, true = (
        {(row.name, str(row.shapes)): row.calls for row in ours.read_trace(each)}
        for each in (path, folder / "ours.json")
    )
    ask(calls == true, f"the trace has {calls} calls a step, not {true}", "other")
    yield "the trace has the steps that were asked for, with shapes"

    path.write_text(json.dumps({"traceEvents": made_trace()}))
    rows = theirs.read_trace(path)
    found = {(row.name, json.dumps(row.shapes)): (row.calls, row.own) for row in rows}
    true = table_of(made_trace())
    fits = [m for m in ("total_time", "grandchildren", "threads", "all_steps")
            if found == table_of(made_trace(), m)]  # fmt: skip
    products = [row for row in rows if row.name == "aten::mm"]
    ask(len(products) != 1, "products of two shapes are in one row", "by_name")
    for key, (count, own) in true.items():
        what = f"{key[0]} of {key[1]}: {count:g} calls a step and {own:g} µs of its own are in"
        what += " the trace, read_trace has " + "{:g} and {:g}".format(*found.get(key, (0, 0)))
        ask(found.get(key) == (count, own), what, fits[0] if fits else "other")
    ask(len(found) == len(true), f"rows that are no operators: {sorted(found)}", "other")
    in_order = [row.own for row in rows] == sorted((row.own for row in rows), reverse=True)
    ask(in_order, "the rows are not in the order of their own times", "row_order")
    yield "a trace is read, by name and shapes"
