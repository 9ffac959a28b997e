"""Grade lab 07: test each step, and choose the hint that fits the mistake.

Every step is graded on the toy, which is the simulated device of the lab. The toy runs queued
work as late as possible, and it counts waits, copies and launches. All functions that a step
does not grade come from the finished lab.
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
import torch._dynamo  # optimizers import it; import it here once for all processes
from torch import nn
from torch.nn import functional as F

from graders.dsl import Lab, allclose, isclose, matching_hint, require, show

# not preloaded, because the finished lab makes the toy the accelerator of its process
LAB = Lab(isolate_steps=False, preload_reference=False)
CPU = torch.device("cpu")
CUDA_ONLY = {  # errors of torch.cuda in a PyTorch without CUDA
    "dummy base class|requires CUDA support|not compiled with CUDA|without CUDA": "cuda_only",
}
SETTINGS = ("betas", "eps", "weight_decay", "amsgrad", "maximize")  # of AdamW


def other_settings(optimizer: torch.optim.Optimizer) -> str:
    """Describe the settings of AdamW that are not the defaults."""
    usual = torch.optim.AdamW([torch.zeros(1)]).defaults
    return ", ".join(
        f"{name}={group[name]}"
        for group in optimizer.param_groups
        for name in SETTINGS
        if group[name] != usual[name]
    )


def describe_waits() -> str:
    """Describe the waits of the host since start_counting."""
    return ", ".join(f"{number} × {why}" for why, number in torch.toy.waits.items())


def require_kind(call: str, value: object, fits: bool, wanted: str) -> None:
    """Raise `Wrong` unless a call has returned a value of the right kind."""
    found = "None" if value is None else f"a {type(value).__name__}"
    if isinstance(value, (tuple, list)):
        found += f" of {', '.join(type(each).__name__ for each in value[:4])}"
    require(fits, f"{call} returns {found}, and should return {wanted}", "returned")


def has_kinds(value: object, *kinds: type) -> bool:
    """Return whether `value` is a sequence of values of these kinds."""
    if not isinstance(value, (tuple, list)) or len(value) != len(kinds):
        return False
    return all(isinstance(each, kind) for each, kind in zip(value, kinds, strict=True))


# --- 1: to the device ---------------------------------------------------------------------


@LAB.alone(
    1, "move the model to the device",
    "the model and its constants are on the device, and the optimizer updates the model",
    "pick_device Net build",
)  # fmt: skip
def device(submission, reference, lesson):
    toy, without_accelerator = torch.device("toy"), []

    def current(kind: torch.device | None) -> Callable:
        return lambda check_available=False: None if check_available else kind

    for kind in (torch.device("cuda"), None):
        with (
            mock.patch.object(torch.accelerator, "is_available", lambda: False),
            mock.patch.object(torch.accelerator, "current_accelerator", current(kind)),
        ):
            without_accelerator.append(submission.pick_device())
    names = " and ".join(str(each) for each in without_accelerator if str(each) != "cpu")
    what = f"without an accelerator, pick_device returns {names}"
    require(not names, what, "returned" if without_accelerator == [None, None] else "not_asked")
    here = submission.pick_device()
    what = f"the accelerator is toy, but pick_device returns {here}"
    require(str(here).startswith("toy"), what, "named")
    for each in (here, *without_accelerator):
        require_kind("pick_device()", each, isinstance(each, torch.device), "a torch.device")
    yield "pick_device"

    mean, std = reference.Signals().moments()
    net = submission.Net(mean, std).to(toy)
    for name in ("mean", "std"):
        tensor, what = getattr(net, name, None), f"after net.to(device), net.{name} is"
        moved = isinstance(tensor, torch.Tensor) and tensor.device.type == "toy"
        require(moved, f"{what} not on the device", "attribute")
        require(name in net.state_dict(), f"{what} not in the state_dict", "not_saved")
        require(not isinstance(tensor, nn.Parameter), f"{what} a parameter", "trained")
    for points in (5, 7):
        x = torch.zeros(2, points, reference.CHANNELS).to(toy)
        torch.toy.start_counting()
        numbers = submission.Net.positions(net, x)
        copies = sum(torch.toy.waits.values())
        require_kind("positions(x)", numbers, isinstance(numbers, torch.Tensor), "a tensor")
        where = numbers.device.type
        require(where == "toy", f"positions(x) is on {where}, and x is on toy", "made_on_cpu")
        what = f"in positions(x) the host waits for the device: {describe_waits()}"
        require(not copies, what, "made_and_moved")
        values = numbers.tolist()
        what = f"for {points} points, positions(x) is {values} with the dtype {numbers.dtype}"
        right = values == list(range(points)) and not numbers.is_floating_point()
        require(right, what, "positions")
    yield "Net"

    built = submission.build(toy)
    right = has_kinds(built, nn.Module, torch.optim.Optimizer)
    require_kind("build(device)", built, right, "the model and the optimizer, in this order")
    model, optimizer = built
    updated = {id(p) for group in optimizer.param_groups for p in group["params"]}
    where = next(model.parameters()).device.type
    require(where == "toy", f"the parameters are on {where}", "not_moved")
    good = updated == {id(p) for p in model.parameters()}
    require(good, "the optimizer does not update the parameters of the model", "moved_late")
    kind, rates = type(optimizer).__name__, [group["lr"] for group in optimizer.param_groups]
    right = isinstance(optimizer, torch.optim.AdamW)
    right = right and all(isclose(rate, reference.RATE) for rate in rates)
    what = f"the optimizer is {kind} with the learning rate {', '.join(map(str, rates))}"
    require(right, what, "adamw")
    settings = other_settings(optimizer)
    require(
        not settings,
        f"AdamW has settings that the CPU script does not have: {settings}",
        "adamw",
    )
    (x, _), *_ = reference.batches(1)
    torch.manual_seed(0)
    truth = reference.CpuNet(mean, std)(x)
    off = (torch.tensor(model(x.to(toy)).tolist()) - truth).abs().max().item()
    require(
        off <= 1e-3, f"the logits differ from those on the CPU by up to {off:.3g}", "logits"
    )


# --- 2: a ring of pinned buffers ----------------------------------------------------------

SLOTS = 3


@LAB.alone(
    2, "copies without a wait of the host",
    "every batch arrives, and the host waits only before it fills a buffer again", "Sender",
    crashes={"index out of range": "one_buffer"} | CUDA_ONLY,
)  # fmt: skip
def sender(submission, reference, lesson):
    batches = [x for x, _ in reference.batches()]
    sent, allowed = len(batches), len(batches) - SLOTS
    arrived, sources = sent_by(
        submission.Sender(batches[0], SLOTS, torch.device("toy")), batches, reference
    )
    counts, pins, waited = dict(torch.toy.waits), torch.toy.pins, describe_waits()
    torch.accelerator.synchronize()
    wrong = [
        str(i)
        for i, (a, b) in enumerate(zip(arrived, batches, strict=True))
        if not torch.equal(a.cpu(), b)
    ]
    require(not pins, f"memory was pinned {pins} times in {sent} calls of send", "pins_each")
    what = f"in {sent} calls of send the host waited: {waited}"
    unpinned = sum(not pinned for pinned, *_ in sources)
    if unpinned:
        what += f"; the sources of {unpinned} copies were not pinned"
    hint = "pageable" if unpinned else "blocking"
    require("copy to the device" not in counts, what, hint)
    require("synchronize" not in counts, what, "waits_for_all")
    hint = "mark_early" if counts.get("event") else "overwritten"
    what = f"of {sent} batches, these arrived with wrong numbers: {', '.join(wrong)}"
    used = len({address for _, address, _ in sources})
    if used < SLOTS:
        hint = "one_buffer"
        what += f"; with {SLOTS} slots, all copies came from {used} buffer{'s' * (used > 1)}"
    is_unfilled = len(sources) == sent and not all(
        source.shape == batch.shape and torch.equal(source, batch)
        for (*_, source), batch in zip(sources, batches, strict=True)
    )
    if is_unfilled and hint != "one_buffer":
        hint = "copied_before_filled"
        what = "when the copies were launched, some buffers did not contain their batch"
    require(not wrong and not is_unfilled, what, hint)
    yield f"{sent} batches arrive"
    events = counts.get("event", 0)
    what = f"for {sent} batches and {SLOTS} buffers the host waited {events} times, and "
    what += f"{allowed} times are enough"
    require(events <= allowed, what, "waits_for_newest")

    labels = [y for _, y in reference.batches()]
    more = submission.Sender(labels[0], SLOTS + 1, torch.device("toy"))
    arrived, sources = sent_by(more, labels, reference)
    torch.accelerator.synchronize()
    dtype, wanted = arrived[0].dtype, labels[0].dtype
    require(dtype == wanted, f"batches of {wanted} arrive as {dtype}", "buffer_kind")
    right = all(torch.equal(a.cpu(), b) for a, b in zip(arrived, labels, strict=True))
    require(right, f"with {SLOTS + 1} slots, batches arrive with wrong numbers", "one_buffer")


def sent_by(sender, batches: list, reference: ModuleType) -> tuple[list, list]:
    """Return the tensors that `send` returns, and for each copy facts about its source.

    The facts are: whether the source is pinned, its address, and its content at the launch.
    """
    sources, copy, arrived = [], reference.copy, []

    def recording_copy(func, args, kwargs):
        source = args[1] if func is torch.ops.aten.copy_.default else args[0]
        if source.device.type == "cpu":
            sources.append((source.is_pinned(), source.data_ptr(), source.clone()))
        return copy(func, args, kwargs)

    torch.toy.start_counting()
    with mock.patch.object(reference, "copy", recording_copy):
        for x in batches:
            arrived.append(sender.send(x))
            right = isinstance(arrived[-1], torch.Tensor) and arrived[-1].device.type == "toy"
            require_kind("send(batch)", arrived[-1], right, "a tensor on the device")
    return arrived, sources


# --- 3: the loader ------------------------------------------------------------------------


@LAB.alone(
    3, "a loader that is fast enough",
    "persistent workers read pinned batches, in the order of the CPU script",
    "make_loader",
    crashes={"persistent_workers option needs": "zero_workers",
             "mutually exclusive with shuffle": "order"},
)  # fmt: skip
def loader(submission, reference, lesson):
    readers = reference.Readers()
    data = torch.utils.data.Subset(readers, range(len(readers) - 5))  # the last batch is short
    loader = submission.make_loader(data, 2, torch.device("toy"))
    right = isinstance(loader, torch.utils.data.DataLoader)
    require_kind("make_loader", loader, right, "a DataLoader")
    epochs = [list(loader) for _ in range(2)]
    found = [[batch[:, 1].tolist() for batch in epoch] for epoch in epochs]
    ordered = torch.utils.data.DataLoader(data, reference.BATCH, sampler=reference.order(data))
    truth = [[batch[:, 1].tolist() for batch in ordered] for _ in range(2)]
    sizes, wanted = ([len(batch) for batch in epoch] for epoch in (found[0], truth[0]))
    what = f"the batches of {len(data)} samples have the sizes {show(sizes)}, not {wanted}"
    require(sizes == wanted, what, "batches")
    for number, ordinal in enumerate(("first", "second")):
        what = f"in the {ordinal} epoch the samples do not come in the order of the CPU script"
        require(found[number] == truth[number], what, "order")
    yield "the samples and their order"
    first, second = ({int(pid) for batch in epoch for pid in batch[:, 0]} for epoch in epochs)
    is_reader = os.getpid() in first
    require(
        not is_reader,
        "with workers=2, the process that trains reads the samples",
        "reads_itself",
    )
    what = f"with workers=2, {len(first)} processes read samples"
    require(len(first) == 2, what, "workers")
    require(first == second, "different workers read the second epoch", "workers_end")
    pinned = all(batch.is_pinned() for batch in epochs[0])
    require(pinned, "batches for the toy are not in pinned memory", "loader_pageable")
    loader = submission.make_loader(data, 0, CPU)
    require(not loader.pin_memory, "batches for the CPU are in pinned memory", "pinned_for_cpu")
    what = f"with workers=0, the loader has {loader.num_workers} workers"
    require(loader.num_workers == 0, what, "workers")


# --- 4: prefetch --------------------------------------------------------------------------


@LAB.alone(
    4, "copy the next batch while this one computes",
    "copies run one step ahead in their own stream, and no batch is used too early",
    "prefetch",
    crashes=CUDA_ONLY | {"generator raised StopIteration": "empty_source",
             "has no len|not subscriptable": "reads_all",
             "unknown parameter type": "on_host"},
)  # fmt: skip
def prefetch(submission, reference, lesson):
    toy = torch.device("toy")
    source = reference.pinned_batches(6)
    weight = torch.ones(reference.CHANNELS).to(toy)
    compute = torch.accelerator.current_stream()
    torch.toy.start_counting()
    wait_event, is_compute, read = type(compute).wait_event, [], []

    def recording_wait(stream, event):
        is_compute.append(stream is compute)
        return wait_event(stream, event)

    def recorded_source():
        for batch in source:
            read.append(batch)
            yield batch

    sums, copied, waited_first = [], [], False
    with mock.patch.object(type(compute), "wait_event", recording_wait):
        for batch in submission.prefetch(recorded_source(), toy):
            waited_first = any(is_compute) if not sums else waited_first
            right = has_kinds(batch, torch.Tensor, torch.Tensor)
            require_kind("hand_over(…)", batch, right, "the two tensors")
            where = {tensor.device.type for tensor in batch}
            what = f"the tensors of a batch are on {' and '.join(sorted(where))}"
            require(where == {"toy"}, what, "on_host")
            what = "while the loop works on a batch, the current stream is that of the copies"
            require(torch.toy.current is compute, what, "stream_left")
            copied.append(len(torch.toy.copies))
            sums.append((batch[0] @ weight).sum() + batch[1].sum())
            what = f"{len(read)} batches were read before the first one was yielded"
            require(len(read) < 6 or len(sums) > 1 or copied[0] > 4, what, "reads_all")
    counts, waited, unrecorded = dict(torch.toy.waits), describe_waits(), torch.toy.unrecorded()
    in_compute = sum(stream is compute for stream in torch.toy.copies)
    compute.run()  # this runs the copies only if compute waits for them
    sums = [total.item() for total in sums]
    truth = [(x.sum() + y.sum()).item() for x, y in source]
    started = len(torch.toy.copies) // 2
    what = f"prefetch started {started} copies of batches, and yielded nothing"
    require(sums, what, "batch_lost")
    require(len(sums) == 6, f"of 6 batches, prefetch yielded {len(sums)}", "batch_lost")
    hint = "prefetch_blocking" if "copy to the device" in counts else "host_waits"
    require(not counts, f"for 6 batches the host waited: {waited}", hint)
    require(
        not in_compute, f"{in_compute} of 12 copies are in the compute stream", "same_stream"
    )
    for i, (found, true) in enumerate(zip(sums, truth, strict=True)):
        hint = "mark_elsewhere" if waited_first else "not_waited"
        if any(isclose(found, each, 1e-5) for each in truth):
            hint = "other_batch"
        what = f"the sum of the numbers of batch {i} is {found:.1f}, and should be {true:.1f}"
        require(isclose(found, true, 1e-5), what, hint)
    yield "the numbers, without a wait of the host"
    first, second = copied[0] // 2, copied[1] // 2
    what = f"{first} batches were copied before the first one was yielded"
    require(copied[0] <= 4, what, "all_at_once")
    what = f"{second} batches were copied before the second one was yielded"
    require(copied[1] >= 6, what, "not_ahead")
    what = f"compute uses {unrecorded} tensors whose memory belongs to the stream of the copies"
    require(not unrecorded, what, "unrecorded")
    found = list(submission.prefetch(iter([]), toy))
    require(not found, f"without a batch, prefetch yields {found}", "empty_source")

    for _ in submission.prefetch(iter(source), toy):
        compute.run()  # run what must be done before the first batch is used
        what = "compute waits for the second batch before it uses the first"
        require(torch.toy.copies[-1].queue, what, "waits_for_both")
        break


# --- 5: the loop --------------------------------------------------------------------------


def uneven(reference: ModuleType) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return six batches. Every second one has few labels."""
    batches = [(x, y.clone()) for x, y in reference.batches(6)]
    for _, y in batches[::2]:
        y[5:] = -1
    return batches


