"""The steps of assignment 3: launches, buffers, kernels, replays, and a trace."""

import functools

import torch

from graders.dsl import (
    Lab,
    OperatorRecorder,
    at_most,
    import_late_parts,
    require,
    require_equal,
)

import_late_parts()
LAB = Lab()
NO_RETURN = {"'NoneType'": "no_return"}
step = functools.partial(LAB.alone, crashes=NO_RETURN)


@step(
    1, "capture", "launches and their buffers are recorded, and no read of the host", "Capture"
)
def capture(submission, reference, lesson):
    a, b = torch.ones(4, 4), torch.ones(4, 4)

    def nodes(what: str, function) -> list[tuple]:
        """Capture a function, and return (name, producers, other inputs, output) of each node.

        `producers` are the indices of the nodes that first wrote an input. `other inputs` is
        the number of inputs that no node wrote. `output` is the index of the node that first
        wrote the output buffer.
        """
        true = function()
        with submission.Capture() as capture:
            result = function()
        is_right = torch.is_tensor(result) and torch.equal(result, true)
        what = f"{what} has a different result with the capture than without it"
        require(is_right, what, "not_run")
        found, writers = [], {}
        for i, node in enumerate(capture.nodes):
            require(isinstance(node, reference.Node), f"self.nodes contains {node!r}", "nodes")
            producers = sorted(writers[n] for n in node.inputs if n in writers)
            others = len(node.inputs) - len(producers)
            found.append((node.name, producers, others, writers.setdefault(node.output, i)))
        return found

    def names(found: list[tuple]) -> list[str]:
        return [name for name, *_ in found]

    what = "a.t()[1:].relu()"
    found = names(nodes(what, lambda: a.t()[1:].relu()))
    require_equal(
        f"recorded for {what}", found, ["relu"], "nodes" if len(found) == 1 else "views"
    )
    what = "a @ b + a"
    sums = nodes(what, lambda: torch.mm(a, b) + a)
    hint = "order" if sorted(names(sums)) == ["add", "mm"] else "nodes"
    require_equal(f"recorded for {what}", names(sums), ["mm", "add"], hint)
    what = "torch.cat([a, b])"
    require_equal(f"number of inputs of {what}", nodes(what, lambda: torch.cat([a, b]))[-1][2],
          2,
          "nested")  # fmt: skip
    require_equal("number of inputs of a * a", nodes("a * a", lambda: a * a)[0][2], 1, "twice")
    what = "a.clone().add_(b)"
    in_place = nodes(what, lambda: a.clone().add_(b))
    require_equal(f"recorded for {what}", names(in_place), ["clone", "add_"], "in_place")
    require(in_place[1][3] == 0, "add_ does not write the buffer that clone wrote", "in_place")
    for name, node in (("add in a @ b + a", sums[1]), ("add_", in_place[1])):
        _, producers, others, _ = node
        what = f"{name} has {len(producers)} inputs that an earlier node wrote, and {others} "
        what += "other inputs; it should have 1 and 1"
        require((producers, others) == ([0], 1), what, "inputs")
    require_equal("the number of inputs of mm", sums[0][2], 2, "inputs")
    nodes("torch.add(a, b, alpha=2)", lambda: torch.add(a, b, alpha=2))

    reads = {
        "item": lambda: a.sum().item(), "nonzero": lambda: a.nonzero(),
        "masked_select": lambda: a.masked_select(a > 0), "equal": lambda: torch.equal(a, b),
    }  # fmt: skip
    for name, function in reads.items():
        error_name = "no error"
        try:
            with OperatorRecorder() as recorder, submission.Capture():
                function()
        except Exception as error:
            error_name = type(error).__name__
        fact = f"during a capture, {name} raises"
        require_equal(fact, error_name, "RuntimeError", "host_read")
        has_run = any(name in reference.HOST_READS for name, _ in recorder.operators)
        what = f"the capture raised an error for {name} only after it had run the operator"
        require(not has_run, what, "host_read")


def random_program(node, seed: int) -> tuple[list, dict[int, int], set[int]]:
    """Return random nodes that read recent buffers, the sizes, and the buffers to keep."""
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


