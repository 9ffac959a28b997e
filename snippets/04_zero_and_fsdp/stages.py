"""One engine for DDP and the three stages of ZeRO: bytes in memory and bytes sent per rank.

A model of L layers is trained in mixed precision: bf16 parameters and gradients, and fp32
master weights and moments. These are 2 + 2 + 12 bytes per parameter. The stage decides which of
them are sharded: none for 0 (DDP), the optimizer for 1, also the gradients for 2, and also the
parameters for 3.

The program prints the bytes of the tensors next to the formula. It also prints the bytes that
the operating system has sent for this process next to the formula. It needs Linux, and it stays
on the CPU.
"""

import gc
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

H, LAYERS, BATCH, STEPS = 480, 8, 16, 2  # tokens of one rank; 1, 2, 3 and 4 divide H²


def all_gather(whole: torch.Tensor, shard: torch.Tensor) -> None:
    dist.all_gather(list(whole.chunk(dist.get_world_size())), shard)


def reduce_scatter(whole: torch.Tensor) -> torch.Tensor:
    """Return the mean over the ranks of this rank's chunk of `whole`.

    The all-to-all sends (N-1)/N of the tensor. The reduce-scatter of gloo sends twice as much.
    """
    received = torch.empty_like(whole)
    dist.all_to_all_single(received, whole)
    return received.view(dist.get_world_size(), -1).float().mean(0).to(whole.dtype)


class Layer:
    """One H×H matrix as a flat tensor [H²] or shard [H²/N], its gradient and its optimizer."""

    def __init__(self, initial: torch.Tensor, stage: int) -> None:
        self.stage, self.n = stage, dist.get_world_size()
        mine = initial.chunk(self.n)[dist.get_rank()]
        self.parameter = (mine if stage >= 3 else initial).bfloat16()  # 2 bytes
        self.gradient: torch.Tensor | None = None  # 2 bytes
        self.master = (mine if stage >= 1 else initial).clone()  # 4 bytes
        self.moments = [torch.zeros_like(self.master) for _ in range(2)]  # 8 bytes

    def whole(self) -> torch.Tensor:
        """Return the matrix, [H, H]. Stage 3 gathers it, and the caller frees it after use."""
        if self.stage < 3:
            return self.parameter.view(H, H)
        whole = torch.empty(H * H, dtype=torch.bfloat16)
        all_gather(whole, self.parameter)
        return whole.view(H, H)

    def store_gradient(self, gradient: torch.Tensor) -> None:
        """Store the gradient that backward has computed. Stages 2 and 3 reduce it first."""
        flat = gradient.flatten()
        self.gradient = reduce_scatter(flat) if self.stage >= 2 else flat

    def step(self, t: int) -> None:
        if self.stage < 2:  # stages 0 and 1 still have the whole gradient
            shard = reduce_scatter(self.gradient)
            if self.stage == 0:  # the other half of an all-reduce
                all_gather(self.gradient, shard)
            self.gradient = shard if self.stage == 1 else self.gradient
        g, (m, v) = self.gradient.float(), self.moments
        m.lerp_(g, 0.1)
        v.lerp_(g * g, 0.001)
        self.master -= 1e-3 * (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-8)
        if self.stage in (0, 3):
            self.parameter.copy_(self.master)
        else:
            all_gather(self.parameter, self.master.bfloat16())
        self.gradient = None


def leaf_bytes() -> int:
    """Return the bytes in memory of all leaf tensors that were made after gc.freeze()."""
    tensors = [x for x in gc.get_objects() if type(x) in (torch.Tensor, nn.Parameter)]
    leaves = [x for x in tensors if x.is_leaf]
    leaves += [x.grad for x in leaves if x.grad is not None]
    storages = [x.untyped_storage() for x in leaves]  # a view keeps a whole storage in memory
    return sum({x.data_ptr(): x.nbytes() for x in storages}.values())


def assert_leaf_bytes(expected: int) -> None:
    end = time.monotonic() + 20
    while leaf_bytes() != expected:
        assert time.monotonic() < end, (leaf_bytes(), expected)
        time.sleep(0.001)  # gloo's threads free the buffers of a collective a bit late