def epochs(reference: ModuleType) -> dict[str, tuple[float, float]]:
    """Return pairs of mean loss and accuracy: the right pair, and those of common mistakes."""
    found = {}
    for name in ("right", "accumulated", "not_trained", "unlabelled", "summed"):
        model, optimizer = reference.build(CPU)
        means, rights, counts = [], [], []
        for x, y in uneven(reference):
            if name != "accumulated":
                optimizer.zero_grad()
            logits = model(x)
            labels = y.clamp(min=0) if name == "unlabelled" else y
            loss = F.cross_entropy(logits, labels, ignore_index=-1)
            (loss * (y >= 0).sum() if name == "summed" else loss).backward()
            if name != "not_trained":
                optimizer.step()
            means.append(loss.item())
            rights.append((logits.argmax(1) == y).sum().item())
            counts.append((y >= 0).sum().item())
        total = sum(mean * count for mean, count in zip(means, counts, strict=True))
        found[name] = total / sum(counts), sum(rights) / sum(counts)
        if name == "right":
            whole = 6 * reference.BATCH
            found["mean_of_means"] = sum(means) / len(means), found[name][1]
            found["mean_of_means, by sizes"] = (
                reference.BATCH * sum(means) / sum(counts),
                found[name][1],
            )
            found["mean_of_means, by counts"] = sum(means) / sum(counts), found[name][1]
            found["last_loss"] = means[-1], found[name][1]
            found["all_counted"] = total / whole, sum(rights) / whole
            found["all_counted, in the loss"] = sum(means) / len(means), found["all_counted"][1]
            found["returned, swapped"] = found[name][::-1]
            found["returned, sums"] = total, sum(rights)
    return found


