"""A DeepSpeed checkpoint of two ranks continues on three ranks, and becomes an FSDP2 model.

    torchrun --nproc-per-node=2 deepspeed_conversions.py save
    torchrun --nproc-per-node=3 deepspeed_conversions.py load

`save` trains in stage 2 and saves. Then DeepSpeed's own scripts convert its folder:
`zero_to_fp32.py` to safetensors, and `ds_to_universal` to a folder for any number of ranks.
`load` loads each form, makes two more steps, and compares the losses with one process that was
never interrupted. Look at the loss of step 12, which shows whether the moments were loaded, and
at DeepSpeed's message if the folder was not converted.

Needs: pip install deepspeed safetensors
"""

import logging
import os
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.nn  # if torch imports it after init, the group stays alive
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

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

BATCH, STEPS = 24, 10
WIDTH = 10  # 121 parameters: a multiple of neither 2 nor 3 ranks


def make_model(seed: int, device: torch.device) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
    return model.to(device)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1)


def new_engine(model: nn.Module, universal: bool = False) -> deepspeed.DeepSpeedEngine:
    config = {
        "train_micro_batch_size_per_gpu": BATCH // dist.get_world_size(),
        "gradient_clipping": 0.0,  # the default, 1.0, would clip
        "zero_optimization": {"stage": 2},
        "checkpoint": {"load_universal": universal},
    }
    return deepspeed.initialize(model=model, optimizer=adamw(model), config=config)[0]


def loss_of(model: nn.Module, number: int, rank: int = 0, n: int = 1) -> torch.Tensor:
    """The loss of this rank's part of a batch, or of the whole batch for one rank."""
    torch.manual_seed(1000 + number)
    x = torch.randn(BATCH, WIDTH).chunk(n)[rank].to(next(model.parameters()).device)
    return nn.functional.mse_loss(model(x), x[:, :1].sin())


def one_process(device: torch.device) -> tuple[list[float], list[list[torch.Tensor]]]:
    """The losses of an uninterrupted run, and the parameters after each step."""
    model = make_model(1, device)
    optimizer = adamw(model)
    losses, parameters = [], []
    for number in range(STEPS + 2):
        optimizer.zero_grad()
        loss = loss_of(model, number)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        parameters.append(parameters_of(model))
    return losses, parameters


def step(model: nn.Module, number: int, optimizer: torch.optim.Optimizer | None) -> float:
    """One step on all ranks; return its loss. An engine has its own optimizer, so pass None."""
    n = dist.get_world_size()
    loss = loss_of(model, number, dist.get_rank(), n)
    if optimizer is None:
        model.backward(loss)
        model.step()
    else:
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    mean = loss.detach() / n
    dist.all_reduce(mean)
    return mean.item()


def parameters_of(model: nn.Module) -> list[torch.Tensor]:
    """A copy of all parameters, gathered on every rank."""
    copies = [parameter.detach().clone() for parameter in model.parameters()]
    return [each.full_tensor() if isinstance(each, DTensor) else each for each in copies]


def same(ours: list[torch.Tensor], truth: list[torch.Tensor]) -> bool:
    """Whether all elements are equal up to rounding. One Adam step moves them by about 0.1."""
    pairs = zip(ours, truth, strict=True)
    return all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in pairs)


# --8<-- [start:load]
def universal(device: torch.device) -> deepspeed.DeepSpeedEngine:
    engine = new_engine(make_model(2, device), universal=True)  # "load_universal": true
    engine.load_checkpoint("checkpoint")  # the folder that latest_universal names
    return engine


def without_optimizer(device: torch.device) -> deepspeed.DeepSpeedEngine:
    engine = new_engine(make_model(2, device))
    engine.load_checkpoint("checkpoint", load_optimizer_states=False)
    return engine


def safetensors_into_fsdp2(device: torch.device) -> nn.Module:
    model = make_model(2, device)
    fully_shard(model, mesh=init_device_mesh(device.type, (dist.get_world_size(),)))
    state = get_model_state_dict(model)
    dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader("hub"))
    set_model_state_dict(model, state)
    return model


# --8<-- [end:load]


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
    if sys.argv[1:] not in (["save"], ["load"]):
        sys.exit("say what to do: deepspeed_conversions.py save, then convert, then load")
    if BATCH % int(os.environ.get("WORLD_SIZE", "1")):
        sys.exit(f"the number of ranks must divide the batch of {BATCH}")
    converted = Path("checkpoint/universal").exists() and Path("hub").exists()
    if sys.argv[1] == "load" and not converted:
        sys.exit("there is nothing to load here: save, and convert, as in the transcript")
    device = init_distributed()
    n = dist.get_world_size()
    show = print if dist.get_rank() == 0 else lambda *_: None
    losses, parameters = one_process(device)
    if sys.argv[1] == "save":
        engine = new_engine(make_model(1, device))
        for number in range(STEPS):
            loss = step(engine, number, None)
        assert same(parameters_of(engine), parameters[STEPS - 1])
        engine.save_checkpoint("checkpoint", tag=f"step{STEPS}")
        stage = engine.zero_optimization_stage()
        show(f"stage {stage} on {n} ranks, loss of step {STEPS}: {loss:.4f}")
        show(f"one process, loss of step {STEPS}: {losses[STEPS - 1]:.4f}")
        return

    show(f"{'':31}loss of step {STEPS + 1}  of step {STEPS + 2}")
    show(f"{'one process, never interrupted':31}{losses[-2]:15.4f}  {losses[-1]:10.4f}")
    for load in (universal, without_optimizer, safetensors_into_fsdp2):
        model = load(device)
        assert same(parameters_of(model), parameters[STEPS - 1])
        optimizer = adamw(model) if load is safetensors_into_fsdp2 else None
        first = step(model, STEPS, optimizer)
        assert same(parameters_of(model), parameters[STEPS]) == (load is universal)
        second = step(model, STEPS + 1, optimizer)
        label = f"{load.__name__}, {n} ranks"
        show(f"{label:31}{first:15.4f}  {second:10.4f}")
    try:
        new_engine(make_model(2, device)).load_checkpoint("checkpoint")
    except Exception as error:
        assert "world size" in str(error), error
        text = str(error).replace(". ", ".\n  ")
        show(f"load_checkpoint, not converted: {type(error).__name__}\n  {text}")
    else:
        saved_by = len(list(Path("checkpoint", f"step{STEPS}").glob("*optim_states.pt")))
        assert saved_by == n
        show(f"load_checkpoint, not converted: it loads, on the {n} ranks that saved")


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # DeepSpeed keeps its groups in globals of its modules, to the very end
