"""The steps of assignment 3: launches, buffers, kernels, replays, a trace."""

import functools

import torch

from graders.tools import Lab, Passes, Watch, at_most, check, import_late_parts

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
import_late_parts()
LAB = Lab(HINTS)
step = functools.partial(LAB.alone, crashes={"'NoneType'": "not_run"})


@step(1, "capture", "launches, their buffers, and no host in between", "Capture")
def capture(theirs, ours, lesson):
    a, b = torch.ones(4, 4), torch.ones(4, 4)

    def nodes(function) -> list:
        with theirs.Capture() as capture:
            result = function()
        check("the result is that of the operator", torch.is_tensor(result), True, "not_run")
        return capture.nodes

    refused = []
    sums, views = nodes(lambda: torch.mm(a, b) + a), nodes(lambda: a.t()[1:].relu())
    pair, square = nodes(lambda: torch.cat([a, b])), nodes(lambda: a * a)
    in_place = nodes(lambda: a.clone().add_(b))
    for function in (
        lambda: a.sum().item(), lambda: a.nonzero(), lambda: a.masked_select(a > 0),
        lambda: torch.equal(a, b),
    ):  # fmt: skip
        try:
            with Watch() as seen, theirs.Capture():
                function()
            refused.append(False)
        except RuntimeError:
            refused.append(not any(name in ours.HOST_READS for name, _ in seen.launched))
    check("item, nonzero, masked_select, equal are refused", refused, [True] * 4, "host_read")
    names = [node.name for node in views]
    check("recorded for a.t()[1:].relu()", names, ["relu"], "views")
    check("recorded for a @ b + a", [node.name for node in sums], ["mm", "add"], "other")
    read = [len(node.inputs) for node in pair][-1:]
    check("inputs of cat([a, b])", read, [2], "nested")
    check("inputs of a * a", [len(node.inputs) for node in square], [1], "twice")
    written = in_place[-1].output == in_place[0].output
    check("add_ writes what clone wrote", written, True, "in_place")


def random_program(node, seed: int) -> tuple[list, dict[int, int], set[int]]:
    """Launches that read recent buffers, some in place."""
    draw = torch.Generator().manual_seed(seed)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=draw))

    nodes = []
    for i in range(2, 24):
        inputs = (i - 1, number(max(0, i - 6), i))
        name = ("mm", "add", "mul", "tanh")[number(0, 4)]
        nodes.append(node(name, tuple(dict.fromkeys(inputs)), i))
    sizes = {i: 512 * number(1, 9) for i in range(24)}
    return nodes, sizes, {23, 9}


@step(2, "plan the memory", "nothing that lives is overwritten, and no byte is wasted", "plan")
def plan(theirs, ours, lesson):
    overlaps, excess, inputs, apart, pools = 0, 0, 0, True, 0
    for seed in range(4):
        nodes, sizes, keep = random_program(ours.Node, seed)
        found, wanted = theirs.plan(nodes, sizes, keep), ours.plan(nodes, sizes, keep)
        inputs += len(set(found) - set(wanted))
        found = {n: offset for n, offset in found.items() if n in wanted}
        last = {n: i for i, node in enumerate(nodes) for n in (*node.inputs, node.output)}
        last |= dict.fromkeys(keep, len(nodes))
        for n, offset in found.items():
            for m, other in found.items():
                together = m < n and last[m] >= n - 2  # the node that writes n is number n - 2
                overlaps += together and offset < other + sizes[m] and other < offset + sizes[n]
        peaks = [max(o + sizes[n] for n, o in p.items()) for p in (found, wanted)]
        excess = max(excess, peaks[0] - peaks[1])
        pools += peaks[0]
        apart = apart and peaks[0] == sum(sizes[n] for n in wanted)
        excess += 10**6 * (set(found) != set(wanted))
    lesson.fact("scores", {"peak bytes": pools})
    node = ours.Node
    program = [node("add_", (0, 1), 0), node("mul", (0, 1), 2)]
    offsets = sorted(theirs.plan(program, {0: 512, 1: 512, 2: 512}, {2}))
    check("inputs that have an offset", inputs, 0, "inputs_planned")
    check("offsets if an input is written in place", offsets, [2], "inputs_planned")
    check("pairs that live at once and share bytes", overlaps, 0, "overlap")
    check("all lie side by side", apart, False, "no_reuse")
    check("bytes more than the lowest offsets need", excess, at_most(0), "first_gap")