@step(2, "plan the memory", "no live buffer is overwritten, and no byte is wasted", "plan")
def plan(submission, reference, lesson):
    node = reference.Node

    def planned(nodes, sizes, keep) -> tuple[dict, dict]:
        """Return the offsets of the learner's plan, and those of the reference."""
        wanted = reference.plan(nodes, sizes, keep)
        arguments = list(nodes), dict(sizes), set(keep)
        found = submission.plan(*arguments)
        require(found is not None, "plan returned None", "no_return")
        require(isinstance(found, dict), f"plan returned {type(found).__name__}", "offsets")
        unchanged = arguments == (nodes, sizes, keep)
        require(unchanged, "plan changed one of its arguments", "changed")
        return found, wanted

    def overlaps(found, nodes, sizes, keep) -> int:
        """Return how many pairs of buffers are live at the same time and share bytes."""
        last = {n: i for i, node in enumerate(nodes) for n in (*node.inputs, node.output)}
        last |= dict.fromkeys(keep, len(nodes))
        first = {node.output: i for i, node in reversed([*enumerate(nodes)])}
        pairs = 0
        for n, offset in found.items():
            for m, other in found.items():
                both_live = first[m] < first[n] <= last[m]
                pairs += both_live and offset < other + sizes[m] and other < offset + sizes[n]
        return pairs

    pools, least_pools, total, shared = [], [], 0, 0
    for seed in range(4):
        program = _, sizes, _ = random_program(node, seed)
        found, wanted = planned(*program)
        more, fewer = sorted(set(found) - set(wanted)), sorted(set(wanted) - set(found))
        what = f"buffers {more} have an offset, but no node writes them"
        require(not more, what, "inputs_planned")
        require(not fewer, f"buffers {fewer} have no offset", "missing")
        shared += overlaps(found, *program)
        pool, least = (max(o + sizes[n] for n, o in p.items()) for p in (found, wanted))
        pools.append(pool), least_pools.append(least)
        total += sum(sizes[n] for n in wanted)
    lesson.fact("scores", {"peak bytes": sum(pools)})
    program = [node("add_", (0, 1), 0), node("mul", (0, 1), 2)]
    offsets = sorted(planned(program, {0: 512, 1: 512, 2: 512}, {2})[0])
    what = "add_ writes buffer 0 in place, which is an input, and mul writes buffer 2: buffers "
    require_equal(f"{what}with an offset", offsets, [2], "inputs_planned")
    what = "pairs of buffers that are live at the same time and share bytes"
    require_equal(what, shared, 0, "overlap")
    require(sum(pools) < total, "no two buffers share any byte", "no_reuse")
    for pool, least in zip(pools, least_pools, strict=True):
        require_equal("bytes of the whole pool", pool, at_most(least), "first_gap")
    chain = [node("tanh", (i,), i + 1) for i in range(4)]
    found = planned(chain, dict.fromkeys(range(5), 512), {4})[0]
    what = "bytes of the pool for a chain of four nodes, with 512 bytes in each buffer"
    require_equal(what, 512 + max(found.values()), at_most(1024), "first_gap")
    again = [node("mm", (0, 1), 2), node("relu", (2,), 3), node("add_", (3, 0), 3)]
    program = again, dict.fromkeys(range(4), 512), {3}
    what = "mm writes buffer 2, relu reads it and writes 3, add_ writes 3 again: pairs that "
    pairs = overlaps(planned(*program)[0], *program)
    require_equal(f"{what}share bytes", pairs, 0, "reborn")


