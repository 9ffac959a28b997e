"""Tensor parallelism that overlaps its collectives with products, on an emulated link.

In the backward of a column-parallel layer, dX must be summed over the ranks, but dW does not
need this sum. So start the all-reduce first, and then compute dW. The forward of a row-parallel
layer has no such product, so it is cut: the tokens of each rank are one piece, and each piece
is sent while the next one is multiplied. Both orders give the sums of one process, and the
times are compared with the formula.

The link and the GPU are emulated, with a real collective and a real product. Each of them then
sleeps until latency + bytes / bandwidth, or FLOPs / rate, have passed. A sleep needs no core.
"""

import os
import queue
import sys
import threading
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.distributed.nn  # not left to torch: imported after init, it keeps the group alive

LATENCY, BANDWIDTH = 1e-3, 25e6  # of the emulated link: seconds, bytes per second
RATE = 6.5e9  # of the emulated GPU: FLOP/s
S, H, WIDE = 504, 256, 1008  # tokens, width, inner width: 2, 3 and 4 ranks divide both
STEPS = 5


class Wire(threading.Thread):
    """Run collectives one after the other, at the speed of the emulated link."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.jobs: queue.Queue = queue.Queue()

    def run(self) -> None:
        while (job := self.jobs.get()) is not None:
            collective, seconds, done = job
            end = time.perf_counter() + seconds
            collective()
            time.sleep(max(0.0, end - time.perf_counter()))
            done.set()


class Run:
    """One run: the order of its operations, and the least time of each product and message."""

    def __init__(self, wire: Wire) -> None:
        self.wire, self.handles, self.events = wire, [], []
        self.begin = time.perf_counter()

    def product(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        seconds = 2 * a.numel() * b.shape[1] / RATE
        end = time.perf_counter() + seconds
        result = a @ b
        time.sleep(max(0.0, end - time.perf_counter()))
        self.events.append(("product", seconds))
        return result

    def start(self, collective: Callable, nbytes: float) -> None:
        seconds = LATENCY + nbytes / BANDWIDTH
        self.handles.append(threading.Event())
        self.wire.jobs.put((collective, seconds, self.handles[-1]))
        self.events.append(("start", seconds))

    def wait(self) -> None:
        """Wait for all operations that have been started."""
        for handle in self.handles:
            handle.wait()
        self.events.append(("wait", 0.0))
        self.total = time.perf_counter() - self.begin

    def predicted(self) -> float:
        """Products run one after the other, as do messages. Only a wait connects the two."""
        computed = sent = 0.0
        for kind, seconds in self.events:
            if kind == "product":
                computed += seconds
            elif kind == "start":
                sent = max(sent, computed) + seconds
            else:
                computed = max(computed, sent)
        return computed


def column_backward(run: Run, x, gradient, weight, beside: bool) -> list[torch.Tensor]:
    """dX, summed over the ranks, and dW of y = x Aᵀ; [s, h], [s, f/t] and [f/t, h]."""
    n = dist.get_world_size()
    dx = run.product(gradient, weight)
    run.start(lambda: dist.all_reduce(dx), 2 * (n - 1) / n * dx.nbytes)
    if not beside:
        run.wait()
    dw = run.product(gradient.T, x)
    run.wait()
    return [dx, dw]


def row_forward(run: Run, y, weight, beside: bool) -> list[torch.Tensor]:
    """This rank's tokens of the sum over ranks of y Bᵀ; [s, f/t] and [h, f/t] -> [s/t, h]."""
    rank, n = dist.get_rank(), dist.get_world_size()
    parts = y.chunk(n)  # each rank's tokens
    if not beside:
        terms = list(run.product(y, weight.T).chunk(n))
    arriving = torch.empty(n - 1, S // n, H)
    for step in range(1, n):
        to, source = (rank - step) % n, (rank + step) % n
        term = run.product(parts[to], weight.T) if beside else terms[to]

        def exchange(term=term, to=to, source=source, arrived=arriving[step - 1]) -> None:
            sending = dist.P2POp(dist.isend, term, to)
            for work in dist.batch_isend_irecv(
                [sending, dist.P2POp(dist.irecv, arrived, source)]
            ):
                work.wait()

        run.start(exchange, term.nbytes)
    # last, because it is not sent
    own = run.product(parts[rank], weight.T) if beside else terms[rank]
    run.wait()
    return [own + arriving.sum(0)]


def measure(layer: Callable, truth: list[torch.Tensor], wire: Wire, *args) -> Run:
    """Return the run of median length. Every result is compared with one process."""
    runs = []
    for _ in range(STEPS):
        dist.barrier()
        run = Run(wire)
        result = layer(run, *args)
        for ours, true in zip(result, truth, strict=True):
            torch.testing.assert_close(ours, true, rtol=1e-4, atol=1e-3)
        assert run.total > 0.999 * run.predicted()  # a sleep is never too short
        runs.append(run)
    return sorted(runs, key=lambda run: run.total)[STEPS // 2]


def check_start(wire: Wire) -> None:
    """The collective waits for `after`, which is set when start() has returned."""
    run, after, overlapped = Run(wire), threading.Event(), []
    run.start(lambda: overlapped.append(after.wait(20)), 0.0)
    after.set()
    run.wait()
    assert overlapped == [True]  # start() does not wait for the collective, and wait() does


def main() -> None:
    if os.environ.get("WORLD_SIZE") not in {"2", "3", "4"}:
        sys.exit("start with 2 to 4 ranks: torchrun --nproc-per-node=2 overlapped_tp.py")
    dist.init_process_group("gloo")
    rank, n = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    x, gradient, y = torch.randn(S, H), torch.randn(S, WIDE), torch.randn(S, WIDE)
    up, down = torch.randn(WIDE, H), torch.randn(H, WIDE)
    mine = slice(rank * WIDE // n, (rank + 1) * WIDE // n)  # of the inner width

    ours = gradient[:, mine].contiguous(), up[mine]
    dx_dw = [gradient @ up, ours[0].T @ x]
    tokens = [(y @ down.T).chunk(n)[rank]]
    layers = {
        "backward, column-parallel": (column_backward, dx_dw, (x, *ours)),
        "forward, row-parallel": (row_forward, tokens, (y[:, mine], down[:, mine])),
    }
    wire = Wire()
    wire.start()
    check_start(wire)
    if rank == 0:
        print(f"{n} ranks, emulated: {RATE / 1e9:g} GFLOP/s, {BANDWIDTH / 1e6:g} MB/s")
    for name, (layer, truth, args) in layers.items():
        if rank == 0:
            print(f"{name}: equal to one process")
        for beside in (False, True):
            run = measure(layer, truth, wire, *args, beside)
            kinds = [kind for kind, _ in run.events]
            last_start = len(kinds) - 1 - kinds[::-1].index("start")
            assert ("product" in kinds[last_start : kinds.index("wait")]) == beside, kinds
            if rank == 0:
                busy, sent = (
                    1e3 * sum(seconds for kind, seconds in run.events if kind == each)
                    for each in ("product", "start")
                )
                if not beside:
                    print(f"  products {busy:.1f} ms, link {sent:.1f} ms")
                print(f"  {'beside' if beside else 'one after the other'}:", end=" ")
                print(f"≈{1e3 * run.total:.1f} ms, predicted {1e3 * run.predicted():.1f} ms")
    wire.jobs.put(None)
    wire.join()


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
