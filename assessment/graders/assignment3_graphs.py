"""The steps of assignment 3: launches, buffers, kernels, replays, a trace."""

import functools

import torch
from graders._compare import Watch, alone, below, borrow, finished, import_late_parts, that
from graders.runner import Lesson

HINTS = {
    "views": "A view launches nothing. func.is_view tells.",
    "host_read": "The host cannot read a value while capturing: nothing has run yet. Raise "
    "RuntimeError for the names in HOST_READS, and do not call them first.",
    "nested": "A tensor in a list is an input, too (torch.cat): tree_leaves.",
    "twice": "An operator that reads one buffer twice has it once among its inputs.",
    "in_place": "An operator in place writes the buffer that it was given: number the result "
    "by its storage.",
    "not_run": "The operator must run, and its result be returned.",
    "overlap": "Two buffers that live at once share bytes. A node's inputs live while its "
    "output is written, and what is in `keep` lives to the end.",
    "no_reuse": "Memory of buffers that nobody reads any more is not used again.",
    "first_gap": "A gap between two living buffers was left empty: the lowest offset where the "
    "buffer fits.",
    "inputs_planned": "Inputs have memory already, also those that are later written in place.",
    "product_fused": "Only pointwise nodes can be fused: a product needs all of its rows.",
    "no_chain": "The kernel makes what this pointwise node reads: they can be one.",
    "stranger": "The node reads nothing that the kernel makes: leave them two.",
    "reordered": "The launches are in another order: look at the last kernel only.",
    "loads_made": "A buffer that the kernel has made is in registers: it is not loaded.",
    "loads_twice": "A kernel loads a buffer once, however many of its nodes read it.",
    "stores_dead": "A buffer that only this kernel reads need not be stored.",
    "loads_late": "What a kernel reads before it writes it is loaded, in place as well.",
    "not_stored": "What a later kernel reads must be stored, though this one makes it.",
    "result_lost": "What is in `keep` must be stored, though no kernel reads it.",
    "captures_each": "The graph of this bucket was captured before. Keep it.",
    "bucket": "The smallest bucket that is large enough does the least work.",
    "stale": "The graph ran on what was in its input before: copy x into graph.input; another "
    "tensor under the name is not seen.",
    "not_replayed": "Nothing was replayed, and the output is that of an earlier call.",
    "rows": "The result has the rows of x, and not those of the bucket.",
    "borrowed": "The next call overwrote this result: hand out a copy of the graph's output.",
    "too_large": "No bucket is large enough: call plain.",
    "streams": "While one stream is idle another works: remember the latest end so far.",
    "unsorted": "The kernels of several streams come in any order: sort by start.",
    "late": "A kernel that was launched before the gap waits for the device, or for another "
    "stream; only one that is launched within the gap waits for the host.",
    "other": "The numbers fit no common mistake. Print what differs.",
}  # fmt: skip
OURS = finished("assignment3_graphs")
import_late_parts()
SOLVED = "Capture.__torch_dispatch__ plan fuse traffic Buckets.__call__ idle"


def probe_capture(lesson: Lesson) -> None:
    module = lesson.module
    a, b = torch.ones(4, 4), torch.ones(4, 4)

    def names(function) -> tuple[list[str], list]:
        with module.Capture() as capture:
            result = function()
        lesson.fact("the result is that of the operator", bool(torch.is_tensor(result)))
        return [node.name for node in capture.nodes], capture.nodes

    recorded, nodes = names(lambda: torch.mm(a, b) + a)
    lesson.fact("recorded for a @ b + a", recorded)
    recorded, _ = names(lambda: a.t()[1:].relu())
    lesson.fact("recorded for a.t()[1:].relu()", recorded)
    _, nodes = names(lambda: torch.cat([a, b]))
    lesson.fact("inputs of cat([a, b])", [len(node.inputs) for node in nodes][-1:])
    _, nodes = names(lambda: a * a)
    lesson.fact("inputs of a * a", [len(node.inputs) for node in nodes])
    _, nodes = names(lambda: a.clone().add_(b))
    lesson.fact("add_ writes what clone wrote", nodes[-1].output == nodes[0].output)
    refused = []
    for function in (
        lambda: a.sum().item(), lambda: a.nonzero(), lambda: a.masked_select(a > 0),
        lambda: torch.equal(a, b),
    ):  # fmt: skip
        try:
            with Watch() as seen, module.Capture():
                function()
            refused.append(False)
        except RuntimeError:
            refused.append(not any(name in OURS.HOST_READS for name, _ in seen.launched))
    lesson.fact("item, nonzero, masked_select, equal are refused", refused)