def train(layers: list[Layer], inputs: torch.Tensor, t: int) -> dict[str, int]:
    """Run one step of y ← y + tanh(y Wᵀ), by hand. The loss is the mean of y².

    Return the bytes in memory when backward has ended.
    """
    saved = [inputs]
    for layer in layers:
        saved.append(saved[-1] + torch.tanh(saved[-1] @ layer.whole().T))  # [b, h]
    gradient = 2 * saved[-1] / saved[-1].numel()
    state = [x for layer in layers for x in (layer.parameter, layer.master, *layer.moments)]
    for index in reversed(range(LAYERS)):
        inner = saved[index + 1] - saved[index]  # the output of tanh
        inner = gradient * (1 - inner * inner)
        gradient = gradient + inner @ layers[index].whole()
        layers[index].store_gradient(inner.T @ saved[index])  # [h, b] @ [b, h]
        gradients = [layer.gradient for layer in layers[index:]]
        in_use = [*state, *gradients, *saved[1:], gradient, inner]
        assert_leaf_bytes(sum(x.nbytes for x in in_use))  # and nothing else is in memory
    in_memory = {
        "parameters": sum(layer.parameter.nbytes for layer in layers),
        "gradients": sum(layer.gradient.nbytes for layer in layers),
        "optimizer": sum(x.nbytes for layer in layers for x in (layer.master, *layer.moments)),
        "activations": sum(x.nbytes for x in saved),
    }
    for layer in layers:
        layer.step(t)
    return in_memory


def by_autograd(batches: list[torch.Tensor]) -> torch.Tensor:
    """Return all parameters, [L · H²], after the same steps with autograd and torch's Adam."""
    torch.manual_seed(0)
    masters = [nn.Parameter(torch.randn(H * H) / H**0.5) for _ in range(LAYERS)]
    adam = torch.optim.Adam(masters, lr=1e-3)
    for y in batches:
        for master in masters:
            y = y + torch.tanh(y @ master.bfloat16().view(H, H).T)
        y.square().mean().backward()
        for master in masters:
            dist.all_reduce(master.grad)
            master.grad /= dist.get_world_size()
        adam.step()
        adam.zero_grad()
    return torch.cat(masters).detach()


def all_bytes_written() -> int:
    """Return the bytes that this process has written so far, sockets included."""
    return int(Path("/proc/self/io").read_text().split("wchar:")[1].split()[0])


def main() -> None:
    if os.environ.get("WORLD_SIZE") not in ("1", "2", "3", "4"):
        sys.exit(
            "start this program with: torchrun --nproc-per-node=4 stages.py (1 to 4 ranks)"
        )
    if not Path("/proc/self/io").exists():
        sys.exit("stages.py reads /proc/self/io, which this system does not have")
    dist.init_process_group("gloo")
    rank, n = dist.get_rank(), dist.get_world_size()
    psi = LAYERS * H * H
    if rank == 0:
        print(f"N = {n}, Ψ = {psi:,}; bytes per rank, divided by Ψ, and the formula")
        print("stage  parameters  gradients  optimizer    sum  formula", end="")
        print("  activations   sent  formula")
    ones = torch.full((H * H,), float(rank))
    assert reduce_scatter(ones).unique().tolist() == [(n - 1) / 2]  # Adam hides a sum
    reference = None
    for stage in range(4):
        torch.manual_seed(0)
        initial = [torch.randn(H * H) / H**0.5 for _ in range(LAYERS)]
        torch.manual_seed(1 + rank)
        batches = [torch.randn(BATCH, H).bfloat16() for _ in range(STEPS)]
        gc.freeze()  # leaf_bytes does not count the tensors so far
        layers = [Layer(values, stage) for values in initial]
        for t, inputs in enumerate(batches, start=1):
            dist.barrier()
            before = all_bytes_written()
            in_memory = train(layers, inputs, t)
            sent = (all_bytes_written() - before) / psi
        final = torch.cat([layer.whole().flatten() for layer in layers])
        if stage == 0:
            reference, truth = final, by_autograd(batches)
            masters = torch.cat([layer.master for layer in layers])
            off = (masters - truth).abs().mean() / (truth - torch.cat(initial)).abs().mean()
            assert off < 0.04, off  # bf16 rounding changes some of the signs in Adam
        assert torch.equal(final, reference)  # the same sums of the same numbers
        by = [n if stage >= level else 1 for level in (3, 2, 1)]
        expected = [size * psi // divisor for size, divisor in zip((2, 2, 12), by, strict=True)]
        expected.append(2 * (LAYERS + 1) * BATCH * H)  # no stage shards the activations
        assert list(in_memory.values()) == expected
        traffic = (3 if stage == 3 else 2) * 2 * (n - 1) / n  # bytes per bf16 element
        assert traffic <= sent <= 1.05 * traffic + 0.01, (stage, sent)  # plus headers
        if rank == 0:
            p, g, o = (in_memory[k] / psi for k in ("parameters", "gradients", "optimizer"))
            print(
                f"{stage:5}  {p:10.2f}  {g:9.2f}  {o:9.2f}  {p + g + o:5.2f}  "
                f"{sum(expected[:3]) / psi:7.2f}  {in_memory['activations'] / psi:11.2f}  "
                f" ≈{sent:.2f}  {traffic:7.2f}"
            )
    if rank == 0:
        print(f"after {STEPS} steps all four have the same parameters, bit for bit")


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
