"""Grade lab 11: test each step, and choose the hint that fits the mistake.

Each step is graded separately. All functions that a step does not grade come from the finished
lab. If a number is wrong, it is compared with the numbers that common mistakes give. If it
equals one of these, this mistake determines the hint.
"""

import contextlib
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from graders.dsl import Lab, allclose, gathered, isclose, matching_hint, require, show
from graders.protocol import Call, Group, Wrong
from graders.rank import DelayedWork, Lesson
from graders.verdict import MESSAGES, names_of

LAB = Lab()
TIGHT = (1e-9, 1e-10)
Weights = dict[str, torch.Tensor]


def random(*shape: int, seed: int = 3) -> torch.Tensor:
    """Return the same random numbers in float64 on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def count(number: int, noun: str) -> str:
    """Return a number and a noun in words: "1 trainer" or "2 trainers"."""
    return f"{number} {noun}" + "s" * (number != 1)


def require_tensor(what: str, found: Any, shape: Sequence[int], hint: str) -> None:
    """Raise `Wrong` unless a value is a tensor of this shape."""
    is_tensor = isinstance(found, torch.Tensor)
    kind = f"the shape {[*found.shape]}" if is_tensor else f"the type {type(found).__name__}"
    right = is_tensor and list(found.shape) == list(shape)
    require(right, f"{what} has {kind}, and it should be a tensor of shape {[*shape]}", hint)


# --- step 1 -------------------------------------------------------------------------------


@LAB.alone(
    1, "the advantage of an answer",
    "every advantage uses the mean and the standard deviation of its own group",
    "group_advantages",
    crashes={r"\[(-1, 8|8, -1)\]": "adv_group", "is invalid|size of tensor": "adv_shape"},
)  # fmt: skip
def advantages(submission, reference, lesson):
    for group, n in ((4, 6), (8, 2), (3, 5)):
        rewards = torch.rand(
            n * group, generator=torch.Generator().manual_seed(n), dtype=torch.float64
        )
        rows, before = rewards.view(n, group), rewards.clone()
        found = submission.group_advantages(rewards, group)
        case = f"for {n} groups of {group} rewards, group_advantages"
        require_tensor(f"{case} returns a value that", found, [n * group], "adv_shape")
        require(torch.equal(rewards, before), f"{case} overwrites the rewards", "adv_in_place")
        centred = rows - rows.mean(1, keepdim=True)
        columns = rewards.view(group, n)
        known = {
            "adv_centred": centred,
            "adv_population": centred / rows.std(1, keepdim=True, correction=0),
            "adv_variance": centred / (rows.var(1, keepdim=True) + 1e-4),
            "adv_not_centred": rows / (rows.std(1, keepdim=True) + 1e-4),
            "adv_order": (columns - columns.mean(0)) / columns.std(0),
            "adv_batch": (rows - rows.mean()) / rows.std(),
            "adv_sign": -centred / rows.std(1, keepdim=True),
        }
        right = centred / rows.std(1, keepdim=True)
        if group == 4:
            eights = rewards.view(-1, reference.GROUP)
            eights = (eights - eights.mean(1, keepdim=True)) / eights.std(1, keepdim=True)
            known |= {"adv_group": eights}
        named = (name for name, each in known.items() if allclose(found, each.flatten(), 1e-3))
        hint = next(named, "other")
        good = allclose(found, right.flatten(), 2e-3, 1e-4)
        what = f"{case} returns {show_numbers(found)}, but it should be {show_numbers(right)}"
        require(good, what, hint)
    for reward in (0.0, 1.0, 0.1):
        found = submission.group_advantages(torch.full((4,), reward), 4)
        what = f"for four equal rewards of {reward}, group_advantages returns"
        good = allclose(found.double(), torch.zeros(4, dtype=torch.float64), 0, 1e-2)
        require(good, f"{what} {show_numbers(found)}, but it should be zeros", "adv_equal")


def show_numbers(values: torch.Tensor) -> str:
    """Return the first five numbers of a tensor as a text."""
    numbers = [f"{each:.3g}" for each in values.detach().flatten()[:5].tolist()]
    return " ".join(numbers) + " …" * (values.numel() > 5)


# --- step 2 -------------------------------------------------------------------------------


@LAB.alone(
    2, "the objective and its mask",
    "every token has the right mask, and the loss has the right value and gradient",
    "answer_mask clipped_loss",
    crashes={"size of tensor|shape .* is invalid|broadcast": "loss_shape"},
)  # fmt: skip
def objective(submission, reference, lesson):
    end, pad = reference.END, reference.PAD
    answers = torch.tensor(
        [
            [4, 5, end, pad, pad], [end, pad, pad, pad, pad], [4, 5, 4, 5, 5],
            [4, end, 5, end, 4], [pad, 4, pad, end, pad],
        ]
    )  # fmt: skip
    found, true = submission.answer_mask(answers), reference.answer_mask(answers)
    require_tensor("the value that answer_mask returns", found, answers.shape, "mask_shape")
    found, true = found.double(), true.double()
    for answer, mine, due in zip(answers, found, true, strict=True):
        hint = "mask_by_pad"
        if not mine.any():
            hint = "mask_zero"
        elif (mine > due).any():
            hint = "mask_after_end"
        elif end not in answer:
            hint = "mask_without_end"
        elif (mine == due)[answer != end].all():
            hint = "mask_end"
        what = f"of the answer {answer.tolist()}, answer_mask returns {show_numbers(mine)}"
        require(torch.equal(mine, due), what, hint)
    yield "the mask of every answer is right"

    for clip, far in ((0.2, False), (0.5, False), (0.2, True)):
        check_loss(submission, clip, far)


def check_loss(submission: ModuleType, clip: float, far: bool) -> None:
    """Raise `Wrong` unless the loss and its gradients are right for this limit.

    With `far`, some ratios are very far from 1.
    """
    n, t = 4, 4  # equal numbers, so that a wrong shape of the advantages is not an error
    ratio = 1 + 1.5 * (torch.rand(n, t, generator=torch.Generator().manual_seed(5)) - 0.4)
    ratio, old = ratio.double(), random(n, t)
    if far:  # an additional limit, for example that of dual-clip PPO, changes these tokens
        ratio[:, 0] = torch.tensor([0.01, 0.02, 30.0, 40.0])
    new = (old + ratio.log()).requires_grad_()
    a = torch.tensor([1.0, -0.5, 2.0, -1.5], dtype=torch.float64)
    mask = torch.ones(n, t, dtype=torch.float64).tril(1)

    def mean(values: torch.Tensor) -> float:
        return -((values * mask).sum() / mask.sum()).item()

    clipped = ratio.clamp(1 - clip, 1 + clip)
    minimum = torch.minimum(ratio * a[:, None], clipped * a[:, None])
    inverse = 1 / ratio
    log_ratio = ratio.log()
    usual = ratio.clamp(0.8, 1.2)
    true = mean(minimum)
    known = {
        "loss_sign": -true,
        "loss_maximum": mean(torch.maximum(ratio * a[:, None], clipped * a[:, None])),
        "loss_not_clipped": mean(ratio * a[:, None]),
        "loss_no_minimum": mean(clipped * a[:, None]),
        "loss_minimum_first": mean(torch.minimum(ratio, clipped) * a[:, None]),
        "loss_mask": [-minimum.mean().item(), -(minimum * mask).mean().item()],
        "loss_sum": -(minimum * mask).sum().item(),
        "loss_sequence": -((minimum * mask).sum(1) / mask.sum(1)).mean().item(),
        "loss_inverse": mean(
            torch.minimum(inverse * a[:, None], inverse.clamp(1 - clip, 1 + clip) * a[:, None])
        ),
        "loss_no_exp": mean(
            torch.minimum(
                log_ratio * a[:, None], log_ratio.clamp(1 - clip, 1 + clip) * a[:, None]
            )
        ),
        "loss_shape": mean(torch.minimum(ratio * a, clipped * a)),
        "loss_clip": [
            mean(torch.minimum(ratio * a[:, None], each * a[:, None]))
            for each in (usual, ratio.clamp(max=1 + clip), ratio.clamp(min=1 - clip))
        ],
    }
    loss = submission.clipped_loss(new, old, a, mask, clip)
    require_tensor("the value that clipped_loss returns", loss, [], "loss_scalar")
    what = f"with clip = {clip}, the loss is {loss.item():.5f}, but it should be {true:.5f}"
    hint = "loss_limits" if far else matching_hint(loss.item(), known)
    require(isclose(loss.item(), true), what, hint)
    require(loss.requires_grad, "the loss has no gradient", "loss_detached")
    loss.backward()
    active = torch.where(a[:, None] > 0, ratio <= 1 + clip, ratio >= 1 - clip)
    gradient = -ratio * a[:, None] * mask * active / mask.sum()
    what = "the gradient of the loss is not that of the clipped objective"
    require(new.grad is not None, "the loss has no gradient", "loss_detached")
    require(allclose(new.grad, gradient, *TIGHT), what, "loss_detached")


# --- step 3 -------------------------------------------------------------------------------

CUTS = ((2, 4), (1, 4), (4, 8), (3, 6))  # samplers, and a multiple of their number as the width


@LAB.alone(
    3, "two ways to cut the same weights",
    "every trainer has its rows, and every sampler has its part of each weight",
    "owned_rows cut_of",
    crashes={
        "unpack": "cut_kind", "division|modulo": "owned_rule",
        "list index out of range": "cut_name",
    },
)  # fmt: skip
def cuts(submission, reference, lesson):
    for rows, trainers in itertools.product((96, 32, 10, 6, 5, 1), (1, 2, 3, 4, 8)):
        parts = [submission.owned_rows(rows, each, trainers) for each in range(trainers)]
        case = f"of {rows} rows, trainer {{}} of {trainers} stores"
        for trainer, part in enumerate(parts):
            is_range = isinstance(part, range) and part.step == 1
            require(is_range, f"{case.format(trainer)} {show(part)}", "owned_kind")
        whole = [row for part in parts for row in part]
        for trainer, part in enumerate(parts):
            true = reference.owned_rows(rows, trainer, trainers)
            what = f"{case.format(trainer)} {part}, but it should store {true}"
            hint = "owned_rule"
            if any(row >= rows for row in part):
                hint = "owned_beyond"
            elif sorted(whole) != list(range(rows)):
                hint = "owned_lost"
            require(list(part) == list(true), what, hint)
    yield "the rows of every trainer are right"

    for samplers, h in CUTS:
        shapes = {"position": (7, h), "12.qkv": (3 * h, h), "0.qkv": (3 * h, h)}
        shapes |= {"1.up": (4 * h, h), "1.out": (h, h), "1.down": (h, 4 * h)}
        shapes |= {"token": (6, h), "head": (6, h)}
        for (name, shape), sampler in itertools.product(shapes.items(), range(samplers)):
            found = submission.cut_of(name, *shape, sampler, samplers)
            true = reference.cut_of(name, *shape, sampler, samplers)
            check_cut(name, shape, sampler, samplers, found, true)


def check_cut(
    name: str, shape: tuple[int, int], sampler: int, samplers: int, found: Any, true: Any
) -> None:
    """Raise `Wrong` unless the part of a sampler is right."""
    case = f"of {name} with shape {[*shape]}, cut_of gives sampler {sampler} of {samplers}"
    good = isinstance(found, (tuple, list)) and len(found) == 2
    good = good and isinstance(found[0], (tuple, list)) and isinstance(found[1], range)
    good = good and all(isinstance(each, range) for each in found[0])
    require(good, f"{case} {show(found)}", "cut_kind")
    rows, columns = list(itertools.chain(*found[0])), list(found[1])
    due_rows, due_columns = list(itertools.chain(*true[0])), list(true[1])
    if (rows, columns) == (due_rows, due_columns):
        return
    kind = name.rpartition(".")[2]
    what = f"{case} the rows {show(found[0])} and the columns {show(found[1])}; the rows should"
    what += f" be {show(true[0])} and the columns {show(true[1])}"
    everything = list(range(shape[0])), list(range(shape[1]))
    if max(rows, default=0) >= shape[0] or max(columns, default=0) >= shape[1]:
        hint = "cut_sizes"
    elif (rows, columns) == everything:
        hint = "cut_nothing"
    elif (due_rows, due_columns) == everything:
        hint = "cut_whole"
    elif kind == "qkv":
        size = shape[0] // samplers
        one_range = list(range(sampler * size, (sampler + 1) * size))
        hint = "qkv_heads" if rows == one_range else "qkv_order"
        hint = hint if columns == due_columns else "cut_across"
        if len(rows) == len(due_rows) // 3:
            hint = "qkv_heads"
    else:
        hint = "cut_across" if len(columns) != len(due_columns) else "cut_part"
    raise Wrong(what, hint)


# --- step 4 -------------------------------------------------------------------------------

SPLITS = ((1, 1), (2, 2), (1, 2), (3, 2), (5, 1), (4, 4), (8, 2))  # trainers, samplers


def small_shapes(h: int = 8) -> dict[str, tuple[int, int]]:
    """Return shapes with few numbers, some of which are not a multiple of the trainers."""
    shapes = {"token": (6, h), "position": (10, h), "0.qkv": (3 * h, h), "0.out": (h, h)}
    return shapes | {"0.up": (4 * h, h), "0.down": (h, 4 * h), "head": (6, h)}


@LAB.alone(
    4, "the plan", "every sampler gets each of its numbers exactly once", "make_plan",
    own="make_plan Piece", crashes={"argument|unpack": "piece_kind"},
)  # fmt: skip
def plan(submission, reference, lesson):
    shapes = small_shapes()
    for trainers, samplers in SPLITS:
        case = f"with {count(trainers, 'trainer')} and {count(samplers, 'sampler')},"
        found = submission.make_plan(shapes, trainers, samplers)
        good = isinstance(found, (list, tuple)) and found
        require(good, f"{case} make_plan returns {show(found)}", "plan_kind")
        check_plan(reference, shapes, trainers, samplers, found, case)


def check_plan(
    reference: ModuleType, shapes: dict[str, tuple[int, int]], trainers: int, samplers: int,
    plan: Sequence[Any], case: str,
) -> None:  # fmt: skip
    """Raise `Wrong` unless a plan sends each number of each sampler exactly once."""
    written: dict[tuple[str, int], Counter[int]] = {}
    for piece in plan:
        fields = [getattr(piece, name, None) for name in ("source", "target", "columns")]
        good = all(isinstance(each, range) and each.step == 1 for each in fields)
        good = good and getattr(piece, "name", None) in shapes
        what = f"{case} the plan contains {piece!r:.200}"
        require(good, what, "piece_kind")
        good = piece.trainer in range(trainers) and piece.sampler in range(samplers)
        require(good, what, "piece_ranks")
        rows, columns = shapes[piece.name]
        owned = reference.owned_rows(rows, piece.trainer, trainers)
        ranges, wanted = reference.cut_of(piece.name, rows, columns, piece.sampler, samplers)
        needed = list(itertools.chain(*ranges))
        source, target = list(piece.source), list(piece.target)
        what = f"{case} trainer {piece.trainer} sends rows {piece.source} of its shard of"
        what += f" {piece.name} to the rows {piece.target} of sampler {piece.sampler}"
        require(source and target and piece.columns, f"{what}, which is empty", "piece_empty")
        require(len(source) == len(target), what, "piece_lengths")
        sent = [owned.start + row for row in source]
        if min(source) < 0 or max(source) >= len(owned):
            as_global = set(source) <= set(owned)
            raise Wrong(what, "source_global" if as_global else "piece_rows")
        if min(target) < 0 or max(target) >= len(needed):
            raise Wrong(what, "target_global" if set(target) <= set(needed) else "piece_rows")
        right = [needed[row] for row in target]
        if sent != right:
            hint = "piece_rows"
            if target == sent:
                hint = "target_global"
            elif written.get((piece.name, piece.sampler), Counter()).keys() & set(target):
                hint = "target_before"
            raise Wrong(f"{what}, but these are other rows of the weight", hint)
        what = f"{what}, with the columns {piece.columns}, but sampler {piece.sampler} stores"
        require(piece.columns == wanted, f"{what} the columns {wanted}", "piece_columns")
        written.setdefault((piece.name, piece.sampler), Counter()).update(target)
    for (name, (rows, columns)), sampler in itertools.product(shapes.items(), range(samplers)):
        ranges, _ = reference.cut_of(name, rows, columns, sampler, samplers)
        due = range(sum(map(len, ranges)))
        counts = written.get((name, sampler), Counter())
        what = f"{case} sampler {sampler} gets"
        require(counts, f"{what} no row of {name}", "plan_sampler")
        twice = [row for row in due if counts[row] > 1]
        part = f"of its part of {name}"
        require(not twice, f"{what} the rows {twice} {part} more than once", "plan_twice")
        missing = [row for row in due if counts[row] == 0]
        what = f"{what} the rows {missing} {part} from no trainer"
        require(not missing, what, "plan_missing")


# --- step 5 -------------------------------------------------------------------------------


@contextlib.contextmanager
def late_messages(module: ModuleType, lesson: Lesson) -> Iterator[None]:
    """Deliver the messages of isend and irecv as late as PyTorch allows."""
    send, receive = distributed_c10d.isend, distributed_c10d.irecv
    works = []  # a message can get lost if the learner's code keeps no reference to its handle

    def delayed(real: dist.Work, tensor: torch.Tensor, buffer: torch.Tensor) -> DelayedWork:
        work = DelayedWork(real, tensor, buffer, lambda touched: None, lesson.calls[-1])
        works.append(work)
        return work

    def late_isend(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> DelayedWork:
        return delayed(send(tensor, *args, **kwargs), tensor, tensor)

    def late_irecv(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> DelayedWork:
        buffer = tensor
        if tensor.is_contiguous():  # until the delivery, the tensor contains NaN
            buffer = torch.empty_like(tensor)
            tensor.fill_(torch.nan)
        return delayed(receive(buffer, *args, **kwargs), tensor, buffer)

    with contextlib.ExitStack() as stack:
        for owner in (dist, distributed_c10d, module):
            for real, late in ((send, late_isend), (receive, late_irecv)):
                for name in [name for name, value in vars(owner).items() if value is real]:
                    stack.enter_context(mock.patch.object(owner, name, late))
        yield


def explain_sync(group: Group) -> None:
    """Raise `Wrong` with the names of the ranks that wait for a message."""
    waiting = [r for r, rank in enumerate(group.ranks) if rank.end == "waiting"]
    what = "did not end, because a message was sent but not received, or received but not sent"
    raise Wrong(f"{names_of(*waiting)} {what}", "sync_stuck")


@LAB.step(
    5, "send the rows", "every sampler has its part of the new weights, to the last bit",
    "sync_weights", world_sizes=(4, 2, 3), symmetric=False, explain_hang=explain_sync,
    crashes={
        "contiguous": "sync_contiguous",
        "destination rank|source rank|[Ii]nvalid .*rank|same as the rank|"
        "rank of (the )?current|not part of|is not connected": "sync_rank",
        "list index out of range": "sync_stuck",
        "op_list|P2POp|``op``": "sync_operations",
        "size of tensor|expanded size|shape mismatch|must match": "sync_columns",
        "nbytes|message (truncated|size)|op.preamble|signal 6": "sync_shape",
    },
)  # fmt: skip
def sync(submission, reference, lesson):
    shapes = small_shapes()
    whole = {name: random(*shape, seed=7) for name, shape in shapes.items()}
    for trainers in range(1, lesson.world):
        samplers = lesson.world - trainers
        if samplers == 3:
            continue  # eight columns cannot be cut into three parts
        plan = reference.make_plan(shapes, trainers, samplers)
        shards = reference.shard_of(whole, min(lesson.rank, trainers - 1), trainers)
        true = reference.cut(whole, max(lesson.rank - trainers, 0), samplers)
        is_trainer = lesson.rank < trainers
        parts = {name: torch.full_like(each, -7.0) for name, each in true.items()}
        before = {name: each.clone() for name, each in shards.items()}
        tensors, first = dict(parts), len(lesson.calls)
        phase = "sync" if trainers == samplers == 2 else ""
        with late_messages(submission, lesson):
            with lesson.phase(phase):
                submission.sync_weights(
                    plan, lesson.rank, trainers, shards if is_trainer else {}, parts
                )
            lesson.wait_for_ranks()
        calls = lesson.calls[first:]
        check_sync(lesson, plan, trainers, calls, (before, shards) if is_trainer else ({}, {}))
        case = f"with {count(trainers, 'trainer')} and {count(samplers, 'sampler')},"
        case += f" rank {lesson.rank}"
        for name, each in parts.items():
            if is_trainer:
                break
            what = f"{case} has a new tensor for {name} in the dictionary"
            require(each is tensors[name], what, "sync_in_place")
            what = f"{case} has a wrong {name}"
            untouched = torch.equal(each, torch.full_like(each, -7.0))
            what += ", because nothing was written" * untouched
            hint = "sync_written" if untouched else "sync_target"
            hint = "sync_early" if each.isnan().any() else hint
            require(torch.equal(each, true[name]), what, hint)
        lesson.wait_for_ranks()


def check_sync(
    lesson: Lesson, plan: Sequence[Any], trainers: int, calls: Sequence[Call],
    shards: tuple[Weights, Weights],
) -> None:  # fmt: skip
    """Raise `Wrong` unless the calls of this rank are the messages of the plan."""
    other = sorted({call.name for call in calls if call.name not in MESSAGES})
    what = f"sync_weights calls {', '.join(other)} on rank {lesson.rank}"
    require(not other, what, "sync_collective")
    waits = [call.waited for call in calls if call.name in ("isend", "irecv")]
    late = waits.count(False)
    what = f"on rank {lesson.rank}, nothing waits for {late} of {len(waits)} messages"
    require(not late, what, "sync_not_waited")
    for name, each in shards[0].items():
        what = f"sync_weights changes the shard of {name} on rank {lesson.rank}"
        require(torch.equal(each, shards[1][name]), what, "sync_shards")
    sent = sum(call.numel for call in calls if call.name == "isend")  # send calls it, too
    due = sum(
        len(piece.source) * len(piece.columns) for piece in plan if piece.trainer == lesson.rank
    )
    what = f"rank {lesson.rank} sends {sent:,} numbers, but its pieces contain {due:,}"
    require(sent == due or lesson.rank >= trainers, what, "sync_bytes")


# --- step 6 -------------------------------------------------------------------------------


@LAB.alone(
    6, "the first token that differs", "the first difference of every table is found",
    "first_difference",
    crashes={"out of range|out of bounds|empty|ambiguous": "first_none"},
)  # fmt: skip
def first(submission, reference, lesson):
    nan, tiny = float("nan"), 1e-12
    zeros = torch.zeros(4, 3, dtype=torch.float64)
    ones = torch.ones(4, 3)
    cases: tuple[tuple[dict, list, Any, str], ...] = (
        # differences by place, places whose mask is 0, the right result, the hint
        ({}, [], None, "first_none"),
        ({(1, 2): 0.5}, [], (1, 2), "first_returned"),
        ({(2, 1): 0.5}, [], (2, 1), "first_returned"),
        ({(0, 2): 0.5, (3, 1): 0.25}, [], (3, 1), "first_order"),
        ({(1, 1): 0.1, (3, 1): 0.9, (2, 2): 0.9}, [], (1, 1), "first_largest"),
        ({(1, 1): -0.5}, [], (1, 1), "first_sign"),
        ({(0, 0): 0.5, (3, 2): 0.5}, [(0, 0)], (3, 2), "first_mask"),
        ({(0, 0): nan}, [(0, 0)], None, "first_mask"),
        ({(2, 0): nan, (3, 1): 0.5}, [], (2, 0), "first_nan"),
        ({(1, 0): tiny, (2, 1): 0.5}, [], (2, 1), "first_tolerance"),
        ({(1, 0): 1e-6, (2, 1): 0.5}, [], (1, 0), "first_tolerance"),
        ({(1, 0): 5e-10, (2, 1): 3e-9, (3, 2): 0.5}, [], (2, 1), "first_tolerance"),
        ({(2, 0): float("-inf")}, [], (2, 0), "first_nan"),
    )
    tables = [(*case, "sampler") for case in cases]
    tables += [(*case, "trainer") for case in cases]
    tables += [({(2, 0): nan}, [], (2, 0), "first_nan", "sampler and trainer")]
    for differences, padding, due, hint, who in tables:
        sampler, trainer, mask = zeros - 1.5, zeros - 1.5, ones.clone()
        for place, value in differences.items():
            for name, table in (("sampler", sampler), ("trainer", trainer)):
                if name in who:
                    table[place] += value
        for place in padding:
            mask[place] = 0.0
        found = submission.first_difference(sampler, trainer, mask)
        with contextlib.suppress(TypeError, ValueError):
            found = tuple(map(int, found))
        case = f"if {differences} is added to the numbers of the {who}, and padding is at"
        case += f" {padding or 'no place'},"
        what = f"{case} first_difference returns {show(found)}, but it should return {due}"
        is_place = found is None or (isinstance(found, tuple) and len(found) == 2)
        require(is_place, what, "first_kind")
        if due is not None and found == due[::-1] and due[0] != due[1]:
            hint = "first_swapped"
        require(found == due, what, hint)


# --- step 7 -------------------------------------------------------------------------------

NAMES = ("none", "stale weights", "temperature", "position", "end token", "unknown")


def evidence_of(reference: ModuleType, seed: int, stale: bool = False, **fault: Any) -> Any:
    """Return the answers of a sampler with this fault, and everything that the trainer has."""
    newer = reference.initial_weights(seed)
    noise = reference.initial_weights(seed + 1)
    older = {name: each + 0.02 * noise[name] for name, each in newer.items()}
    rng = torch.Generator().manual_seed(seed)
    prompts = reference.draw_prompts(32, reference.LENGTH, rng)
    weights = older if stale else newer
    answers, sampler = reference.sample_answers(weights, prompts, rng, **fault)
    return reference.Evidence(prompts, answers, sampler, newer, older)


def cases_of(reference: ModuleType) -> Iterable[tuple[str, str, Any]]:
    """Yield the right name, a sentence about the fault, and the evidence."""
    make = evidence_of
    yield "none", "the sampler has no fault", make(reference, 1)
    yield "stale weights", "the weights are stale", make(reference, 2, stale=True)
    for seed, temperature in enumerate((0.7, 0.5, 1.5), 3):
        what = f"the temperature is {temperature}"
        yield "temperature", what, make(reference, seed, temperature=temperature)
    yield "position", "the positions are too large by one", make(reference, 6, shift=1)
    evidence = make(reference, 7, reports_end=False)
    yield "end token", "0 is reported for END", evidence
    # all answers have END as their second token, so the first difference is at position 1
    ones = torch.full_like(evidence.answers, reference.PAD)
    ones[:, 0], ones[:, 1] = reference.CLOSING, reference.END
    numbers = reference.token_log_probs(evidence.weights, evidence.prompts, ones)
    numbers = numbers * torch.tensor([1.0, 0, 0, 0])
    short = evidence._replace(answers=ones, sampler=numbers)
    yield "end token", "0 is reported for END, the second token of all answers", short
    what = "the weights are stale, and the temperature is 0.7"
    yield "unknown", what, make(reference, 8, stale=True, temperature=0.7)
    what = "the positions are too large by one, and 0 is reported for END"
    yield "unknown", what, make(reference, 9, shift=1, reports_end=False)
    evidence = make(reference, 10)
    evidence.sampler[3, 0] += 0.01
    yield "unknown", "the number of one token is wrong", evidence
    evidence = make(reference, 11, temperature=0.7)
    evidence.sampler[3, 0] += 0.01
    yield "unknown", "the temperature is 0.7, and one more number is wrong", evidence
    for seed, what, fault in (
        (13, "the weights are stale", {"stale": True}),
        (14, "the positions are too large by one", {"shift": 1}),
        (15, "0 is reported for END", {"reports_end": False}),
    ):
        evidence = make(reference, seed, **fault)
        mask = reference.answer_mask(evidence.answers).masked_fill(
            evidence.answers == reference.END, 0.0
        )
        mask[:, 0] = 0.0
        evidence.sampler[tuple(mask.nonzero()[-1])] += 0.01
        yield "unknown", f"{what}, and one more number is wrong", evidence
    evidence = make(reference, 16)
    evidence.sampler[evidence.answers == reference.END] -= 0.5
    yield "unknown", "the numbers of END are wrong, but they are not 0", evidence
    yield (
        "unknown",
        "the temperature is 0.6, which is not in the list",
        make(reference, 12, temperature=0.6),
    )


@LAB.alone(
    7, "name the cause",
    "every single fault of the list is named, and all other faults are unknown",
    "name_the_cause",
)  # fmt: skip
def cause(submission, reference, lesson):
    for due, what, evidence in cases_of(reference):
        found = submission.name_the_cause(evidence)
        text = f"{what}, and name_the_cause returns {show(found)!r}"
        require(found in NAMES, text, "cause_name")
        hint = "cause_pattern"
        if due == "none":
            hint = "cause_none"
        elif due == "unknown":
            hint = "cause_guess"
            if found == "end token" and "not 0" in what:
                hint = "cause_end_not_zero"
        elif found in ("none", "unknown"):
            hint = {
                "stale weights": "missed_stale", "temperature": "missed_temperature",
                "position": "missed_position", "end token": "missed_end",
            }[due]  # fmt: skip
        require(found == due, text, hint)


# --- step 8 -------------------------------------------------------------------------------


def explain_group(group: Group) -> None:
    """Raise `Wrong` if trainers wait in a collective of all ranks."""
    for r, rank in enumerate(group.ranks):
        if rank.end == "waiting" and rank.calls and not rank.calls[-1].members:
            what = f"rank {r} waits in {rank.calls[-1].name}, which is not in the group of the"
            raise Wrong(f"{what} trainers", "share_group")


class Descent:
    """A plain optimizer. Unlike Adam, it shows a gradient that is too large."""

    def __init__(self, tensors: Weights):
        self.tensors, self.steps = tensors, 0

    def step(self, gradients: Weights) -> None:
        self.steps += 1
        for name, gradient in gradients.items():
            self.tensors[name] -= 0.5 * gradient


@LAB.step(
    8, "the whole loop",
    "the shares add up to the loss of the batch, and the weights are those of one process",
    "share_of_loss train_on", world_sizes=(3, 4, 1), explain_hang=explain_group,
    crashes={
        "does not require grad|not have been used": "share_detached",
        "size of tensor|shape .* is invalid": "train_rows",
        "second time": "train_backward", "index out of range in self": "train_gathered",
    },
)  # fmt: skip
def loop(submission, reference, lesson):
    n, rank = max(lesson.world - 1, 1), lesson.rank
    group = dist.new_group(list(range(n)))  # the last rank is not a trainer
    if rank >= n:
        return
    counts = [3, 7, 12]  # the tokens of the shares
    values = []
    for each in range(n):
        new, old = random(4, 4, seed=each) / 4, random(4, 4, seed=each + 10) / 4
        mask = (torch.arange(16) < counts[each]).double().view(4, 4)
        values.append((new, old, random(4, seed=each + 20), mask))
    losses = [reference.clipped_loss(*each).item() for each in values]
    whole = reference.clipped_loss(*(torch.cat(each) for each in zip(*values, strict=True)))
    new, *others = values[rank]
    new = new.clone().requires_grad_()
    share = submission.share_of_loss(new, *others, group)
    require_tensor("the value that share_of_loss returns", share, [], "share_scalar")
    found = gathered(share.item(), group)
    masks = [each[3] for each in values]
    tokens = [mask.sum().item() for mask in masks]
    total = sum(found)
    sums = [loss * number for loss, number in zip(losses, tokens, strict=True)]
    known = {
        "share_own_tokens": [sum(losses), sum(losses) / n],
        "share_average": [whole.item() * n, whole.item() / n],
        "share_no_divisor": sum(sums),
        "share_positions": sum(sums) / (16 * n),
    }
    if n > 1 and all(isclose(each, found[0]) for each in found):
        known = {"share_reduced": total}
    what = f"the shares of {n} trainers add up to {total:.5f}, but the loss of the whole batch"
    good = isclose(total, whole.item())
    hint = matching_hint(total, known, other="share_other")
    require(good, f"{what} is {whole.item():.5f}", hint)
    require(share.requires_grad, "the share has no gradient", "share_detached")
    share.backward()
    true = values[rank][0].clone().requires_grad_()
    (reference.clipped_loss(true, *others) * others[2].sum() / sum(tokens)).backward()
    good = new.grad is not None and allclose(new.grad, true.grad, *TIGHT)
    what = f"the gradient of the share is wrong on rank {rank}"
    require(good, what, "share_detached")
    yield "the shares add up to the loss of the whole batch"

    submission.share_of_loss = reference.share_of_loss
    check_training(submission, reference, rank, n, group)


def rollouts_of(reference: ModuleType, trainers: int) -> Any:
    """Return rollouts with right and wrong answers of different lengths."""
    rng = torch.Generator().manual_seed(8)
    prompts = reference.draw_prompts(2 * trainers, reference.LENGTH, rng)
    prompts = prompts.repeat_interleave(reference.GROUP, 0)
    weights = reference.initial_weights()
    answers, _ = reference.sample_answers(weights, prompts, rng)
    right = torch.nn.functional.pad(
        prompts.flip(1) + reference.CLOSING - reference.OPENING, (0, 1), value=reference.END
    )
    chosen = torch.rand(len(prompts), generator=rng) < torch.linspace(0.2, 0.7, len(prompts))
    answers = torch.where(chosen[:, None], right, answers)
    answers[:2], answers[2:4] = right[:2], torch.tensor([reference.END, 0, 0, 0])
    old = reference.token_log_probs(weights, prompts, answers)
    # the sampler's numbers differ from the trainer's, so that the ratio is never 1
    return reference.Rollouts(prompts, answers, old + 0.1 * random(*old.shape, seed=9))


def train_in_one_process(
    reference: ModuleType, rollouts: Any, trainers: int = 1, mistake: str = ""
) -> Weights:
    """Return the weights after the training steps, with one of the common mistakes."""
    weights = reference.initial_weights()
    rewards = reference.rewards_of(rollouts.prompts, rollouts.answers)
    advantages = reference.group_advantages(rewards, reference.GROUP)
    mask = reference.answer_mask(rollouts.answers)
    if mistake == "rewards":
        advantages = rewards
    if mistake == "batch":
        advantages = reference.group_advantages(rewards, len(rewards))
    if mistake == "padding":
        mask = torch.ones_like(mask)
    if mistake == "pad":
        mask = (rollouts.answers != reference.PAD).float()
    if mistake == "end":
        mask = mask * (rollouts.answers != reference.END)
    descent, first = Descent(weights), None
    old = rollouts.old
    for _ in range(reference.UPDATES):
        whole = {name: each.detach().clone().requires_grad_() for name, each in weights.items()}
        whole = first or whole
        new = reference.token_log_probs(whole, rollouts.prompts, rollouts.answers)
        if mistake == "recomputed" or (mistake == "own" and descent.steps == 0):
            old = new.detach()
        loss = reference.clipped_loss(new, old, advantages, mask)
        if mistake == "sign":
            loss = -loss
        if mistake == "own means":
            tensors = [each.chunk(trainers) for each in (new, old, advantages, mask)]
            loss = sum(reference.clipped_loss(*each) for each in zip(*tensors, strict=True))
        gradients = torch.autograd.grad(loss, list(whole.values()))
        descent.step(dict(zip(whole, gradients, strict=True)))
        if mistake == "previous":
            old = new.detach()
        if mistake == "gathered once":
            first = whole
    return weights


def check_training(
    submission: ModuleType, reference: ModuleType, rank: int, n: int, group: dist.ProcessGroup
) -> None:
    """Raise `Wrong` unless the trainers get the weights of one process."""
    rollouts = rollouts_of(reference, n)
    trainer = reference.Trainer(reference.initial_weights(), rank, n, group)
    trainer.adam = Descent(trainer.shards)
    real, seen = reference.token_log_probs, []

    def record(weights: Weights, prompts: torch.Tensor, answers: torch.Tensor, **rest: Any):
        seen.append(len(answers))
        return real(weights, prompts, answers, **rest)

    submission.token_log_probs = record
    copies = [rollouts.prompts.clone(), rollouts.answers.clone(), rollouts.old.clone()]
    submission.train_on(trainer, rollouts)
    steps = trainer.adam.steps
    what = f"train_on calls trainer.step {steps} times on rank {rank}; UPDATES is"
    require(steps == reference.UPDATES, f"{what} {reference.UPDATES}", "train_updates")
    after = [rollouts.prompts, rollouts.answers, rollouts.old]
    what = f"train_on changes the rollouts on rank {rank}"
    require(all(map(torch.equal, copies, after)), what, "train_in_place")
    rows = len(rollouts.answers)
    what = f"rank {rank} computes with {max(seen, default=0)} of {rows} answers in one step"
    require(max(seen, default=0) <= rows / n, what, "train_all")
    found = trainer.gathered()

    def equals(weights: Weights) -> bool:
        return all(allclose(found[name], each, *TIGHT) for name, each in weights.items())

    if equals(train_in_one_process(reference, rollouts)):
        return
    hints = {
        "recomputed": "old_recomputed", "own": "old_recomputed", "previous": "old_recomputed",
        "gathered once": "gathered_once", "padding": "train_mask", "pad": "train_mask",
        "end": "train_mask", "batch": "train_groups", "own means": "train_own_means",
        "rewards": "train_rewards", "sign": "train_sign",
    }  # fmt: skip
    named = (
        hint
        for mistake, hint in hints.items()
        if equals(train_in_one_process(reference, rollouts, n, mistake))
    )
    what = f"after train_on, the weights of {count(n, 'trainer')} are not those of one process"
    raise Wrong(what, next(named, "train_shares" if n > 1 else "other"))