def random_program(seed: int) -> tuple[list, dict[int, int], set[int]]:
    """Launches that read recent buffers, some in place."""
    draw = torch.Generator().manual_seed(seed)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=draw))

    nodes = []
    for i in range(2, 24):
        inputs = (i - 1, number(max(0, i - 6), i))
        name = ("mm", "add", "mul", "tanh")[number(0, 4)]
        nodes.append(OURS.Node(name, tuple(dict.fromkeys(inputs)), i))
    sizes = {i: 512 * number(1, 9) for i in range(24)}
    return nodes, sizes, {23, 9}


def probe_plan(lesson: Lesson) -> None:
    plan = lesson.module.plan
    overlaps, excess, planned_inputs, total = 0, 0, 0, True
    for seed in range(4):
        nodes, sizes, keep = random_program(seed)
        found, wanted = plan(nodes, sizes, keep), OURS.plan(nodes, sizes, keep)
        planned_inputs += len(set(found) - set(wanted))
        found = {n: offset for n, offset in found.items() if n in wanted}
        last = {n: i for i, node in enumerate(nodes) for n in (*node.inputs, node.output)}
        last |= dict.fromkeys(keep, len(nodes))
        for n, offset in found.items():
            for m, other in found.items():
                together = m < n and last[m] >= n - 2  # the node that writes n is number n - 2
                overlaps += together and offset < other + sizes[m] and other < offset + sizes[n]
        peaks = [max(o + sizes[n] for n, o in p.items()) for p in (found, wanted)]
        excess = max(excess, peaks[0] - peaks[1])
        total = total and peaks[0] == sum(sizes[n] for n in wanted)
        excess += 10**6 * (set(found) != set(wanted))
    lesson.fact("inputs that have an offset", planned_inputs)
    lesson.fact("pairs that live at once and share bytes", overlaps)
    lesson.fact("all lie side by side", total)
    lesson.fact("bytes more than the lowest offsets need", excess)
    node = OURS.Node
    program = [node("add_", (0, 1), 0), node("mul", (0, 1), 2)]
    offsets = plan(program, {0: 512, 1: 512, 2: 512}, {2})
    lesson.fact("offsets if an input is written in place", sorted(offsets))


def probe_fuse(lesson: Lesson) -> None:
    module, node = lesson.module, OURS.Node
    borrow(module, OURS, SOLVED, "fuse traffic")

    def kernels(*nodes) -> list[list[str]]:
        return [[n.name for n in kernel] for kernel in module.fuse(list(nodes))]

    chain = node("mm", (0, 1), 2), node("mul", (2,), 3), node("add", (3, 0), 4)
    lesson.fact("kernels of mm, mul, add in a chain", kernels(*chain))
    lesson.fact("kernels of relu, mm", kernels(node("relu", (0,), 2), node("mm", (2, 1), 3)))
    strangers = node("relu", (0,), 2), node("tanh", (1,), 3)
    lesson.fact("kernels of relu(a), tanh(b)", kernels(*strangers))
    apart = node("relu", (0,), 2), node("mm", (0, 1), 3), node("tanh", (2,), 4)
    lesson.fact("kernels of relu, mm, tanh of relu's", kernels(*apart))
    far = node("mul", (0, 1), 2), node("tanh", (2,), 3), node("add", (2, 0), 4)
    lesson.fact("kernels of mul, tanh, add of mul's", kernels(*far))
    sizes = {n: 10**n for n in range(6)}
    one = [[node("mul", (0, 1), 2), node("add", (2, 1), 3)]]
    found = module.traffic(one, sizes, {3})
    lesson.fact("bytes moved: loads 1 + 10, stores 1000", found)
    found = module.traffic([one[0], [node("mm", (3, 0), 4)]], sizes, set())
    lesson.fact("bytes moved if mm reads the result and nobody reads mm's", found)
    found = module.traffic([[node("add_", (0, 1), 0)]], sizes, {0})
    lesson.fact("bytes moved in place: loads 1 + 10, stores 1", found)


def probe_buckets(lesson: Lesson) -> None:
    module = lesson.module
    borrow(module, OURS, SOLVED, "Buckets.__call__")
    captured, replays, plain = [], [], []

    class Graph:
        def __init__(self, rows: int):
            captured.append(rows)
            self.input, self.output = torch.zeros(rows, 2), torch.zeros(rows, 2)
            self.kept = self.input, self.output

        def replay(self) -> None:
            replays.append(len(self.kept[0]))
            self.kept[1].copy_(self.kept[0] * 2)

    def slow(x: torch.Tensor) -> torch.Tensor:
        plain.append(len(x))
        return x * 2

    call = module.Buckets(Graph, slow, (32, 8, 16))
    inputs = [torch.full((rows, 2), float(rows)) for rows in (5, 8, 9, 3)]
    results = [call(x) for x in inputs]
    at_once = [call(x).clone() for x in inputs]
    lesson.fact("graphs captured for 5, 8, 9, 3 rows, twice", sorted(captured))
    lesson.fact("graphs replayed", replays)
    lesson.fact("rows of the results", [len(r) for r in results])
    right = [torch.equal(r[: len(x)], 2 * x) for r, x in zip(at_once, inputs, strict=True)]
    lesson.fact("results are right at once", all(right))
    right = [torch.equal(r[: len(x)], 2 * x) for r, x in zip(results, inputs, strict=True)]
    lesson.fact("results are right later", all(right))
    try:
        call(torch.ones(33, 2))
    except Exception as error:
        plain.append(type(error).__name__)
    lesson.fact("calls of plain, for 33 rows", plain)


