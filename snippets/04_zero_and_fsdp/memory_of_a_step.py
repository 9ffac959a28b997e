"""A figure of the memory of one rank during a training step, replicated and with fully_shard.

The program counts every storage that an operator returns, until it is freed or resized. These
are parameters, gradients, Adam's moments, activations, gathered units and buffers. It traces
the second step, because Adam's moments do not exist before the first step ends. Compare the
bytes between steps with 12Ψ/N, and the bytes after backward with 16Ψ/N. The program draws
memory_of_a_step.svg.
"""

import os
import sys
import time
import weakref
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

BATCH, H, LAYERS = 96, 48, 8  # 1, 2, 3 and 4 ranks divide the batch
CASES = {  # reshard_after_forward; the colour and the position of the name in the figure
    "replicated": (None, "#52525b", (0.1, 15)),
    "fully_shard, reshard False": (False, "#c2410c", (1.06, 10.3)),
    "fully_shard, reshard True": (True, "#0b6e99", (1.06, 2.5)),
}
PHASES = ("forward", "backward", "optimizer")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(H, 4 * H), nn.Linear(4 * H, H)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


class MemoryTrace(TorchDispatchMode):
    """Trace the bytes of all live storages that operators have returned."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.trace, self.sizes = 0, [], {}

    def __enter__(self) -> "MemoryTrace":
        self.resize = resize = torch.UntypedStorage.resize_

        def resize_and_note(storage: torch.UntypedStorage, size: int):
            if storage._cdata in self.sizes:
                self.note(storage, size)
            return resize(storage, size)

        torch.UntypedStorage.resize_ = resize_and_note  # FSDP frees gathered units with it
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        torch.UntypedStorage.resize_ = self.resize
        return super().__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # DTensor then calls operators on the local tensors
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self.sizes:
                    self.note(storage, storage.nbytes())
        self.trace.append(self.used)
        return result

    def note(self, storage: torch.UntypedStorage, size: int) -> None:
        key = storage._cdata
        _, before = self.sizes.get(key, (None, 0))
        self.used += size - before
        self.sizes[key] = weakref.ref(storage, lambda _: self.forget(key)), size
        self.trace.append(self.used)

    def forget(self, key: int) -> None:
        _, size = self.sizes.pop(key)  # pop first, because other threads free buffers too
        self.used -= size


def let_go(done: Callable[[], bool]) -> None:
    """Wait half a second for `done`: gloo's threads drop a collective's buffers a bit late."""
    end = time.monotonic() + 0.5
    while not done() and time.monotonic() < end:
        time.sleep(0.001)


def gradient_norm(model: nn.Module) -> float:
    """The norm of the whole gradient, of which a rank may hold shards."""
    norm = nn.utils.get_total_norm([p.grad for p in model.parameters()])
    return (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()


def measure(reshard: bool | None, device: torch.device) -> tuple[dict[str, list[int]], float]:
    """Return the trace of each phase of the second step, and the norm of its gradient."""
    rank, n = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(device.type, (n,))
    torch.manual_seed(0)
    inputs = torch.randn(BATCH, H)[rank::n].to(device)
    psi = LAYERS * (8 * H * H + 5 * H) / (1 if reshard is None else n)
    traces = {}
    with MemoryTrace() as memory:
        model = nn.Sequential(*(Block() for _ in range(LAYERS))).to(device)
        if reshard is not None:
            for block in model:
                fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
            fully_shard(model, mesh=mesh)
        adam = torch.optim.Adam(model.parameters(), foreach=False)  # one parameter at a time
        for _ in range(2):
            memory.trace = [memory.used]
            loss = (model(inputs) - 1).square().mean()
            traces["forward"], memory.trace = memory.trace, [memory.used]
            loss.backward()
            if reshard is None:
                for parameter in model.parameters():
                    dist.all_reduce(parameter.grad)
                    parameter.grad /= n
            let_go(lambda: memory.used < 16.01 * psi)
            traces["backward"] = [*memory.trace, memory.used]
            norm, every = gradient_norm(model), [0.0] * n
            dist.all_gather_object(every, loss.item())
            assert len(set(every)) == n  # each rank has other rows
            let_go(lambda: memory.used < 16.01 * psi)
            memory.trace = [memory.used]
            adam.step()
            adam.zero_grad()
            let_go(lambda: memory.used < 12.01 * psi)
            traces["optimizer"] = [*memory.trace, memory.used]
    return traces, norm


def draw(results: dict[str, dict[str, list[int]]], psi: int, n: int) -> None:
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "step", "font.size": 12}
    figure, axis = plt.subplots(figsize=(7, 4.2))
    for name, traces in results.items():
        _, colour, place = CASES[name]
        x, y = [], []
        for index, phase in enumerate(PHASES):
            trace = traces[phase]
            x += [index + step / len(trace) for step in range(len(trace))]
            y += [used / psi for used in trace]
        axis.plot(x, y, color=colour, linewidth=1.6)
        axis.text(*place, name.removeprefix("fully_shard, "), color=colour)
    for level, words in ((16, "16Ψ"), (16 / n, f"16Ψ/{n}")):
        axis.axhline(level, color="#52525b", linewidth=0.8, linestyle=":")
        axis.text(3.03, level, words, color="#52525b", va="center")
    axis.set_xticks([0.5, 1.5, 2.5], PHASES)
    axis.tick_params(axis="x", length=0)
    for border in (1, 2):
        axis.axvline(border, color="#52525b", linewidth=0.6)
    axis.set_xlim(0, 3)
    axis.set_ylim(0, None)
    axis.set_ylabel("bytes in use, in Ψ")
    axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig("memory_of_a_step.svg", transparent=True, metadata={"Date": None})


def init_distributed() -> torch.device:
    """Join the process group: one accelerator per local rank where there are enough.

    With NCCL_MULTI_RANK_GPU_ENABLE=1 (NCCL 2.30 or newer), several ranks share a GPU.
    """
    if "LOCAL_RANK" not in os.environ:
        sys.exit(f"start this program with: torchrun --nproc-per-node=2 {sys.argv[0]}")
    local_rank, local_world = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    count = torch.accelerator.device_count()
    shared = count > 0 and os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
    if (count < local_world and not shared) or torch.backends.mps.is_available():
        if count and torch.version.cuda and local_rank == 0:
            advice = "NCCL_MULTI_RANK_GPU_ENABLE=1 lets ranks share a GPU (NCCL 2.30 or newer)"
            print(f"{local_world} ranks use the CPU and gloo. {advice}", file=sys.stderr)
        dist.init_process_group("gloo")  # on the CPU; mps has no collectives
        return torch.device("cpu")
    device = torch.device(torch.accelerator.current_accelerator().type, local_rank % count)
    torch.accelerator.set_device_index(device.index)
    dist.init_process_group(device_id=device)
    return device


def main() -> None:
    if BATCH % int(os.environ.get("WORLD_SIZE", "1")):
        sys.exit(f"the number of ranks must divide the batch of {BATCH}")
    device = init_distributed()
    rank, n = dist.get_rank(), dist.get_world_size()
    psi = LAYERS * (8 * H * H + 5 * H)
    results, norms = {}, []
    for name, (reshard, *_) in CASES.items():
        results[name], norm = measure(reshard, device)
        norms.append(norm)
    torch.testing.assert_close(norms, norms[:1] * len(norms), rtol=5e-4, atol=0)
    if rank == 0:
        print(f"N = {n}, Ψ = {psi:,}; bytes in use on a rank, per parameter")
        print(f"{'':28}between steps   after backward   peaks: {' '.join(PHASES)}")
    for name, traces in results.items():
        by = 1 if name == "replicated" else n
        before, after = traces["forward"][0] / psi, traces["backward"][-1] / psi
        # apart from the loss and Adam's step counters, which have four bytes each
        scalars = 4 * (1 + 4 * LAYERS)
        assert 0 <= traces["forward"][0] - 12 * psi // by <= scalars
        assert 0 <= traces["backward"][-1] - 16 * psi // by <= scalars
        peaks = {phase: max(traces[phase]) for phase in PHASES}
        # forward adds at least what backward needs: per row and block H inputs and two times 4H
        saved = 4 * LAYERS * BATCH // n * 9 * H
        gathered = 4 * psi if name == "fully_shard, reshard False" and n > 1 else 0
        assert peaks["forward"] >= 12 * psi // by + saved + gathered
        assert peaks["backward"] >= 16 * psi // by
        assert peaks["optimizer"] >= 16 * psi // by
        if name == "replicated":  # forward allocates nothing else, and Adam uses small buffers
            assert peaks["forward"] <= 12 * psi + 1.1 * saved
            assert peaks["optimizer"] <= 16 * psi + 12 * 4 * H * H
        elif n > 1:  # Adam needs no gathered parameters
            assert peaks["optimizer"] < min(peaks["forward"], peaks["backward"])
        if rank == 0:
            print(
                f"{name:28}{before:6.2f} = 12Ψ/{by}    {after:6.2f} = 16Ψ/{by}          "
                + " ".join(f"{'≈' + format(peak / psi, '.1f'):>8}" for peak in peaks.values())
            )
    overall = [max(max(trace) for trace in traces.values()) for traces in results.values()]
    assert n == 1 or overall[0] > overall[1] > overall[2], overall
    # with reshard False, all gathered parameters (4Ψ) are in memory at the end of forward
    end = results["fully_shard, reshard False"]["forward"][-1]
    assert n == 1 or end >= (12 / n + 4) * psi
    if rank == 0:
        draw(results, psi, n)


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # DTensor's caches hold the mesh, which holds the group, to the very end
