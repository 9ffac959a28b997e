"""A function of a DTensor works eagerly, and its compiled version fails: it returns a view.

A compiled graph must not return two tensors that share memory. So torch.compile returns the
base, and makes the view again after the graph. If it cannot repeat the views one by one, it
calls as_strided, which a DTensor does not have: its strides are those of the whole tensor, and
the memory belongs to one shard.

Each function is run eagerly, compiled, and compiled with the fix: no output is a view. Results
and gradients of the compiled version must equal those of the eager one.
"""

import os
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

# The error is raised around the graph, so it is the same with every back end; this one compiles
# no kernels, and is quick.
BACKEND = "aot_eager"


# --8<-- [start:functions]
def split_heads(x: DTensor) -> DTensor:  # [b, h] -> [b, heads, h/heads]
    return x.reshape(4, 3, 4)  # a view of the input


def split_heads_fixed(x: DTensor) -> DTensor:
    return x.reshape(4, 3, 4).clone()


def with_last(x: DTensor) -> tuple[DTensor, DTensor]:
    y = x * 2
    return y, y[:, -1:]  # the second output is a view of the first


def with_last_fixed(x: DTensor) -> tuple[DTensor, DTensor]:
    y = x * 2
    return y, y[:, -1:].clone()


def broken(x: DTensor) -> DTensor:
    y = x * 2
    heads = y.reshape(4, 3, 4)
    torch._dynamo.graph_break()  # here the first graph returns y and its view
    return y + heads.reshape(4, 12)


def broken_fixed(x: DTensor) -> DTensor:
    y = x * 2
    heads = y.reshape(4, 3, 4)
    return y + heads.reshape(4, 12)  # one graph, and a view that stays inside


# --8<-- [end:functions]
def inside(x: DTensor) -> DTensor:
    """Views are allowed as long as only the result of a later operator leaves the graph."""
    return (x * 2).reshape(4, 3, 4).sum(dim=-1)


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


def results(function: Callable, leaf: DTensor) -> list[torch.Tensor]:
    """The local parts of all outputs, and of the gradient of a weighted sum of them."""
    out = function(leaf)
    outs = list(out) if isinstance(out, tuple) else [out]
    weight = torch.arange(outs[0].to_local().numel(), device=leaf.device).sin()
    (outs[0].to_local().flatten() @ weight + sum(o.to_local().sum() for o in outs)).backward()
    gradient, leaf.grad = leaf.grad.to_local().clone(), None
    return [o.to_local().detach() for o in outs] + [gradient]


def main() -> None:
    if os.environ.get("WORLD_SIZE") not in {"1", "2", "4"}:
        sys.exit("start with 1, 2 or 4 ranks: torchrun --nproc-per-node=2 compiled_dtensor.py")
    device = init_distributed()
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    torch.manual_seed(0)
    leaf = distribute_tensor(torch.randn(4, 12), mesh, [Shard(0)]).requires_grad_()

    functions, eager = (split_heads, with_last, broken, inside), {}
    for function in (*functions, split_heads_fixed, with_last_fixed, broken_fixed):
        torch._dynamo.reset()
        truth = eager[function.__name__] = results(function, leaf)
        try:
            ours = results(torch.compile(function, backend=BACKEND), leaf)
        except RuntimeError as error:
            told = f"{type(error).__name__}: {error}"
        else:
            torch.testing.assert_close(ours, truth)
            told = "equals the eager result"
        assert ("as_strided" in told) == (function in functions[:3])
        if dist.get_rank() == 0:
            print(f"{function.__name__:18} compiled: {told}", flush=True)
    for function in functions[:3]:  # a fix must not change what is computed
        torch.testing.assert_close(
            eager[f"{function.__name__}_fixed"], eager[function.__name__]
        )
    twice = 2 * leaf.to_local().detach()
    torch.testing.assert_close(eager["broken"][0], 2 * twice)
    torch.testing.assert_close(eager["inside"][0].sum(), twice.sum())


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # DTensor's caches hold the mesh, which holds the group, to the very end
