"""In ZeRO stage 3 a parameter is an empty tensor while its module does not run.

deepspeed.initialize shards the model. Afterwards p.data has no elements, except during the
forward and the backward of its module. The norm of such a parameter is 0, and an initialisation
changes nothing. Neither of them raises an error. The state dict of the module contains empty
tensors. Inside GatheredParameters the parameters are whole. With modifier_rank, the changes of
that rank are written to the shards. Without modifier_rank, all changes are lost.

Needs: pip install deepspeed
"""

import logging
import os
import sys
import warnings

import torch
import torch.distributed as dist
import torch.distributed.nn  # not left to torch: imported after init, it keeps the group alive
from torch import nn

logging.disable(logging.WARNING)  # DeepSpeed logs to stdout, with the date
warnings.simplefilter("ignore")
if torch.accelerator.device_count() < int(os.environ.get("LOCAL_WORLD_SIZE", "1")):
    # DeepSpeed uses the GPU with the number LOCAL_RANK, so its ranks cannot share a GPU.
    os.environ |= {"DS_ACCELERATOR": "cpu", "NCCL_MULTI_RANK_GPU_ENABLE": "0"}

try:
    import deepspeed
    import deepspeed.ops
except ImportError:
    sys.exit("this program needs: pip install deepspeed")
# on a CPU, DeepSpeed would compile an all-reduce for inference, which training does not use
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}


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
    device = init_distributed()
    show = print if dist.get_rank() == 0 else lambda *_: None
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8)).to(device)
    norm = model[0].weight.norm().item()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)

    # --8<-- [start:trap]
    weight = engine.module[0].weight
    show(f"outside: shape {list(weight.shape)}, norm {weight.norm().item():.4f}")
    show(f"         before sharding: shape {list(weight.ds_shape)}, norm {norm:.4f}")
    shapes = [list(value.shape) for value in engine.module.state_dict().values()]
    show(f"         shapes in module.state_dict(): {shapes}")
    nn.init.zeros_(weight)  # changes nothing, and raises no error
    ids = torch.zeros(4, dtype=torch.long, device=device)
    uses = {
        "x @ weight.T": lambda: torch.empty(4, 8, device=device) @ weight.T,
        "embedding(ids, weight)": lambda: nn.functional.embedding(ids, weight),
    }
    for name, use in uses.items():
        try:
            use()
        except RuntimeError as error:
            show(f"         {name}: {type(error).__name__}: {error}")
    # --8<-- [end:trap]

    # --8<-- [start:fix]
    with deepspeed.zero.GatheredParameters(weight):  # on every rank, as for any gather
        show(f"inside:  shape {list(weight.shape)}, norm {weight.norm().item():.4f}")
        torch.testing.assert_close(weight.norm().item(), norm)  # zeros_ changed nothing
        with torch.no_grad():
            weight.fill_(0.5)
        assert weight.eq(0.5).all()  # until the shards are restored
    with deepspeed.zero.GatheredParameters(weight):
        torch.testing.assert_close(weight.norm().item(), norm)  # the values 0.5 are lost
    show("after a change without modifier_rank: the old values again")
    with torch.no_grad(), deepspeed.zero.GatheredParameters(weight, modifier_rank=0):
        if dist.get_rank() == 0:
            weight.fill_(0.5)  # the values of rank 0 are written to all shards
    with deepspeed.zero.GatheredParameters(weight):
        assert torch.equal(weight.data, torch.full_like(weight, 0.5))
    show("after a change by rank 0 with modifier_rank=0: 0.5 in all elements, on every rank")
    # --8<-- [end:fix]


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # DeepSpeed keeps its groups in globals of its modules, to the very end
