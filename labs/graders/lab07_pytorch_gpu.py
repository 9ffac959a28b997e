"""The steps of lab 07: what each must do, how that is found, and the hint for each symptom.

Every step is graded on the toy, the device that the lab brings: it puts all work off until
somebody waits, and counts waits, copies and launches. What else a step needs is taken from the
finished lab, which lies beside this folder.
"""

import collections
import contextlib
import functools
import importlib.util
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch._dynamo  # optimizers import it: once here, not in every process
from torch import nn
from torch.nn import functional as F

from graders.runner import Group, Lesson, Step, Wrong

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
    "loss_outside": "Outside of autocast the loss is computed in bf16, the dtype of the "
    "logits. Move it inside.",
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
    "other": "The numbers fit no common mistake. Compare with the finished lab's check of "
    "this step, and print what differs.",
}


@functools.lru_cache
def finished() -> ModuleType:
    """The lab with its solutions."""
    path = Path(__file__).parent.parent / "lab07_pytorch_gpu.py"
    spec = importlib.util.spec_from_file_location("finished_lab07", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


finished()  # makes the toy the accelerator, before any process is forked
TOY = torch.device("toy")
CPU = torch.device("cpu")


def only(group: Group) -> dict[str, Any]:
    """The facts of the one process."""
    return group.ranks[0].facts


def close(a: float, b: float, share: float = 1e-3) -> bool:
    return abs(a - b) <= share * abs(b)


def waits() -> dict[str, int]:
    return dict(torch.toy.waits)


def say(counts: dict[str, int]) -> str:
    """Waits in words."""
    return ", ".join(f"{number} × {why}" for why, number in counts.items())


# --- 1: to the device ---------------------------------------------------------------------


def probe_device(lesson: Lesson) -> None:
    ours, theirs = finished(), lesson.module
    picked = [str(theirs.pick_device())]
    for kind in (torch.device("cuda"), None):
        with (
            mock.patch.object(torch.accelerator, "is_available", lambda: False),
            mock.patch.object(torch.accelerator, "current_accelerator", lambda *_, k=kind: k),
        ):
            picked.append(str(theirs.pick_device()))
    lesson.fact("picked", picked)

    mean, std = ours.Signals().moments()
    net = theirs.Net(mean, std).to(TOY)
    kinds = {}
    for name in ("mean", "std"):
        tensor = getattr(net, name, None)
        moved = isinstance(tensor, torch.Tensor) and tensor.device.type == "toy"
        kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
        saved = name in net.state_dict()
        kinds[name] = "plain" if not moved else kind if saved else "not saved"
    lesson.fact("kinds", kinds)

    x = torch.zeros(2, 5, ours.CHANNELS).to(TOY)
    torch.toy.start_counting()
    places = theirs.Net.places(net, x)
    lesson.fact("places", [places.device.type, sum(waits().values())])
    lesson.fact("numbers", places.tolist())

    if set(kinds.values()) == {"buffer"} and places.device.type == "toy":
        model, optimizer = theirs.build(TOY)
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        lesson.fact("where", next(model.parameters()).device.type)
        lesson.fact("held", held == {id(p) for p in model.parameters()})
        (x, _), *_ = ours.batches(1)
        torch.manual_seed(0)
        truth = ours.CpuNet(mean, std)(x)
        logits = model(x.to(next(model.parameters()).device)).tolist()
        lesson.fact("off", (torch.tensor(logits) - truth).abs().max().item())


def judge_device(group: Group, right: Callable[[str], None]) -> None:
    facts = only(group)
    here, *absent = facts["picked"]
    if absent != ["cpu", "cpu"]:
        names = " and ".join(name for name in absent if name != "cpu")
        raise Wrong(f"without an accelerator pick_device returns {names}", HINTS["not_asked"])
    if not here.startswith("toy"):
        raise Wrong(f"the accelerator is toy, pick_device returns {here}", HINTS["named"])
    right("pick_device")
    for name, kind in facts["kinds"].items():
        hint = {"plain": "attribute", "parameter": "trained", "not saved": "not_saved"}
        if kind in hint:
            raise Wrong(f"{name} of the moved model is {kind}", HINTS[hint[kind]])
    where, copies = facts["places"]
    if where != "toy":
        raise Wrong(f"places(x) are on {where}, x is on toy", HINTS["made_on_cpu"])
    if copies:
        raise Wrong(f"places(x) makes the host wait {copies} time", HINTS["made_and_moved"])
    if facts["numbers"] != [0, 1, 2, 3, 4]:
        raise Wrong(f"the places of 5 points are {facts['numbers']}", HINTS["other"])
    right("Net")
    if facts["where"] != "toy":
        raise Wrong(f"the parameters are on {facts['where']}", HINTS["not_moved"])
    if not facts["held"]:
        raise Wrong("the optimizer does not hold the model's parameters", HINTS["moved_late"])
    if facts["off"] > 1e-3:
        raise Wrong(f"the logits are off by {facts['off']:.3g}", HINTS["other"])


# --- 2: a ring of pinned buffers ----------------------------------------------------------

SLOTS = 3


def probe_sender(lesson: Lesson) -> None:
    plain = [x for x, _ in finished().batches()]
    torch.toy.start_counting()
    sender = lesson.module.Sender(plain[0], SLOTS, TOY)
    pins = torch.toy.pins
    torch.toy.start_counting()
    there = [sender.send(x) for x in plain]
    lesson.fact("waits", waits())
    lesson.fact("pins", [pins, torch.toy.pins])
    buffers = getattr(sender, "buffers", [])
    lesson.fact("buffers", len({buffer.data_ptr() for buffer in buffers}))
    torch.accelerator.synchronize()
    lesson.fact("right", [torch.equal(a.cpu(), b) for a, b in zip(there, plain, strict=True)])


def judge_sender(group: Group, right: Callable[[str], None]) -> None:
    facts = only(group)
    counts, arrived = facts["waits"], facts["right"]
    sent, allowed = len(arrived), len(arrived) - SLOTS
    events = counts.get("event", 0)
    before, during = facts["pins"]
    if during:
        raise Wrong(f"memory was pinned {during} times in {sent} sends", HINTS["pins_each"])
    if "copy to the device" in counts:
        hint = "blocking" if before else "pageable"
        raise Wrong(f"in {sent} sends the host waited: {say(counts)}", HINTS[hint])
    if "synchronize" in counts:
        what = f"in {sent} sends the host waited: {say(counts)}"
        raise Wrong(what, HINTS["waits_for_all"])
    if not all(arrived):
        hint = "overwritten" if not events else "mark_early"
        if facts["buffers"] < SLOTS:
            hint = "one_buffer"
        wrong = [str(i) for i, ok in enumerate(arrived) if not ok]
        raise Wrong(f"of {sent} batches these arrived wrong: {', '.join(wrong)}", HINTS[hint])
    right(f"{sent} batches arrive")
    if events > allowed:
        what = f"{events} waits for {sent} batches and {SLOTS} buffers, {allowed} would do"
        raise Wrong(what, HINTS["waits_for_newest"])


# --- 3: the loader ------------------------------------------------------------------------


def probe_loader(lesson: Lesson) -> None:
    ours, make = finished(), lesson.module.make_loader
    data = ours.WhoReads()
    loader = make(data, 2, TOY)
    epochs = [list(loader) for _ in range(2)]
    pids = [{int(pid) for batch in epoch for pid in batch[:, 0]} for epoch in epochs]
    lesson.fact("itself", os.getpid() in pids[0])
    lesson.fact("stay", pids[0] == pids[1])
    lesson.fact("pinned", all(batch.is_pinned() for batch in epochs[0]))
    plain = torch.utils.data.DataLoader(data, ours.BATCH, sampler=ours.order(data))
    lesson.fact("truth", [[batch[:, 1].tolist() for batch in plain] for _ in range(2)])
    lesson.fact("found", [[batch[:, 1].tolist() for batch in epoch] for epoch in epochs])
    lesson.fact("for_cpu", make(data, 0, CPU).pin_memory)


def judge_loader(group: Group, right: Callable[[str], None]) -> None:
    facts = only(group)
    if facts["found"] != facts["truth"]:
        sizes = [[len(batch) for batch in epoch] for epoch in facts["found"]]
        what = f"batches of {sizes[0]} in the first epoch are not those of the CPU script"
        if facts["found"][0] == facts["truth"][0]:
            what = "the second epoch is not that of the CPU script"
        raise Wrong(what, HINTS["order"])
    right("the samples and their order")
    if facts["itself"]:
        raise Wrong("with workers=2 the process that trains reads", HINTS["reads_itself"])
    if not facts["stay"]:
        raise Wrong("each epoch has workers of its own", HINTS["workers_end"])
    if not facts["pinned"]:
        raise Wrong("batches for the toy are not pinned", HINTS["loader_pageable"])
    if facts["for_cpu"]:
        raise Wrong("batches for the CPU are pinned", HINTS["pinned_for_cpu"])


# --- 4: prefetch --------------------------------------------------------------------------


def probe_prefetch(lesson: Lesson) -> None:
    ours = finished()
    source = ours.pinned_batches(6)
    weight = torch.ones(ours.CHANNELS).to(TOY)
    compute = torch.accelerator.current_stream()
    torch.toy.start_counting()
    recorded: list[bool] = []
    record = type(torch.Event()).record

    def noting(event, stream=None):
        recorded.append((stream or torch.toy.current) is compute)
        return record(event, stream)

    sums, copied = [], []
    with mock.patch.object(type(torch.Event()), "record", noting):
        for x, y in lesson.module.prefetch(source, TOY):
            copied.append(len(torch.toy.copies))
            sums.append((x @ weight).sum() + y.sum())
    lesson.fact("waits", waits())
    lesson.fact("copied", copied)
    lesson.fact("in_compute", sum(stream is compute for stream in torch.toy.copies))
    lesson.fact("unnoted", torch.toy.unnoted())
    lesson.fact("marks_in_compute", sum(recorded))
    compute.run()  # as late as possible: the copies only if compute waits for them
    lesson.fact("sums", [total.item() for total in sums])
    lesson.fact("truth", [(x.sum() + y.sum()).item() for x, y in source])
    lesson.fact("empty", len(list(lesson.module.prefetch([], TOY))))


def judge_prefetch(group: Group, right: Callable[[str], None]) -> None:
    facts = only(group)
    sums, truth, copied = facts["sums"], facts["truth"], facts["copied"]
    if len(sums) < len(truth):
        raise Wrong(f"{len(sums)} batches came of {len(truth)}", HINTS["batch_lost"])
    counts = facts["waits"]
    if "copy to the device" in counts:
        raise Wrong(f"for 6 batches the host waited: {say(counts)}", HINTS["prefetch_blocking"])
    if counts:
        raise Wrong(f"for 6 batches the host waited: {say(counts)}", HINTS["host_waits"])
    if facts["in_compute"]:
        what = f"{facts['in_compute']} of {2 * len(truth)} copies are in the compute stream"
        raise Wrong(what, HINTS["same_stream"])
    wrong = [i for i, (a, b) in enumerate(zip(sums, truth, strict=True)) if not close(a, b)]
    if wrong:
        hint = "mark_elsewhere" if facts["marks_in_compute"] else "not_waited"
        what = f"batch {wrong[0]} gave {sums[wrong[0]]:.1f}, its numbers {truth[wrong[0]]:.1f}"
        raise Wrong(what, HINTS[hint])
    right("the numbers, without a wait of the host")
    if copied[0] > 4:
        what = f"{copied[0] // 2} batches were copied when the first was handed over"
        raise Wrong(what, HINTS["all_at_once"])
    if copied[1] < 6:
        what = f"{copied[1] // 2} batches were copied when the second was handed over"
        raise Wrong(what, HINTS["not_ahead"])
    if facts["unnoted"]:
        what = f"{facts['unnoted']} tensors of the stream of copies are used in compute"
        raise Wrong(what, HINTS["unrecorded"])


# --- 5: the loop --------------------------------------------------------------------------


def uneven() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Six batches, every second one with few labels."""
    batches = [(x, y.clone()) for x, y in finished().batches(6)]
    for _, y in batches[::2]:
        y[5:] = -1
    return batches


def wrong_epochs() -> dict[str, tuple[float, float]]:
    """Mean loss and accuracy as common mistakes have them."""
    ours, found = finished(), {}
    for name in ("right", "accumulated", "not_trained"):
        model, optimizer = ours.build(CPU)
        means, rights, counts = [], [], []
        for x, y in uneven():
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


def probe_loop(lesson: Lesson) -> None:
    ours, live = finished(), [0]
    wait = torch.toy.wait

    def noting(*args):
        live[0] = sum(trace() is not None for trace in TRACES)
        return wait(*args)

    model, optimizer = ours.build(TOY)
    model.register_forward_hook(lambda _model, _inputs, logits: LeaveTrace.apply(logits))
    source = [(x.to(TOY), y.to(TOY)) for x, y in uneven()]
    torch.toy.start_counting()
    with mock.patch.object(torch.toy, "wait", noting):
        loss, accuracy = lesson.module.train_epoch(model, optimizer, source)
    lesson.fact("waits", waits())
    lesson.fact("live", live)
    lesson.fact("result", [float(loss), float(accuracy)])
    lesson.fact("variants", wrong_epochs())


def judge_loop(group: Group, right: Callable[[str], None]) -> None:
    facts = only(group)
    counts, (loss, accuracy) = facts["waits"], facts["result"]
    variants = facts["variants"]
    if not (close(loss, variants["right"][0]) and close(accuracy, variants["right"][1])):
        hint = "other"
        for name, (their_loss, their_accuracy) in variants.items():
            if close(loss, their_loss) and close(accuracy, their_accuracy):
                hint = name.partition(",")[0]
        what = f"mean loss {loss:.4f} and accuracy {accuracy:.4f}, "
        truth = "the CPU script has {:.4f} and {:.4f}".format(*variants["right"])
        raise Wrong(what + truth, HINTS[hint])
    right("mean loss and accuracy")
    if sum(counts.values()) > 2:
        hint = "mask" if set(counts) & {"mask as an index", "nonzero"} else "asks_each_step"
        raise Wrong(f"in 6 steps the host waited: {say(counts)}", HINTS[hint])
    (live,) = facts["live"]
    if live > 2:
        what = f"after 6 steps the graphs of {live} are still there"
        raise Wrong(what, HINTS["graph_kept"])


# --- 6: mixed precision -------------------------------------------------------------------


def probe_mixed(lesson: Lesson) -> None:
    ours, theirs = finished(), lesson.module
    sums = theirs.new_sums(TOY)
    lesson.fact("sums_are", [str(sums.dtype), sums.device.type])
    model, optimizer = ours.build(TOY)
    source, dtypes, inside = ours.moved(6, TOY), [], collections.Counter()
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            layer.register_forward_hook(lambda *a: dtypes.append(str(a[2].dtype)))

    def noting(name: str, function: Callable) -> Callable:
        def noted(*args, **kwargs):
            inside[f"{name} {torch.is_autocast_enabled('toy')}"] += 1
            return function(*args, **kwargs)

        return noted

    torch.toy.start_counting()
    with contextlib.ExitStack() as stack:
        for owner, name in ((F, "cross_entropy"), (torch.Tensor, "backward")):
            patched = noting(name, getattr(owner, name))
            stack.enter_context(mock.patch.object(owner, name, patched))
        given = torch.zeros(3).to(TOY)
        torch.toy.start_counting()
        for x, y in source:
            theirs.mixed_step(model, optimizer, x, y, given)
    lesson.fact("waits", waits())
    lesson.fact("inside", dict(inside))
    lesson.fact("linear", sorted(set(dtypes)))
    lesson.fact("parameters", sorted({str(p.dtype) for p in model.parameters()}))
    lesson.fact("sums", given.tolist())
    model, optimizer = ours.build(TOY)
    truth = torch.zeros(3).to(TOY)
    for x, y in source:
        ours.mixed_step(model, optimizer, x, y, truth)
    lesson.fact("truth", truth.tolist())


def judge_mixed(group: Group, right: Callable[[str], None]) -> None:
    facts = only(group)
    dtype, where = facts["sums_are"]
    if dtype != "torch.float32":
        raise Wrong(f"the sums of an epoch are {dtype}", HINTS["sums_dtype"])
    if where != "toy":
        raise Wrong(f"new_sums is on {where}, the device is toy", HINTS["other"])
    right("new_sums")
    if facts["parameters"] != ["torch.float32"]:
        raise Wrong(f"parameters are {', '.join(facts['parameters'])}", HINTS["converted"])
    if facts["linear"] != ["torch.bfloat16"]:
        what = f"the outputs of linear layers are {', '.join(facts['linear'])}"
        raise Wrong(what, HINTS["no_autocast"])
    if "cross_entropy False" in facts["inside"]:
        raise Wrong("the loss is computed outside of autocast", HINTS["loss_outside"])
    if "backward True" in facts["inside"]:
        raise Wrong("backward runs under autocast", HINTS["backward_inside"])
    right("what runs in which precision")
    if facts["waits"]:
        raise Wrong(f"in 6 steps the host waited: {say(facts['waits'])}", HINTS["asks_in_step"])
    sums, truth = facts["sums"], facts["truth"]
    if not any(sums):
        raise Wrong("after 6 steps all sums are 0", HINTS["not_in_place"])
    if any(not close(a, b, 2e-3) for a, b in zip(sums, truth, strict=True)):
        hint = "mean_of_means" if sums[1:] == truth[1:] and sums[0] < 20 else "other"
        what = f"the sums are {[round(v, 2) for v in sums]}, "
        raise Wrong(what + f"not {[round(v, 2) for v in truth]}", HINTS[hint])


# --- 7: fewer launches --------------------------------------------------------------------


def probe_replay(lesson: Lesson) -> None:
    ours, theirs = finished(), lesson.module
    optimizer = theirs.fast_optimizer(ours.build(TOY)[0])
    (group,) = optimizer.param_groups
    lr = group["lr"]
    kind = lr.device.type if isinstance(lr, torch.Tensor) else "number"
    lesson.fact("optimizer", [bool(group["fused"]), bool(group["capturable"]), kind])
    if kind == "toy":
        held = lr
    else:
        held = group["lr"] = torch.tensor(0.01).to(TOY)
    theirs.set_rate(optimizer, 0.25)
    lesson.fact("kept", group["lr"] is held)
    lesson.fact("rate", float(held))

    state: dict[str, torch.Tensor] = {}
    total = torch.zeros((), device=TOY)
    calls = []

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        calls.append(1)
        if "moment" not in state:
            state["moment"] = torch.zeros((), device=TOY)
        state["moment"].add_(x.sum())
        total.add_(state["moment"] * y.sum())

    source = [torch.full((2, 2), float(i)) for i in range(1, 8)]
    there = [(x.to(TOY), x.to(TOY)) for x in source]
    replayed = theirs.Replayed(step, warm=2)
    seen, replays, replay = [], [], torch.toy.replay
    with mock.patch.object(torch.toy, "replay", lambda g: [replays.append(1), replay(g)]):
        for x, y in there:
            replayed(x, y)
            seen.append(total.item())
    lesson.fact("replays", len(replays))
    lesson.fact("seen", seen)
    lesson.fact("calls", len(calls))
    unchanged = [torch.equal(a.cpu(), b) for (a, _), b in zip(there, source, strict=True)]
    lesson.fact("unchanged", all(unchanged))


def judge_replay(group: Group, right: Callable[[str], None]) -> None:
    facts = only(group)
    fused, capturable, kind = facts["optimizer"]
    if not fused:
        raise Wrong("the optimizer is not fused", HINTS["not_fused"])
    if not capturable:
        raise Wrong("the optimizer may not be captured", HINTS["not_capturable"])
    if kind != "toy":
        where = "a number" if kind == "number" else f"a tensor on {kind}"
        raise Wrong(f"the learning rate is {where}", HINTS["rate_is_a_number"])
    if not facts["kept"]:
        raise Wrong("set_rate puts another object in place of the rate", HINTS["rate_replaced"])
    if not close(facts["rate"], 0.25):
        raise Wrong(f"set_rate(…, 0.25) gives {facts['rate']}", HINTS["other"])
    right("the optimizer and its rate")
    moment, total, truth = 0.0, 0.0, []
    for i in range(1, 8):
        moment += 4 * i
        total += moment * 4 * i
        truth.append(total)
    seen, calls = facts["seen"], facts["calls"]
    if not facts["unchanged"]:
        raise Wrong("a batch of the caller was overwritten", HINTS["borrowed"])
    if not facts["replays"]:
        raise Wrong("in 7 calls Python ran the step 7 times", HINTS["not_captured"])
    if calls > 3:
        raise Wrong(f"in 7 calls Python ran the step {calls} times", HINTS["captures_each"])
    if calls < 3:
        raise Wrong(f"with warm=2, Python ran the step {calls} times", HINTS["no_warm_up"])
    if seen != truth:
        place = next(i for i, (a, b) in enumerate(zip(seen, truth, strict=True)) if a != b)
        what = (
            f"after call {place + 1} the step's total is {seen[place]:g}, not {truth[place]:g}"
        )
        lost = seen[2] == seen[1]
        raise Wrong(what, HINTS["not_replayed" if lost else "stale_input"])


# --- 8: measure ---------------------------------------------------------------------------


def probe_measure(lesson: Lesson) -> None:
    toy = torch.toy

    def cases(measure: Callable) -> dict[str, float]:
        x = torch.ones(1 << 16).to(TOY)
        calls: list[int] = []

        def kernels(count: int = 20) -> None:
            for _ in range(count):
                x.add_(1)

        def slow_at_first() -> None:
            calls.append(1)
            toy.host += 1e-2 if len(calls) <= 3 else 0
            kernels()

        def slow_once() -> None:
            calls.append(1)
            toy.host += 1e-2 if len(calls) == 3 else 0
            kernels()

        found = {}
        torch.accelerator.synchronize()
        found["plain"] = measure(kernels, toy.now, warm=1, repeats=3)
        torch.accelerator.synchronize()
        kernels(400)
        found["queued"] = measure(kernels, toy.now, warm=0, repeats=1)
        torch.accelerator.synchronize()
        found["first"] = measure(slow_at_first, toy.now, warm=3, repeats=1)
        calls.clear()
        found["once"] = measure(slow_once, toy.now, warm=0, repeats=5)
        torch.accelerator.synchronize()
        return found

    lesson.fact("theirs", {k: float(v) for k, v in cases(lesson.module.measure).items()})
    lesson.fact("truth", cases(finished().measure))


def judge_measure(group: Group, right: Callable[[str], None]) -> None:
    facts = only(group)
    found, truth = facts["theirs"], facts["truth"]

    def differ(name: str, what: str, hint: str) -> None:
        if not close(found[name], truth[name], 0.02):
            took = f"{1e6 * found[name]:.0f} µs, it takes {1e6 * truth[name]:.0f} µs"
            raise Wrong(f"{what}: {took}", HINTS[hint])

    launched = 20 * finished().LAUNCH
    hint = "not_synchronized" if close(found["plain"], launched, 0.05) else "own_clock"
    differ("plain", "20 kernels on the toy's clock", hint)
    right("work is measured to its end")
    differ("queued", "20 kernels, with 400 in the queue", "queued_before")
    differ("first", "work whose first 3 calls are slow, with warm=3", "warm_up_measured")
    differ("once", "work that is slow once in 5 calls", "not_median")


def step(number: int, title: str, proves: str, probe, judge, *uses: str, crashes=()) -> Step:
    """A step of one process."""
    return Step(
        number, title, proves, probe, judge, uses, worlds=(1,), joins=False, crashes=crashes
    )


STEPS = [
    step(
        1,
        "to the device",
        "the model, its constants and its optimizer are where they belong",
        probe_device,
        judge_device,
        "pick_device",
        "Net",
        "build",
    ),
    step(
        2,
        "a copy that nobody waits for",
        "every batch arrives, and the host waits only where a buffer is needed again",
        probe_sender,
        judge_sender,
        "Sender",
    ),
    step(
        3,
        "a loader that keeps up",
        "workers read, stay and pin, and the samples come in the order of the CPU script",
        probe_loader,
        judge_loader,
        "make_loader",
        crashes=(("persistent_workers option needs", HINTS["zero_workers"]),),
    ),
    step(
        4,
        "the next batch crosses",
        "copies are one step ahead in their own stream, and nobody is too early",
        probe_prefetch,
        judge_prefetch,
        "prefetch",
        crashes=(("generator raised StopIteration", HINTS["empty_source"]),),
    ),
    step(
        5,
        "a loop that asks for nothing",
        "loss and accuracy are those of the CPU script, and the host waits at the end",
        probe_loop,
        judge_loop,
        "train_epoch",
    ),
    step(
        6,
        "16 bits where they do no harm",
        "products in bf16, everything that adds up in fp32, no wait",
        probe_mixed,
        judge_mixed,
        "new_sums",
        "mixed_step",
    ),
    step(
        7,
        "fewer launches",
        "captured once, replayed on every batch, with a rate that can change",
        probe_replay,
        judge_replay,
        "fast_optimizer",
        "set_rate",
        "Replayed",
    ),
    step(
        8,
        "measure it rightly",
        "the time is that of the work, warm, to its end, and the median",
        probe_measure,
        judge_measure,
        "measure",
    ),
]