@step(3, "fuse", "a chain is one kernel, and its inner results are not stored", "fuse traffic")
def fuse(submission, reference, lesson):
    node = reference.Node

    def kernels(*nodes) -> list[list[str]]:
        found = submission.fuse(list(nodes))
        require(found is not None, "fuse returned None", "no_return")
        are_kernels = isinstance(found, (list, tuple)) and all(
            isinstance(kernel, (list, tuple)) and all(each in nodes for each in kernel)
            for kernel in found
        )
        require(are_kernels, f"fuse returned {found}", "kernels")
        return [[n.name for n in kernel] for kernel in found]

    two = kernels(node("relu", (0,), 2), node("mm", (2, 1), 3))
    require_equal("kernels of relu, mm", two, [["relu"], ["mm"]], "product_fused")
    two = kernels(node("relu", (0,), 2), node("tanh", (1,), 3))
    require_equal("kernels of relu(a), tanh(b)", two, [["relu"], ["tanh"]], "stranger")
    two = kernels(node("relu", (0,), 2), node("tanh", (0,), 3))
    require_equal("kernels of relu(a), tanh(a)", two, [["relu"], ["tanh"]], "stranger")
    three = kernels(node("relu", (0,), 2), node("mm", (0, 1), 3), node("tanh", (2,), 4))
    fact = "kernels of relu, mm, and a tanh that reads the output of relu"
    require_equal(fact, three, [["relu"], ["mm"], ["tanh"]], "reordered")
    chain = kernels(node("mm", (0, 1), 2), node("mul", (2,), 3), node("add", (3, 0), 4))
    fact = "kernels of mm, mul, add in a chain"
    hint = "no_chain" if chain[0] == ["mm"] else "product_fused"
    require_equal(fact, chain, [["mm"], ["mul", "add"]], hint)
    far = kernels(node("mul", (0, 1), 2), node("tanh", (2,), 3), node("add", (2, 0), 4))
    fact = "kernels of mul, tanh, and an add that reads the output of mul"
    require_equal(fact, far, [["mul", "tanh", "add"]], "no_chain")

    sizes = {n: 10**n for n in range(6)}  # each decimal digit of a sum counts one buffer
    one = [node("mul", (0, 1), 2), node("add", (2, 1), 3)]

    def traffic(kernels: list, keep: set[int]) -> int:
        found = submission.traffic(kernels, sizes, keep)
        require(found is not None, "traffic returned None", "no_return")
        return found

    moved = traffic([one], {3})
    # this traffic stores the 100 bytes of buffer 2, which is right, but also loads them
    loads_inner = traffic([one], {2, 3}) == 1211
    hints = {1021: "loads_twice", 1121: "loads_twice", 11: "result_lost",
             1111: "loads_made" if loads_inner else "stores_dead"}  # fmt: skip
    hint = "bytes" if moved < 11 else hints.get(moved, "loads_made")
    require_equal(
        "bytes moved by a kernel that loads 1 + 10 and stores 1000", moved, 1011, hint
    )
    products = [[node("mm", (0, 1), 4)], [node("mm", (3, 0), 5)]]
    fact = "bytes moved by three kernels: loads 1 + 10, 1 + 10 and 1000 + 1, and stores 1000"
    require_equal(fact, traffic([one, *products], set()), 2023, "not_stored")
    found = traffic([one, *products], {3})
    require_equal(f"{fact}, which is in `keep`", found, 2023, "stores_twice")
    moved = traffic([[node("add_", (0, 1), 0)]], {0})
    fact = "bytes moved by a kernel in place, which loads 1 + 10 and stores 1"
    require_equal(fact, moved, 12, "loads_late")
    moved = traffic([[node("add_", (0, 1), 0), node("mul_", (0, 1), 0)]], {0})
    require_equal(f"{fact} although it writes it twice", moved, 12, "stores_twice")
    last = [[node("mm", (0, 1), 2)], [node("add", (2, 0), 3)], [node("mul_", (2, 1), 2)]]
    fact = "bytes moved if the last kernel writes a buffer that only an earlier kernel reads"
    require_equal(fact, traffic(last, {3}), 1322, "stores_dead")


@step(4, "replay for any size", "three graphs for all sizes; later calls change no result",
      "Buckets",
      crashes=NO_RETURN | {"size of tensor": "input_rows"})  # fmt: skip
