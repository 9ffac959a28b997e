"""peft's LoRA and QLoRA equal the layers written by hand, with DDP and with FSDP2.

peft finds layers by class or by name and wraps them. For QLoRA it wraps an nn.Linear that
stores codes. Add the adapters first, and call DDP or fully_shard after that. Before you save
a sharded adapter, all ranks must gather it. The output also shows the error of a save without
this gather, and the shape of an adapter that was added to a layer that fully_shard had
already sharded.

Needs: pip install peft
"""

import copy
import logging
import os
import sys
import tempfile
import warnings

import lora  # lora.py in the same folder: the layers written by hand
import torch
import torch.distributed as dist
from lora import ALPHA, BATCH, LAYERS, STEPS, H, R
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

logging.disable(logging.WARNING)  # packages that peft imports warn about missing GPU kernels
warnings.simplefilter("ignore")
os.environ["HF_HUB_OFFLINE"] = "1"  # nothing here is downloaded

try:
    from peft import LoraConfig, PeftModel, get_peft_model
except ImportError:
    sys.exit("this program needs: pip install peft")


# --8<-- [start:peft]
class NF4Linear(nn.Linear):
    """A frozen layer that stores codes and scales. peft accepts it because it is an nn.Linear.

    Do not merge adapters into it. peft would add them to a decoded copy, which is then lost.
    """

    def __init__(self, linear: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        codes, scales = lora.encode(linear.weight.detach())
        self.codes = nn.Parameter(codes, requires_grad=False)
        self.scales = nn.Parameter(scales, requires_grad=False)
        self.bias = linear.bias
        self.requires_grad_(False)

    @property
    def weight(self) -> torch.Tensor:  # peft reads its device
        return lora.decode(self.codes, self.scales)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return lora.DecodedProduct.apply(x, self.codes, self.scales, self.bias)


def with_peft(model: nn.Sequential) -> PeftModel:
    """Freeze `model` and wrap its linear layers in place."""
    every = LoraConfig(r=R, lora_alpha=ALPHA, target_modules="all-linear")
    return get_peft_model(model, every)


# --8<-- [end:peft]
def frozen(four_bits: bool) -> nn.Sequential:
    torch.manual_seed(0)
    linears = [nn.Linear(H, H, bias=False) for _ in range(LAYERS)]
    return nn.Sequential(
        *(nn.Sequential(NF4Linear(x) if four_bits else x, nn.GELU()) for x in linears)
    )


def by_hand(four_bits: bool) -> nn.Sequential:
    """The layers of lora.py. With `four_bits`, their frozen weights are the decoded codes."""
    model = frozen(four_bits=False)
    torch.manual_seed(1)
    for block in model:
        if four_bits:
            exact = block[0].weight.data
            exact.copy_(lora.decode(*lora.encode(exact)))
        block[0] = lora.LoRALinear(block[0])
    return model


def adapters(model: nn.Module) -> list[torch.Tensor]:
    """Return the whole A and B of every layer; all ranks must call this."""
    trained = (p.detach() for p in model.parameters() if p.requires_grad)
    return [p.full_tensor() if isinstance(p, DTensor) else p for p in trained]


# --8<-- [start:save]
def save(model: PeftModel, folder: str) -> None:
    """Gather A and B of a model that fully_shard has sharded, and write them from rank 0."""
    shards = {name: x for name, x in model.state_dict().items() if "lora_" in name}
    whole = {name: x.full_tensor().cpu() for name, x in shards.items()}  # all ranks
    if dist.get_rank() == 0:
        model.save_pretrained(folder, state_dict=whole)


# --8<-- [end:save]
def main() -> None:
    if R % int(os.environ.get("WORLD_SIZE", "1")):
        sys.exit(f"for even shards the number of ranks must divide {R}, the rows of A")
    if torch.__version__ < "2.12":
        sys.exit("fully_shard takes parameters of bytes since torch 2.12, and this is older")
    device = lora.init_distributed()
    rank, n = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(device.type, (n,), mesh_dim_names=("dp",))
    torch.manual_seed(2)
    batches = [torch.randn(BATCH, H).to(device) for _ in range(STEPS)]
    ours = [x[rank::n] for x in batches]
    lines = [f"N = {n}; KiB on a rank   parameters  trained"]
    for name, four_bits in (("LoRA", False), ("QLoRA", True)):
        hand = by_hand(four_bits).to(device)
        alone = with_peft(frozen(four_bits).to(device))
        with torch.no_grad():  # peft initializes A differently, so copy A
            for mine, truth in zip(adapters(alone), adapters(hand), strict=True):
                mine.copy_(truth)
        models = {"one process": alone,
                  "DDP": DistributedDataParallel(copy.deepcopy(alone)),
                  "FSDP2": copy.deepcopy(alone)}  # fmt: skip
        lora.shard(models["FSDP2"].get_base_model(), mesh)
        expected, _ = lora.train(hand, batches)
        for layout, model in models.items():
            losses, _ = lora.train(model, batches if layout == "one process" else ours)
            for mine, truth in zip(losses, expected, strict=True):
                dist.all_reduce(mine)
                torch.testing.assert_close(mine / n, truth)
            for mine, truth in zip(adapters(model), adapters(hand), strict=True):
                torch.testing.assert_close(mine, truth)
            stored = sum(lora.local(x).nbytes for x in model.parameters())
            trained = sum(lora.local(x).nbytes for x in model.parameters() if x.requires_grad)
            psi, cut = LAYERS * H * H, n if layout == "FSDP2" else 1
            assert trained == 4 * LAYERS * 2 * R * H / cut
            assert stored == trained + (psi / 2 + psi / 16 if four_bits else 4 * psi) / cut
            lines.append(f"{name:6} {layout:12}{stored / 1024:16.1f}{trained / 1024:9.1f}")

    with tempfile.TemporaryDirectory() as folder:
        try:
            model.save_pretrained(folder)
        except RuntimeError as error:
            refused = str(error)
        save(model, folder)
        if rank == 0:  # load QLoRA's adapters into a new base model
            again = frozen(four_bits).to(device)
            again = PeftModel.from_pretrained(again, folder, is_trainable=True)
            torch.testing.assert_close(adapters(again), adapters(hand))
            size = os.path.getsize(f"{folder}/adapter_model.safetensors")
    late = with_peft(lora.shard(frozen(False).to(device), mesh))  # in the wrong order
    b = dict(late.named_parameters())["base_model.model.0.0.lora_B.default.weight"]
    assert b.shape == (H // n, R) and not isinstance(b, DTensor)
    if rank == 0:
        print("\n".join(lines))
        print("losses and adapters of 3 steps: equal to those of the layers written by hand")
        print(f"save_pretrained without a gather: {refused}")
        print(f"gathered, saved as {size:,} bytes, and loaded again: equal")
        print(f"peft after fully_shard: B has the shape {list(b.shape)} instead of {[H, R]}")


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # DTensor's caches hold the mesh, which holds the group, to the very end
