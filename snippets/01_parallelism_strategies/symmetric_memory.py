"""Triton kernels read and write the buffers of other ranks through a table of addresses.

A one-shot all-reduce, a two-shot all-reduce and an all-gather start and end with a barrier in
the kernel. The barrier uses atomics on a signal pad, which every rank can reach. On a GPU, the
memory comes from torch.distributed._symmetric_memory. Without a GPU, it is shared memory that
all processes have mapped. Triton's interpreter then uses the same addresses and real atomics.
With --compile, it compiles the kernels for an H100 and prints the atomics and the loads.
"""

import os
import re
import sys
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory

import torch
import torch.distributed as dist

if not torch.cuda.is_available() and "--compile" not in sys.argv:
    os.environ.setdefault("TRITON_INTERPRET", "1")
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

COUNT, BLOCK = 840, 512  # float32; 1 to 8 ranks divide the count, and the last block is short
RUNS = 6  # in a row, without any other synchronization
PAD = 16  # words of a signal pad that the kernels use: at most 2 blocks times 8 ranks


# --8<-- [start:barrier]
@triton.jit
def barrier(pads, rank, N: tl.constexpr):
    """Wait until this block runs on every rank. Words of the pads go from 0 to 1 and back."""
    tl.debug_barrier()  # all threads of the block have finished their loads and stores
    row = tl.program_id(0) * N  # a block has its own words, one for each rank
    for peer in range(N):
        word = tl.load(pads + peer).to(tl.pointer_type(tl.int32)) + row + rank
        while tl.atomic_cas(word, 0, 1, sem="release", scope="sys") != 0:
            pass  # the peer has not yet taken the previous signal
    for peer in range(N):
        word = tl.load(pads + rank).to(tl.pointer_type(tl.int32)) + row + peer
        while tl.atomic_cas(word, 1, 0, sem="acquire", scope="sys") != 1:
            pass  # the signal of the peer has not arrived
    tl.debug_barrier()


# --8<-- [end:barrier]
# --8<-- [start:kernels]
@triton.jit
def add_parts(buffers, offsets, mask, N: tl.constexpr, BLOCK: tl.constexpr):
    """Load the same elements from the buffer of every rank, and add them."""
    total = tl.zeros((BLOCK,), tl.float32)
    for peer in range(N):
        buffer = tl.load(buffers + peer).to(tl.pointer_type(tl.float32))
        total += tl.load(buffer + offsets, mask=mask)
    return total


@triton.jit
def one_shot(
    buffers, pads, out, count, rank, N: tl.constexpr, BLOCK: tl.constexpr, SYNC: tl.constexpr
):
    if SYNC:
        barrier(pads, rank, N)  # the inputs of all ranks are in place
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < count
    tl.store(out + offsets, add_parts(buffers, offsets, mask, N, BLOCK), mask=mask)
    if SYNC:
        barrier(pads, rank, N)  # all ranks have read, so a rank may write its next input