class Trace:
    """An object that lives as long as the graph that refers to it."""


class LeaveTrace(torch.autograd.Function):
    """A copy of its input. `TRACES` shows whether the graph of the copy still exists."""

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
    5, "a training loop without waits",
    "loss and accuracy equal those of the CPU script, and the host waits only at the end",
    "train_epoch",
    crashes={"Target -1 is out of bounds": "unlabelled",
             "desired output type (Long|Int)": "sums_dtype",
             "has no len|not subscriptable": "reads_all"},
)  # fmt: skip
def loop(submission, reference, lesson):
    live, wait, toy = 0, torch.toy.wait, torch.device("toy")

    def counting_wait(*args):
        nonlocal live
        live = sum(trace() is not None for trace in TRACES)
        return wait(*args)

    model, optimizer = reference.build(toy)
    model.register_forward_hook(lambda _model, _inputs, logits: LeaveTrace.apply(logits))
    batches, waits_in_steps = [(x.to(toy), y.to(toy)) for x, y in uneven(reference)], []

    def source():  # a loader may have no length
        yield from batches
        waits_in_steps.append(
            (sum(torch.toy.waits.values()), describe_waits(), {*torch.toy.waits})
        )

    torch.toy.start_counting()
    with mock.patch.object(torch.toy, "wait", counting_wait):
        found = submission.train_epoch(model, optimizer, source())
    total, waited = sum(torch.toy.waits.values()), describe_waits()
    right = has_kinds(found, (int, float, torch.Tensor), (int, float, torch.Tensor))
    require_kind("train_epoch", found, right, "the mean loss and the accuracy")
    loss, accuracy = map(float, found)
    known = epochs(reference)
    fits = [
        name
        for name, (mean, fraction) in known.items()
        if isclose(loss, mean, 1e-3) and isclose(accuracy, fraction, 1e-3)
    ]
    truth = "the CPU script gives {:.4f} and {:.4f}".format(*known["right"])
    hint = "accuracy" if isclose(loss, known["right"][0], 1e-3) else "other"
    hint = fits[-1].partition(",")[0] if fits else hint
    what = f"the mean loss is {loss:.4f} and the accuracy {accuracy:.4f}, but {truth}"
    require("right" in fits, what, hint)
    yield "mean loss and accuracy"
    count, shown, kinds = waits_in_steps[0]
    hint = "mask" if kinds & {"mask as an index", "nonzero"} else "asks_each_step"
    require(not count, f"within 6 steps the host waited: {shown}", hint)
    what = f"after 6 steps the host waited: {waited}"
    require(total - count <= 4, what, "asks_each_step")
    require(live <= 2, f"after 6 steps, the graphs of {live} steps are in memory", "graph_kept")


