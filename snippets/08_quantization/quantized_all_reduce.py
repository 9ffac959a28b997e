"""An all-reduce that sends int8 and adds in fp32.

An all-to-all brings every rank's version of one chunk to the same rank. This rank adds the
versions in fp32 and quantizes the sum, and an all-gather distributes the sums. Each number is
rounded only twice, whatever the number of ranks. A ring, in contrast, rounds at every hop.
Blocks of 256 numbers share a scale. Compare the measured errors with the predicted ones.
"""

import os
import sys

import torch
import torch.distributed as dist

BLOCK, NUMBERS = 256, 3 * 2**18  # divides by 1, 2, 3 and 4 ranks and by the blocks


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


# --8<-- [start:quantize]
def quantize(x: torch.Tensor) -> torch.Tensor:
    """Return blocks as bytes, each followed by its scale: [k] fp32 -> [k/256, 260] int8."""
    blocks = x.view(-1, BLOCK)
    scale = blocks.abs().amax(1, keepdim=True).clamp(min=1e-30) / 127
    q = (blocks / scale).round().clamp(-127, 127).to(torch.int8)
    return torch.cat([q, scale.view(torch.int8)], 1)  # the 4 bytes of an fp32


def dequantize(sent: torch.Tensor) -> torch.Tensor:
    """[..., 260] int8 -> [..., 256] fp32."""
    return sent[..., :BLOCK].float() * sent[..., BLOCK:].contiguous().view(torch.float32)


# --8<-- [end:quantize]


# --8<-- [start:all_reduce]
def all_reduce_int8(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return the sum of x over all ranks, and the bytes this rank sent.

    Each rank has a whole number of the blocks of x.
    """
    n = dist.get_world_size()
    mine = quantize(x).view(n, -1, BLOCK + 4)  # row r is for rank r
    theirs = torch.empty_like(mine)
    dist.all_to_all_single(theirs, mine)  # now row r is rank r's version of our chunk
    total = quantize(dequantize(theirs).sum(0).flatten())  # added in fp32, rounded once more
    chunks = [torch.empty_like(total) for _ in range(n)]
    dist.all_gather(chunks, total)
    sent = (n - 1) * mine[0].nbytes + (n - 1) * total.nbytes
    return dequantize(torch.stack(chunks)).flatten(), sent


# --8<-- [end:all_reduce]


def ring_int8(x: torch.Tensor) -> torch.Tensor:
    """A ring of quantized partial sums, which rounds the sum so far at every hop."""
    rank, n = dist.get_rank(), dist.get_world_size()
    chunks = list(x.clone().chunk(n))
    incoming = quantize(torch.zeros_like(chunks[rank]))

    def pass_on(outgoing: torch.Tensor) -> None:
        ops = [dist.P2POp(dist.isend, outgoing, (rank + 1) % n),
               dist.P2POp(dist.irecv, incoming, (rank - 1) % n)]  # fmt: skip
        for work in dist.batch_isend_irecv(ops):
            work.wait()

    for step in range(n - 1):
        pass_on(quantize(chunks[(rank - step) % n]))
        chunks[(rank - step - 1) % n] += dequantize(incoming).flatten()
    finished = quantize(chunks[(rank + 1) % n])
    parts = [torch.empty_like(finished) for _ in range(n)]
    dist.all_gather(parts, finished)
    return torch.cat([dequantize(parts[(c - 1) % n]).flatten() for c in range(n)])


def main() -> None:
    if NUMBERS // BLOCK % int(os.environ.get("WORLD_SIZE", "1")):
        sys.exit(f"the number of ranks must divide {NUMBERS // BLOCK} blocks")
    device = init_distributed()
    rank, n = dist.get_rank(), dist.get_world_size()
    x = torch.randn(NUMBERS, generator=torch.Generator().manual_seed(rank)).to(device)
    exact = x.clone()
    dist.all_reduce(exact)

    assert quantize(x[:BLOCK] * 0)[0, BLOCK:].view(torch.float32) > 0  # no 0/0 for zeros
    ours, sent = all_reduce_int8(x)
    plain = 2 * (n - 1) * x.nbytes // n  # what a ring all-reduce in fp32 sends
    copies = [torch.empty_like(ours) for _ in range(n)]
    dist.all_gather(copies, ours)
    assert all(torch.equal(copy, ours) for copy in copies)

    def error(y: torch.Tensor) -> float:
        return ((y - exact).norm() / exact.norm()).item()

    # Δ²/12 with each block's own Δ: once for what is sent, once for the sum
    step = (x.view(-1, BLOCK).abs().amax(1) / 127).square().mean().sqrt() / x.std()
    once = step.item() / 12**0.5
    hops = error(ring_int8(x))
    if rank == 0:
        print(f"{n} rank{'s' * (n > 1)}, {x.nbytes / 2**20:.1f} MiB each")
        print(f"sent by each: {sent:,} bytes; in fp32 by a ring {plain:,}")
        # with one rank the second rounding finds what the first has left, and changes nothing
        two, many = once * 2**0.5 if n > 1 else once, once * ((n + 1) / 2) ** 0.5
        print(f"relative error        measured  Δ²/12\n"
              f"all-to-all, gather    {error(ours):8.2%} {two:6.2%}\n"
              f"rounded at every hop  {hops:8.2%} {many:6.2%}")  # fmt: skip
        assert abs(error(ours) / two - 1) < 0.05 and abs(hops / many - 1) < 0.05
        assert n == 1 or abs(plain / sent - 4 * BLOCK / (BLOCK + 4)) < 1e-9
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