@step(3, "fuse", "chains are one kernel, and what stays inside is never stored", "fuse traffic")
def fuse(theirs, ours, lesson):
    node = ours.Node

    def kernels(*nodes) -> list[list[str]]:
        return [[n.name for n in kernel] for kernel in theirs.fuse(list(nodes))]

    two = kernels(node("relu", (0,), 2), node("mm", (2, 1), 3))
    check("kernels of relu, mm", two, [["relu"], ["mm"]], "product_fused")
    two = kernels(node("relu", (0,), 2), node("tanh", (1,), 3))
    check("kernels of relu(a), tanh(b)", two, [["relu"], ["tanh"]], "stranger")
    three = kernels(node("relu", (0,), 2), node("mm", (0, 1), 3), node("tanh", (2,), 4))
    fact = "kernels of relu, mm, tanh of relu's"
    check(fact, three, [["relu"], ["mm"], ["tanh"]], "reordered")
    chain = kernels(node("mm", (0, 1), 2), node("mul", (2,), 3), node("add", (3, 0), 4))
    fact = "kernels of mm, mul, add in a chain"
    alone = Passes("mm alone", lambda found: found[0] == ["mm"])
    check(fact, chain, alone, "product_fused")
    check(fact, chain, [["mm"], ["mul", "add"]], "no_chain")
    far = kernels(node("mul", (0, 1), 2), node("tanh", (2,), 3), node("add", (2, 0), 4))
    check("kernels of mul, tanh, add of mul's", far, [["mul", "tanh", "add"]], "no_chain")

    sizes = {n: 10**n for n in range(6)}
    one = [node("mul", (0, 1), 2), node("add", (2, 1), 3)]
    moved = theirs.traffic([one], sizes, {3})
    for words, others, hint in (
        ("and not with 10 twice", (1021, 1121), "loads_twice"),
        ("without the 100 stored", (1111,), "stores_dead"),
        ("with the result", (11,), "result_lost"),
    ):
        wanted = Passes(f"1011, {words}", lambda found, others=others: found not in others)
        check("bytes moved: loads 1 + 10, stores 1000", moved, wanted, hint)
    check("bytes moved: loads 1 + 10, stores 1000", moved, 1011, "loads_made")
    moved = theirs.traffic([one, [node("mm", (3, 0), 4)]], sizes, set())
    fact = "bytes moved if mm reads the result and nobody reads mm's"
    check(fact, moved, 2012, "not_stored")
    moved = theirs.traffic([[node("add_", (0, 1), 0)]], sizes, {0})
    check("bytes moved in place: loads 1 + 10, stores 1", moved, 12, "loads_late")


@step(4, "replay for any size", "three graphs for all sizes, and results that stay", "Buckets")
def buckets(theirs, ours, lesson):
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

    def right(results: list) -> bool:
        pairs = zip(results, inputs, strict=True)
        return all(torch.equal(r[: len(x)], 2 * x) for r, x in pairs)

    call = theirs.Buckets(Graph, slow, (32, 8, 16))
    inputs = [torch.full((rows, 2), float(rows)) for rows in (5, 8, 9, 3)]
    results = [call(x) for x in inputs]
    at_once = [call(x).clone() for x in inputs]
    check("rows of the results", [len(r) for r in results], [5, 8, 9, 3], "rows")
    fact, captured = "graphs captured for 5, 8, 9, 3 rows, twice", sorted(captured)
    once = Passes("8 and 16 once", lambda found: len(found) == len(set(found)))
    check(fact, captured, once, "captures_each")
    check(fact, captured, [8, 16], "bucket")
    eight = Passes("eight", lambda found: len(found) == 8)
    check("graphs replayed", replays, eight, "not_replayed")
    check("graphs replayed", replays, [8, 8, 16, 8] * 2, "bucket")
    check("results are right at once", right(at_once), True, "stale")
    check("results are right later", right(results), True, "borrowed")
    try:
        call(torch.ones(33, 2))
    except Exception as error:
        plain.append(type(error).__name__)
    check("calls of plain, for 33 rows", plain, [33], "too_large")


@step(5, "read a trace", "idle time in several streams, and whose fault it is", "idle")
def idle(theirs, ours, lesson):
    two = [(0.0, 1.0, 9.0), (0.1, 2.0, 3.0), (0.2, 5.0, 6.0), (0.3, 10.0, 11.0)]
    check("idle seconds in two streams", list(theirs.idle(two)), [1.0, 0.0], "streams")
    found = list(theirs.idle(two[::-1]))
    fact = "idle seconds, the streams one after the other"
    check(fact, found, [1.0, 0.0], "unsorted")
    one = [(0.0, 1.0, 3.0), (0.5, 3.0, 4.0), (0.6, 6.0, 7.0), (9.0, 10.0, 11.0)]
    check("idle seconds in one stream", list(theirs.idle(one)), [5.0, 3.0], "late")