# --- 6: mixed precision -------------------------------------------------------------------


@LAB.alone(
    6, "16 bits where they do no harm",
    "products are in bf16, parameters and sums are in fp32, and the host never waits",
    "new_sums mixed_step",
    crashes={"Target -1 is out of bounds": "unlabelled"},
)  # fmt: skip
def mixed(submission, reference, lesson):
    toy = torch.device("toy")
    torch.toy.start_counting()
    sums = submission.new_sums(toy)
    launches = torch.toy.launches
    right = isinstance(sums, torch.Tensor) and sums.shape == (3,)
    require_kind("new_sums(device)", sums, right, "a tensor of three numbers")
    is_wide = sums.is_floating_point() and sums.itemsize >= 4
    require(is_wide, f"the sums of an epoch have the dtype {sums.dtype}", "sums_dtype")
    where = sums.device.type
    require(where == "toy", f"new_sums is on {where}, and the device is toy", "sums_start")
    require(launches, "nothing was written to the tensor that new_sums returns", "sums_start")
    require(not any(sums.tolist()), f"new_sums returns {sums.tolist()}", "sums_start")
    yield "new_sums"
    model, optimizer = reference.build(toy)
    source = reference.batches_on(6, toy)
    kinds, weights = set(), set()  # dtypes of outputs, and of weights
    calls = set()  # (name, whether autocast is enabled, dtype of the first argument)

    def record_dtypes(layer: nn.Linear, _inputs: object, output: torch.Tensor) -> None:
        kinds.add(str(output.dtype))
        weights.add(str(layer.weight.dtype))

    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            layer.register_forward_hook(record_dtypes)

    def recording(name: str, function: Callable) -> Callable:
        def recorded(*args, **kwargs):
            dtype = getattr(args[0] if args else None, "dtype", None)
            calls.add((name, torch.is_autocast_enabled("toy"), dtype))
            return function(*args, **kwargs)

        return recorded

    with contextlib.ExitStack() as stack:
        for owner, name in ((F, "cross_entropy"), (torch.autograd, "backward")):
            patched = recording(name, getattr(owner, name))
            stack.enter_context(mock.patch.object(owner, name, patched))
        given = torch.zeros(3).to(toy)
        torch.toy.start_counting()
        for x, y in source:
            submission.mixed_step(model, optimizer, x, y, given)
    waited, mask = describe_waits(), {"mask as an index", "nonzero"} & {*torch.toy.waits}
    parameters = {str(p.dtype) for p in model.parameters()} | weights
    what = f"the parameters are in {' and '.join(sorted(parameters))}"
    require(parameters == {"torch.float32"}, what, "converted")
    what = f"the outputs of linear layers are in {', '.join(sorted(kinds))}"
    require(kinds == {"torch.bfloat16"}, what, "no_autocast")
    outside = ("cross_entropy", False, torch.bfloat16) in calls
    require(not outside, "the loss is computed outside of autocast", "loss_outside")
    under = any(name == "backward" and enabled for name, enabled, _ in calls)
    require(not under, "backward runs under autocast", "backward_inside")
    yield "what runs in which precision"
    hint = "mask" if mask else "asks_in_step"
    require(not waited, f"in 6 steps the host waited: {waited}", hint)
    what = "after 6 steps, the sums need gradients, so they keep the graphs of all steps"
    require(not given.requires_grad, what, "graph_kept")
    sums, truth = given.tolist(), sums_of(reference, source)
    require(any(sums), "after 6 steps all sums are 0", "not_in_place")
    hint = "other"
    if sums[1:] == truth[1:]:
        means = sums_of(reference, source, weight=1.0)[0]
        hint = matching_hint(sums[0], {"mean_of_means": [means, means * reference.BATCH]}, 1e-3)
    elif isclose(sums[0], truth[0], 5e-4) and sums[2] == truth[2]:
        hint = "right_answers"
    if sums[2] < truth[2] and sums[1] <= truth[1]:
        hint = "not_in_place"
    if sums[2] == sum(len(y) for _, y in source):
        hint = "all_counted"
    if sums[2] != truth[2] and allclose(sorted(sums), sorted(truth), 5e-4):
        hint = "sums_order"
    what = f"the sums are {[round(v, 2) for v in sums]}, not {[round(v, 2) for v in truth]}"
    if not allclose(sums, truth, 5e-4):
        for method, name in (("step", "not_trained"), ("zero_grad", "accumulated")):
            hint = name if allclose(sums, sums_of(reference, source, method), 5e-4) else hint
        require(False, what, hint)


