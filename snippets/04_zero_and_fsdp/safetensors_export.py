"""A sharded model becomes a Hugging Face folder of safetensors, made in two ways.

The program makes a tiny Llama, shards it over the ranks and exports it:

gathered: the full state dict on rank 0, and save_pretrained, which writes model.safetensors and
config.json. Rank 0 needs host memory for the whole model.

consolidated: with DCP's HuggingFaceStorageWriter every rank writes its own shards as
safetensors, and the files are joined on disk. No rank has the whole model.

Look at the keys: with both folders, transformers finds no missing and no unexpected key.

Needs: pip install transformers safetensors
"""

import logging
import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

os.environ["HF_HUB_OFFLINE"] = "1"  # nothing here is downloaded
logging.disable(logging.WARNING)  # messages of imported libraries

try:
    from safetensors import safe_open
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
    from transformers.utils.logging import disable_progress_bar
except ImportError:
    sys.exit("this program needs: pip install transformers safetensors")

CONFIG = LlamaConfig(
    vocab_size=128,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    tie_word_embeddings=False,
    bos_token_id=1,
    eos_token_id=2,
)


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
    rank, mesh = dist.get_rank(), init_device_mesh(device.type, (dist.get_world_size(),))
    disable_progress_bar()
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG).to(device)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    tokens = torch.arange(16).reshape(2, 8).to(device)  # [b, s]
    with torch.no_grad():
        expected = model(tokens).logits.cpu()

    # --8<-- [start:export]
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    whole = get_model_state_dict(model, options=options)  # every rank calls it
    if rank == 0:
        with torch.device("meta"):  # names and config, but no memory for parameters
            shell = LlamaForCausalLM(CONFIG)
        shell.save_pretrained("gathered", state_dict=whole)

    writer = dcp.HuggingFaceStorageWriter(
        "consolidated", save_distributed=True, enable_consolidation=True
    )
    dcp.save(get_model_state_dict(model), storage_writer=writer)
    if rank == 0:
        CONFIG.architectures = ["LlamaForCausalLM"]
        CONFIG.save_pretrained("consolidated")
    # --8<-- [end:export]
    dist.barrier()

    if rank == 0:
        assert all(isinstance(p, DTensor) for p in model.parameters())
        assert all(p.is_meta for p in shell.parameters())
        for folder in ("gathered", "consolidated"):
            files = sorted(name for name in os.listdir(folder) if name != "sharded")
            print(f"{folder}: {', '.join(files)}")
            loaded, report = AutoModelForCausalLM.from_pretrained(
                folder, output_loading_info=True
            )
            assert not report["missing_keys"] and not report["unexpected_keys"], report
            torch.testing.assert_close(loaded(tokens.cpu()).logits, expected)
            (file,) = (name for name in files if name.endswith(".safetensors"))
            with safe_open(f"{folder}/{file}", framework="pt") as tensors:
                names = sorted(tensors.keys())
                shape = tensors.get_slice("model.embed_tokens.weight").get_shape()
            print(f"  {type(loaded).__name__}: no key missing or unexpected, logits equal")
            print(f"  {len(names)} tensors, model.embed_tokens.weight {shape}")
        shards = sorted(name for name in os.listdir("consolidated/sharded") if "shard" in name)
        assert len(shards) == mesh.size()
        for name in shards:
            with safe_open(f"consolidated/sharded/{name}", framework="pt") as tensors:
                shape = tensors.get_slice("model.embed_tokens.weight").get_shape()
            print(f"  sharded/{name}: rows of one rank, {shape}")


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # DTensor's caches hold the mesh, which holds the group, to the very end