def buckets(submission, reference, lesson):
    captures, replays, plain_calls = [], [], []

    class Graph:
        def __init__(self, rows: int):
            captures.append(rows)
            self.input, self.output = torch.zeros(rows, 2), torch.zeros(rows, 2)
            # replays use these tensors even if the learner replaces `input` or `output`
            self.captured = self.input, self.output

        def replay(self) -> None:
            replays.append(len(self.captured[0]))
            self.captured[1].copy_(self.captured[0] * 2)

    def plain(x: torch.Tensor) -> torch.Tensor:
        plain_calls.append(len(x))
        return x * 2

    def right(results: list) -> bool:
        pairs = zip(results, inputs, strict=True)
        return all(torch.equal(r[: len(x)], 2 * x) for r, x in pairs)

    call = submission.Buckets(Graph, plain, (32, 8, 16))
    rows = [5, 8, 9, 3]
    inputs = [torch.full((n, 2), float(n)) for n in rows]
    results = [call(x) for x in inputs]
    at_once = [call(x).clone() for x in inputs]
    require_equal("rows of the results for x of 5, 8, 9 and 3 rows",
          [len(r) for r in results], rows,
          "rows")  # fmt: skip
    fact, graphs = "graphs captured for 5, 8, 9 and 3 rows, each twice", sorted(captures)
    hint = "captures_each" if len(graphs) > len(set(graphs)) else "bucket"
    require_equal(fact, graphs, [8, 16], "captured_early" if graphs == [8, 16, 32] else hint)
    hint = "not_replayed" if len(replays) < 8 else "replayed_twice"
    require_equal("number of replays in eight calls", len(replays), 8, hint)
    require_equal("rows of the graphs that were replayed", replays, [8, 8, 16, 8] * 2, "bucket")
    require(right(at_once), "a result is wrong immediately after the call", "stale")
    require(right(results), "a result was right, and changed during a later call", "borrowed")
    large, found = torch.ones(33, 2), "no result"
    try:
        found = call(large)
    except Exception as error:
        plain_calls.append(type(error).__name__)
    require_equal("rows in the calls of plain, for 33 rows", plain_calls, [33], "too_large")
    is_right = torch.is_tensor(found) and torch.equal(found, 2 * large)
    require(is_right, "the result for 33 rows is not that of plain", "too_large")


@step(
    5, "read a trace", "the idle time of several streams, and the part due to the host", "idle"
)
def idle(submission, reference, lesson):
    def seconds(*kernels: tuple[float, float, float]) -> list[float]:
        found = submission.idle(list(kernels))
        require(found is not None, "idle returned None", "no_return")
        is_pair = isinstance(found, (tuple, list)) and len(found) == 2
        require(is_pair, f"idle returned {found}", "pair")
        return list(map(float, found))

    fact = "seconds of all gaps, and of those due to the host, "
    found = seconds((0.0, 1.0, 3.0), (0.5, 3.0, 4.0), (0.6, 6.0, 7.0), (9.25, 10.0, 11.0))
    hints = {(3, 5): "swapped", (5, 0.75): "late_part", (5, 2.25): "late_part"}
    hint = hints.get(tuple(found), "late" if found[0] == 5 else "streams")
    hint = "before_first" if found[0] == 6 else hint
    require_equal(f"{fact}in one stream", found, [5.0, 3.0], hint)
    found = seconds((0.0, 1.0, 3.0), (3.0, 4.0, 5.0))
    require_equal(
        f"{fact}if a kernel is launched when the gap begins", found, [1.0, 0.0], "late"
    )
    two = [(0.0, 1.0, 9.0), (0.1, 2.0, 3.0), (0.2, 5.0, 6.0), (0.3, 10.0, 11.0)]
    found = seconds(*two)
    hint = "unsorted" if found[0] == 3 else "streams"  # the gap after sorting by end
    require_equal(f"{fact}in two streams", found, [1.0, 0.0], hint)
    found = seconds(*two[::-1])
    require_equal(f"{fact}if the list has the reverse order", found, [1.0, 0.0], "unsorted")
    found = seconds((0.3, 1.0, 2.0), (0.2, 3.0, 4.0), (0.1, 5.0, 6.0))
    fact += "if the kernels begin in the reverse order of their launches"
    require_equal(fact, found, [2.0, 0.0], "unsorted")