def sums_of(
    reference: ModuleType, source: list, without: str = "", weight: float | None = None
) -> list[float]:
    """Return the sums of the finished lab.

    `without` names a method that its optimizer skips. `weight` replaces the number of labelled
    samples as the weight of each mean loss.
    """
    model, optimizer = reference.build(torch.device("toy"))
    sums = torch.zeros(3).to(torch.device("toy"))
    if without:
        setattr(optimizer, without, lambda: None)
    total = 0.0
    for x, y in source:
        before = sums.tolist()
        reference.mixed_step(model, optimizer, x, y, sums)
        loss, _, known = (b - a for a, b in zip(before, sums.tolist(), strict=True))
        total += loss if weight is None else weight * loss / known
    return [total, *sums.tolist()[1:]]


# --- 7: fewer launches --------------------------------------------------------------------


@LAB.alone(
    7, "fewer launches",
    "the step is captured once and replayed on every batch, and the rate can change",
    "fast_optimizer set_rate Replayed",
    crashes=CUDA_ONLY | {"'NoneType' object has no attribute 'replay'": "graph_lost"},
)  # fmt: skip
def replay(submission, reference, lesson):
    toy = torch.device("toy")
    optimizer = submission.fast_optimizer(reference.build(toy)[0])
    right = isinstance(optimizer, torch.optim.Optimizer)
    require_kind("fast_optimizer(model)", optimizer, right, "an optimizer")
    kind = type(optimizer).__name__
    require(isinstance(optimizer, torch.optim.AdamW), f"the optimizer is {kind}", "adamw")
    settings = other_settings(optimizer)
    require(not settings, f"AdamW has settings that build does not use: {settings}", "adamw")
    for group in optimizer.param_groups:
        rate = group["lr"]
        require(group["fused"], "the optimizer is not fused", "not_fused")
        require(group["capturable"], "the optimizer may not be captured", "not_capturable")
        tensor = isinstance(rate, torch.Tensor)
        where = f"a tensor on {rate.device.type}" if tensor else "a number"
        what = f"the learning rate is {where}"
        require(where == "a tensor on toy", what, "rate_is_a_number")
        what = f"the learning rate is {float(rate):.3g}, and RATE is {reference.RATE}"
        require(isclose(rate, reference.RATE, 1e-3), what, "adamw")
        submission.set_rate(optimizer, 0.25)
        what = "set_rate replaces the tensor of the rate by a different object"
        require(group["lr"] is rate, what, "rate_replaced")
        what = f"after set_rate(optimizer, 0.25) the rate is {float(rate):.4g}"
        require(isclose(rate, 0.25, 1e-3), what, "rate_value")
    rates = [torch.full((), value, device=toy) for value in (0.1, 0.2)]
    groups = [{"params": [torch.ones(1, device=toy)], "lr": rate} for rate in rates]
    submission.set_rate(torch.optim.AdamW(groups, fused=True, capturable=True), 0.5)
    found = ", ".join(f"{float(rate):.2g}" for rate in rates)
    what = f"the optimizer has two groups, and after set_rate(optimizer, 0.5) they have {found}"
    require(all(isclose(rate, 0.5, 1e-3) for rate in rates), what, "rate_groups")
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
    batches = [(x.to(toy), x.to(toy)) for x in source]
    replayed = submission.Replayed(step, warm=2)
    seen, replays, replay = [], [], torch.toy.replay
    with mock.patch.object(torch.toy, "replay", lambda g: [replays.append(1), replay(g)]):
        for x, y in batches:
            replayed(x, y)
            seen.append(total.item())
    are_unchanged = all(
        torch.equal(given.cpu(), x)
        for pair, x in zip(batches, source, strict=True)
        for given in pair
    )
    require(are_unchanged, "a batch of the caller was overwritten", "borrowed")
    what = f"with warm=2, Python ran the step {calls} times in 7 calls, "
    what += f"and the graph was replayed {len(replays)} times"
    require(replays or calls < 7, what, "not_captured")
    too_few = len(replays) < 5
    require(calls <= 3, what, "warm_count" if too_few else "captures_each")
    require(calls == 3, what, "no_warm_up" if calls < 2 else "warm_count")
    moment = true = 0.0
    for i, found in enumerate(seen, 1):
        moment += 4 * i
        true += moment * 4 * i
        problem = f"after call {i} the step's total is {found:g}, not {true:g}"
        if len(replays) != 5:
            problem, hint = what, "not_replayed" if too_few else "warm_count"
        require(found == true, problem, "stale_input" if len(replays) == 5 else hint)
    yield "warm-up, capture and replays"
    calls, replayed = 0, submission.Replayed(step, warm=1)
    for x, y in batches[:3]:
        replayed(x, y)
    what = f"with warm=1, Python ran the step of a second object {calls} times in 3 calls, "
    require(calls == 2, f"{what}and should run it 2 times", "warm_count")


