"""DeepSpeed's configuration, checked before a job waits for GPUs: what it fills in and rejects.

Three numbers must agree: train_batch_size = micro-batch × accumulation steps × ranks. Give two
of them, and the third follows. Keys inside zero_optimization are checked; a misspelt key at the
top level is not, so the last part compares those with the names that DeepSpeed itself knows.

Needs: pip install deepspeed. One process, no GPU.
"""

import json
import logging
import os
import sys
import warnings

logging.disable(logging.WARNING)  # DeepSpeed logs to stdout, with the date
warnings.simplefilter("ignore")
os.environ.setdefault("DS_ACCELERATOR", "cpu")  # reading a configuration needs no GPU

try:
    from deepspeed import comm
    from deepspeed.runtime import constants
    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
except ImportError:
    sys.exit("this program needs: pip install deepspeed")

RANKS = 8

# --8<-- [start:config]
CONFIG = """
{
  "train_micro_batch_size_per_gpu": 4,
  "gradient_accumulation_steps": 2,
  "gradient_clipping": 1.0,
  "steps_per_print": 100,
  "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "weight_decay": 0.1}},
  "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 1000}},
  "bf16": {"enabled": true},
  "zero_optimization": {
    "stage": 3,
    "overlap_comm": true,
    "reduce_bucket_size": 50000000,
    "stage3_prefetch_bucket_size": 50000000,
    "stage3_param_persistence_threshold": 100000,
    "stage3_max_live_parameters": 1000000000,
    "stage3_gather_16bit_weights_on_model_save": true,
    "offload_optimizer": {"device": "cpu", "pin_memory": true}
  }
}
"""
# --8<-- [end:config]


def read(config: dict) -> DeepSpeedConfig:
    """What DeepSpeed makes of a configuration on RANKS ranks, none of which has started."""
    comm.get_rank, comm.get_world_size = lambda: 0, lambda: RANKS
    return DeepSpeedConfig(config)


# --8<-- [start:unknown_keys]
def unknown_keys(config: dict) -> list[str]:
    """Top-level keys that DeepSpeed's main list lacks: misspelt, or those of a plug-in."""
    known = {value for value in vars(constants).values() if isinstance(value, str)}
    known |= {"zero_optimization", "activation_checkpointing", "aio", "amp", "compile"}
    known |= {"elasticity", "flops_profiler", "tensorboard", "wandb", "csv_monitor", "comet"}
    return [key for key in config if key not in known]


# --8<-- [end:unknown_keys]


def main() -> None:
    if len(sys.argv) > 1:
        sys.exit("start this with: python deepspeed_config.py")
    config = json.loads(CONFIG)
    read_back = read(config)
    micro, steps = (
        config["train_micro_batch_size_per_gpu"],
        config["gradient_accumulation_steps"],
    )
    filled = read_back.train_batch_size
    print(f"filled in: train_batch_size {filled} = {micro} × {steps} × {RANKS} ranks")
    for name, default in (
        ("reduce_bucket_size", DeepSpeedZeroConfig().reduce_bucket_size),
        ("stage3_prefetch_bucket_size", DeepSpeedZeroConfig().prefetch_bucket_size),
        (
            "stage3_param_persistence_threshold",
            DeepSpeedZeroConfig().param_persistence_threshold,
        ),
    ):
        print(f"default of {name}: {default:,} elements")

    assert unknown_keys({"wandb": {}, "wanbd": {}}) == ["wanbd"]

    wrong = {
        "batch sizes that disagree": {"train_batch_size": 128},
        "no batch size": {"train_micro_batch_size_per_gpu": None},
        "fp16 and bf16": {"fp16": {"enabled": True}},
        "a stage that is none": {"zero_optimization": {"stage": 4}},
        "a misspelt key of ZeRO": {"zero_optimization": {"stage": 3, "overlap_com": True}},
    }
    for what, change in wrong.items():
        try:
            read(config | change)
        except Exception as error:
            lines = str(error).replace("micro_batch_per_gpu", "\n  micro_batch_per_gpu", 1)
            print(f"\n{what}: {type(error).__name__}")
            kept = [line for line in lines.splitlines() if "For further" not in line]
            print("\n".join(f"  {line.strip()}" for line in kept))
        else:
            raise AssertionError(f"{what} was accepted")

    misspelt = config | {"zero_optimisation": config["zero_optimization"]}
    del misspelt["zero_optimization"]
    print("\na misspelt key at the top level (s for z): no error")
    print(f"  ZeRO stage {read(misspelt).zero_config.stage}, where 3 was meant")
    print(f"  unknown_keys: {unknown_keys(misspelt)}; of the right one: {unknown_keys(config)}")


if __name__ == "__main__":
    main()