@triton.jit
def two_shot(buffers, pads, count, rank, N: tl.constexpr, BLOCK: tl.constexpr):
    barrier(pads, rank, N)
    inside = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = inside < count // N
    offsets = rank * (count // N) + inside  # only this rank reads and writes this chunk
    total = add_parts(buffers, offsets, mask, N, BLOCK)
    for peer in range(N):
        buffer = tl.load(buffers + peer).to(tl.pointer_type(tl.float32))
        tl.store(buffer + offsets, total, mask=mask)
    barrier(pads, rank, N)  # all chunks have arrived


@triton.jit
def all_gather(buffers, pads, out, count, rank, N: tl.constexpr, BLOCK: tl.constexpr):
    barrier(pads, rank, N)
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < count
    for peer in range(N):
        buffer = tl.load(buffers + peer).to(tl.pointer_type(tl.float32))
        tl.store(out + peer * count + offsets, tl.load(buffer + offsets, mask=mask), mask=mask)
    barrier(pads, rank, N)


# --8<-- [end:kernels]
@triton.jit
def count_up(pads, times: tl.constexpr):
    """Add 1 to one word of rank 0, many times."""
    word = tl.load(pads).to(tl.pointer_type(tl.int32)) + tl.zeros((times,), tl.int32)
    tl.atomic_add(word, 1, scope="sys")


def attach(name: str) -> SharedMemory:
    """Map the segment of another rank. That rank alone removes its name."""
    if sys.version_info >= (3, 13):
        return SharedMemory(name, track=False)
    segment = SharedMemory(name)
    resource_tracker.unregister(segment._name, "shared_memory")
    return segment


# --8<-- [start:allocate]
class SymmetricTensor:
    """A float32 tensor and a signal pad on each rank, and the addresses of all of them."""

    def __init__(self, count: int, device: torch.device) -> None:
        rank, n = dist.get_rank(), dist.get_world_size()
        if device.type == "cuda":
            # --8<-- [start:gpu]
            import torch.distributed._symmetric_memory as symm_mem

            self.local = symm_mem.empty(count, dtype=torch.float32, device=device)
            self.handle = symm_mem.rendezvous(self.local, dist.group.WORLD)
            peers = [self.handle.get_buffer(r, (count,), torch.float32) for r in range(n)]
            addresses = [peer.data_ptr() for peer in peers]
            pads = list(self.handle.signal_pad_ptrs)
            self.pad = self.handle.get_signal_pad(rank, (PAD,), torch.int32)
            # --8<-- [end:gpu]
        else:
            own = SharedMemory(create=True, size=4 * (PAD + count))  # filled with zeros
            names = [""] * n
            dist.all_gather_object(names, own.name)
            self.segments = [own if r == rank else attach(x) for r, x in enumerate(names)]
            mapped = [torch.frombuffer(s.buf, dtype=torch.int32) for s in self.segments]
            pads = [memory.data_ptr() for memory in mapped]
            addresses = [pad + 4 * PAD for pad in pads]
            self.pad = mapped[rank][:PAD]
            self.local = mapped[rank][PAD : PAD + count].view(torch.float32)
            dist.barrier()
            own.unlink()  # only the name: the memory exists until the last process has ended
        self.buffers = torch.tensor(addresses, dtype=torch.int64, device=device)
        self.pads = torch.tensor(pads, dtype=torch.int64, device=device)


# --8<-- [end:allocate]
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


def choose_device() -> torch.device:
    """Return a GPU if there is one. If there are fewer GPUs than ranks, ranks share a GPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if count < int(os.environ["LOCAL_WORLD_SIZE"]):
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % count)
    torch.cuda.set_device(device)
    return device


def compile_kernels() -> None:
    """Compile the kernels for an H100, without a GPU, and print instructions of the PTX."""
    types = {"buffers": "*i64", "pads": "*i64", "out": "*fp32", "count": "i32", "rank": "i32"}
    values = {"N": 4, "BLOCK": BLOCK, "SYNC": True}
    for kernel in (one_shot, two_shot, all_gather):
        constants = {key: values[key] for key in kernel.arg_names if key in values}
        signature = {key: types.get(key, "constexpr") for key in kernel.arg_names}
        source = ASTSource(kernel, signature, constexprs=constants)
        ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]
        atomics = sorted(set(re.findall(r"\batom\.\S+", ptx)))
        assert atomics == [f"atom.global.{x}.sys.cas.b32" for x in ("acquire", "release")]
        loads = set(re.findall(r"\bld\.global\S*", ptx)) - {"ld.global.b64"}  # of addresses
        assert loads == {"ld.global.b32"}
        print(f"{kernel.__name__:10}  {'  '.join([*atomics, *loads])}")


def main() -> None:
    if "--compile" in sys.argv:
        return compile_kernels()
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if not 1 <= world <= 8 or world != int(os.environ.get("LOCAL_WORLD_SIZE", "1")):
        sys.exit("this program needs 1 to 8 ranks on one machine, because they share memory")
    group_device = init_distributed()  # the library's collectives need tensors on this device
    device = choose_device()
    rank, n = dist.get_rank(), dist.get_world_size()
    memory = SymmetricTensor(COUNT, device)
    tables, sizes = (memory.buffers, memory.pads), {"N": n, "BLOCK": BLOCK}

    def run(name: str, x: torch.Tensor, sync: bool = True) -> torch.Tensor:
        """Write the input of this rank, and start one kernel."""
        memory.local.copy_(x)
        blocks = triton.cdiv(COUNT // n if name == "two-shot" else COUNT, BLOCK)
        if name == "two-shot":
            two_shot[(blocks,)](*tables, COUNT, rank, **sizes)
            return memory.local.clone()
        out = torch.empty(COUNT * (n if name == "all-gather" else 1), device=device)
        if name == "all-gather":
            all_gather[(blocks,)](*tables, out, COUNT, rank, **sizes)
        else:
            one_shot[(blocks,)](*tables, out, COUNT, rank, **sizes, SYNC=sync)
        return out

    def meet() -> None:
        """Wait until all ranks have finished their kernels."""
        if device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier()

    torch.manual_seed(rank)
    equal = {}
    for name in ("one-shot", "two-shot", "all-gather"):
        inputs = torch.randn(RUNS, COUNT, device=device)
        gathered = [torch.empty_like(inputs, device=group_device) for _ in range(n)]
        dist.all_gather(gathered, inputs.to(group_device))
        results = torch.stack([run(name, x) for x in inputs])
        parts = [part.to(device) for part in gathered]
        expected = torch.cat(parts, dim=1) if name == "all-gather" else sum(parts)
        assert torch.equal(results, expected)  # the kernel adds in the same order
        equal[name] = len(results)
    meet()
    assert not memory.pad.any()  # every signal was taken

    mine = torch.full((COUNT,), float(2**rank), device=device)
    memory.local.copy_(mine)  # the previous input, 1 on rank 0, 2 on rank 1, 4 on rank 2
    meet()
    if rank == 0:  # the other ranks are late
        early = run("one-shot", 5 * mine, sync=False).unique().tolist()
    meet()
    right = run("one-shot", 5 * mine).unique().tolist()
    assert right == [5 * (2**n - 1)]

    meet()
    count_up[(1,)](memory.pads, times=512)
    meet()
    if rank == 0:
        assert early == [5 + (2**n - 2)]  # the new input of rank 0, and old inputs
        assert memory.pad[0].item() == 512 * n  # no addition is lost
        where = "on a GPU" if device.type == "cuda" else "in the interpreter, on shared memory"
        print(f"{n} ranks, Triton {where}")
        for name, runs in equal.items():
            print(f"  {name:10}  {runs} runs are equal to a loop over the inputs of all ranks")
        print(f"  rank 0 without a barrier: {early[0]:.0f}, with barriers: {right[0]:.0f}")
        print(f"  {n} × 512 atomic additions to one word: {memory.pad[0].item()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