# --- 8: measure ---------------------------------------------------------------------------


STEPS = 3  # steps in the trace below


def invented_trace() -> list[dict]:
    """Return a trace of three steps with two threads, in which two operators start together."""
    events: list[dict] = [{"ph": "M", "name": "process_name", "args": {"name": "python"}}]
    for begin in (0.0, 200.0, 400.0):
        step = {"cat": "user_annotation", "name": f"ProfilerStep#{begin / 200 + 3:.0f}"}
        kernel = {"cat": "kernel", "name": "gemm", "tid": 7, "ts": begin + 15, "dur": 90.0}
        memory = {"ph": "i", "cat": "cpu_instant_event", "name": "[memory]", "tid": 1}
        flow = {"ph": "s", "cat": "fwdbwd", "name": "fwdbwd", "tid": 1, "ts": begin + 60}
        events += [kernel, memory | {"ts": begin + 15}, flow]
        for name, tid, start, duration, *shapes in (
            ("mm", 1, 80, 8, [5, 3], [3, 3]),  # starts when the operator before it ends
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
    """Return calls and own time by name and shapes, with a common mistake if one is named."""
    table: dict[tuple[str, str], tuple] = {}
    operators = [event for event in events if event.get("cat") == "cpu_op"]

    def is_within(a: dict, b: dict) -> bool:
        """Return whether operator a runs inside operator b."""
        same_thread = a["tid"] == b["tid"] or mistake == "threads"
        ends = [event["ts"] + event["dur"] for event in (a, b)]
        if mistake == "adjacent" and same_thread and a["ts"] == ends[1]:
            return True
        return same_thread and a["dur"] < b["dur"] and b["ts"] <= a["ts"] and ends[0] <= ends[1]

    for event in operators:
        inside = [other for other in operators if is_within(other, event)]
        if mistake != "grandchildren":
            inside = [a for a in inside if not any(is_within(a, b) for b in inside)]
        nested = sum(other["dur"] for other in inside) * (mistake != "total_time")
        key = event["name"], json.dumps(event["args"]["Input Dims"])
        calls, own = table.get(key, (0, 0))
        table[key] = calls + 1, own + event["dur"] - nested
    return {key: (calls / STEPS, own / STEPS) for key, (calls, own) in table.items()}


def table_by_stack(events: list[dict], mistake: str) -> dict[tuple[str, str], tuple]:
    """Return calls and own time by a stack with one mistake: "ties" or "one_closed"."""
    table: dict[tuple[str, str], list[float]] = {}
    stacks: dict[int, list[tuple]] = {}
    operators = [event for event in events if event.get("cat") == "cpu_op"]
    sign = 0 if mistake == "ties" else -1
    for event in sorted(operators, key=lambda event: (event["ts"], sign * event["dur"])):
        stack = stacks.setdefault(event["tid"], [])
        while stack and stack[-1][1] <= event["ts"]:
            stack.pop()
            if mistake == "one_closed":
                break
        key = event["name"], json.dumps(event["args"]["Input Dims"])
        row = table.setdefault(key, [0, 0])
        row[0] += 1
        row[1] += event["dur"]
        if stack:
            table[stack[-1][0]][1] -= event["dur"]
        stack.append((key, event["ts"] + event["dur"]))
    return {key: (calls / STEPS, own / STEPS) for key, (calls, own) in table.items()}


def times_by(measure: Callable) -> dict[str, float]:
    """Return the times that `measure` returns for the toy, and how often it calls functions."""
    toy, x = torch.toy, torch.ones(1 << 16).to(torch.device("toy"))
    found = {"clock": 0, "calls": 0}

    def clock() -> float:
        found["clock"] += 1
        return toy.now()

    def kernels(count: int = 20) -> None:
        for _ in range(count):
            x.add_(1)

    def slower(*milliseconds: int) -> Callable[[], None]:
        calls = itertools.chain(milliseconds, itertools.repeat(0))

        def work() -> None:
            found["calls"] += 1
            toy.host += 1e-3 * next(calls)
            kernels()

        return work

    torch.accelerator.synchronize()
    found["twenty"] = measure(kernels, clock, warm=1, repeats=3)
    torch.accelerator.synchronize()
    begin = toy.now()
    for _ in range(3):
        kernels()
    torch.accelerator.synchronize()
    found["mean"] = (toy.now() - begin) / 3
    kernels(400)
    found["queued"] = measure(kernels, clock, warm=0, repeats=1)
    torch.accelerator.synchronize()
    found["first"] = measure(slower(10, 10, 10), clock, warm=3, repeats=1)
    found["calls"] = 0
    found["once"] = measure(slower(3, 2, 0, 9, 1), clock, warm=0, repeats=5)
    torch.accelerator.synchronize()
    return found


@LAB.alone(
    8, "measure, then name what is slow",
    "the time is that of the work, and the trace shows which operator takes most of it",
    "measure record read_trace hot_spot",
    crashes=CUDA_ONLY | {"attribute 'endswith'": "no_trace"},
)  # fmt: skip
def measured(submission, reference, lesson):
    found, truth = times_by(submission.measure), times_by(reference.measure)
    seconds = found["twenty"]
    require_kind("measure", seconds, isinstance(seconds, (int, float)), "a number of seconds")
    is_launch_time = isclose(found["twenty"], 20 * reference.LAUNCH, 0.05)
    hint = "not_synchronized" if is_launch_time else "own_clock"
    hint = "other" if found["clock"] >= truth["clock"] and not is_launch_time else hint
    if any(isclose(found["twenty"], unit * truth["twenty"], 1e-2) for unit in (1e3, 1e6)):
        hint = "seconds"
    if isclose(found["twenty"], truth["mean"], 1e-3) or isclose(
        found["twenty"], 3 * truth["twenty"], 1e-2
    ):
        hint = "not_median"
    for name, work, mistake in (
        ("twenty", "20 kernels on the toy's clock", hint),
        ("queued", "20 kernels, with 400 in the queue", "queued_before"),
        ("first", "work whose first 3 calls are slow, with warm=3", "warm_up_measured"),
        ("once", "five calls that take 3.4, 2.4, 0.4, 9.4 and 1.4 ms", "not_median"),
    ):  # fmt: skip
        result = f"measure returns {1e6 * found[name]:.0f} µs, and should return "
        result += f"{1e6 * truth[name]:.0f} µs"
        require(isclose(found[name], truth[name], 0.02), f"{work}: {result}", mistake)
        if name == "twenty":
            yield "work is measured until it is finished"
        what = f"with warm=0 and repeats=5, measure called work() {found['calls']} times"
        require(name != "first" or found["calls"] == truth["calls"], what, "calls_of_work")

    with tempfile.TemporaryDirectory() as folder:
        yield from profiled(submission, reference, Path(folder))
    spot = submission.hot_spot()
    right = has_kinds(spot, str, (list, tuple), (int, float))
    right = right and all(isinstance(shape, (list, tuple)) for shape in spot[1])
    words = "a name, a list of shapes, and a number of calls"
    require_kind("hot_spot()", spot, right, words)
    name, shapes, calls = spot
    true_name, true_shapes, true_calls = reference.hot_spot()
    what = f"hot_spot() names {name} with the shapes {shapes}, called {calls} times a step"
    wrapper = name == "aten::matmul"
    require(name == true_name, what, "wrapper" if wrapper else "hot_name")
    require([list(shape) for shape in shapes] == true_shapes, what, "hot_shapes")
    require(calls == true_calls, what, "hot_calls")


def profiled(submission: ModuleType, reference: ModuleType, folder: Path):
    """Compare a recorded trace with that of the finished lab, and read an invented trace."""
    x, path, done = torch.ones(4, 4), folder / "trace.json", []

    def step() -> None:
        done.append(torch.cumsum(x, 0) if not done else x)  # only the first step does this
        torch.stack([x @ x, x @ x]).relu()

    submission.record(step, path, warm=1, count=3)
    what = f"with warm=1 and count=3, record called step() {len(done)} times"
    require(len(done) == 4, what, "step_count")
    require(path.is_file(), "record wrote no trace", "no_trace")
    events = json.loads(path.read_text())["traceEvents"]
    steps = sum(name.startswith("ProfilerStep") for name in {e.get("name", "") for e in events})
    require(steps, "the trace has no steps", "no_schedule")
    names = [event.get("name") for event in events if event.get("cat") == "cpu_op"]
    what = f"with count=3, {steps} steps are in the trace"
    require(steps == 3, what, "warm_recorded")
    what = "the trace has operators of a call before the last three"
    require("aten::cumsum" not in names, what, "warm_recorded")
    dims = any("Input Dims" in event.get("args", {}) for event in events)
    require(dims, "no event has the shapes of its inputs", "no_shapes")
    done.clear()
    reference.record(step, folder / "reference.json", warm=1, count=3)
    calls, true = (
        {f"{row.name} {row.shapes}": row.calls for row in reference.read_trace(each)}
        for each in (path, folder / "reference.json")
    )
    for name in sorted(calls | true):
        found, wanted = calls.get(name, 0), true.get(name, 0)
        what = f"a step in the trace calls {name} {found:.3g} times, and step() calls it "
        what += f"{wanted:g} times"
        require(found == wanted, what, "warm_recorded" if found < wanted else "other")
    yield "the trace has the requested steps, with shapes"

    path.write_text(json.dumps({"traceEvents": invented_trace()}))
    rows = submission.read_trace(path)
    right = isinstance(rows, list) and all(hasattr(row, "own") for row in rows)
    require_kind("read_trace(path)", rows, right, "a list of Row")
    kinds = {type(row.shapes).__name__ for row in rows}
    require(
        kinds == {"list"}, f"row.shapes is a {', a '.join(kinds)}, and not a list", "returned"
    )
    found = {(row.name, json.dumps(row.shapes)): (row.calls, row.own) for row in rows}
    true = table_of(invented_trace())
    products = [row for row in rows if row.name == "aten::mm"]
    require(len(products) != 1, "products of two shapes are in one row", "by_name")
    hint = "ties" if any(own < 0 for _, own in found.values()) else "other"
    for mistake in ("total_time", "grandchildren", "threads", "adjacent", "one_closed"):
        by_stack = mistake == "one_closed"
        known = (table_by_stack if by_stack else table_of)(invented_trace(), mistake)
        if all(
            allclose(list(each), [*known[key]]) for key, each in found.items() if key in known
        ):
            hint = mistake
    if found.keys() == true.keys():
        ratios = [{round(found[key][i] / true[key][i], 4) for key in true} for i in (0, 1)]
        is_multiple = ratios != [{1}, {1}] and all(len(each) == 1 for each in ratios)
        for_call = all(isclose(found[key][1], true[key][1] / true[key][0]) for key in true)
        hint = "all_steps" if is_multiple or for_call else hint
        calls_fit = all(isclose(found[key][0], true[key][0]) for key in true)
        if is_multiple and calls_fit and any(isclose(*ratios[1], 10**n) for n in (-6, -3, 3)):
            hint = "microseconds"
    for key, (count, own) in true.items():
        what = f"{key[0]} of {key[1]} has {count:g} calls and {own:g} µs of own time a step, "
        what += "and read_trace returns {:g} and {:g}".format(*found.get(key, (0, 0)))
        require(found.get(key) == (count, own), what, hint)
    require(
        len(found) == len(true),
        f"some of these rows are not operators: {sorted(found)}",
        "other",
    )
    in_order = [row.own for row in rows] == sorted((row.own for row in rows), reverse=True)
    require(in_order, "the rows are not in the order of their own times", "row_order")
    yield "a trace is read, by name and shapes"