def probe_idle(lesson: Lesson) -> None:
    idle = lesson.module.idle
    one = [(0.0, 1.0, 3.0), (0.5, 3.0, 4.0), (0.6, 6.0, 7.0), (9.0, 10.0, 11.0)]
    lesson.fact("idle seconds in one stream", list(idle(one)))
    two = [(0.0, 1.0, 9.0), (0.1, 2.0, 3.0), (0.2, 5.0, 6.0), (0.3, 10.0, 11.0)]
    lesson.fact("idle seconds in two streams", list(idle(two)))
    lesson.fact("idle seconds, the streams one after the other", list(idle(two[::-1])))


step = functools.partial(alone, HINTS, crashes=(("'NoneType'", HINTS["not_run"]),))
STEPS = [
    step(
        1, "capture", "launches, their buffers, and no host in between", probe_capture,
        "Capture",
        ("the result is that of the operator", True, "not_run"),
        ("item, nonzero, masked_select, equal are refused", [True] * 4, "host_read"),
        ("recorded for a.t()[1:].relu()", ["relu"], "views"),
        ("recorded for a @ b + a", ["mm", "add"], "other"),
        ("inputs of cat([a, b])", [2], "nested"),
        ("inputs of a * a", [1], "twice"),
        ("add_ writes what clone wrote", True, "in_place"),
    ),
    step(
        2, "plan the memory", "nothing that lives is overwritten, and no byte is wasted",
        probe_plan, "plan",
        ("inputs that have an offset", 0, "inputs_planned"),
        ("offsets if an input is written in place", [2], "inputs_planned"),
        ("pairs that live at once and share bytes", 0, "overlap"),
        ("all lie side by side", False, "no_reuse"),
        ("bytes more than the lowest offsets need", below(0), "first_gap"),
    ),
    step(
        3, "fuse", "chains are one kernel, and what stays inside is never stored", probe_fuse,
        "fuse traffic",
        ("kernels of relu, mm", [["relu"], ["mm"]], "product_fused"),
        ("kernels of relu(a), tanh(b)", [["relu"], ["tanh"]], "stranger"),
        ("kernels of relu, mm, tanh of relu's", [["relu"], ["mm"], ["tanh"]], "reordered"),
        ("kernels of mm, mul, add in a chain",
         that("mm alone", lambda found: found[0] == ["mm"]), "product_fused"),
        ("kernels of mm, mul, add in a chain", [["mm"], ["mul", "add"]], "no_chain"),
        ("kernels of mul, tanh, add of mul's", [["mul", "tanh", "add"]], "no_chain"),
        ("bytes moved: loads 1 + 10, stores 1000",
         that("1011, and not with 10 twice", lambda n: n not in (1021, 1121)), "loads_twice"),
        ("bytes moved: loads 1 + 10, stores 1000",
         that("1011, without the 100 stored", lambda n: n != 1111), "stores_dead"),
        ("bytes moved: loads 1 + 10, stores 1000",
         that("1011, with the result", lambda n: n != 11), "result_lost"),
        ("bytes moved: loads 1 + 10, stores 1000", 1011, "loads_made"),
        ("bytes moved if mm reads the result and nobody reads mm's", 2012, "not_stored"),
        ("bytes moved in place: loads 1 + 10, stores 1", 12, "loads_late"),
    ),
    step(
        4, "replay for any size", "three graphs for all sizes, and results that stay",
        probe_buckets, "Buckets",
        ("rows of the results", [5, 8, 9, 3], "rows"),
        ("graphs captured for 5, 8, 9, 3 rows, twice",
         that("8 and 16 once", lambda found: len(found) == len(set(found))), "captures_each"),
        ("graphs captured for 5, 8, 9, 3 rows, twice", [8, 16], "bucket"),
        ("graphs replayed", that("eight", lambda found: len(found) == 8), "not_replayed"),
        ("graphs replayed", [8, 8, 16, 8] * 2, "bucket"),
        ("results are right at once", True, "stale"),
        ("results are right later", True, "borrowed"),
        ("calls of plain, for 33 rows", [33], "too_large"),
    ),
    step(
        5, "read a trace", "idle time in several streams, and whose fault it is", probe_idle,
        "idle",
        ("idle seconds in two streams", [1.0, 0.0], "streams"),
        ("idle seconds, the streams one after the other", [1.0, 0.0], "unsorted"),
        ("idle seconds in one stream", [5.0, 3.0], "late"),
    ),
]  # fmt: skip
