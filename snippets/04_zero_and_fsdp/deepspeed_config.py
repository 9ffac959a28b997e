"""Check a DeepSpeed configuration on a laptop, before a job waits for GPUs.

Three numbers must agree: train_batch_size = micro-batch × accumulation steps × ranks. If you
give two of them, DeepSpeed computes the third one. DeepSpeed rejects a misspelt key inside
zero_optimization, and it ignores a misspelt key at the top level. The function unread_keys
finds such a key: it lets DeepSpeed read the configuration and returns the keys that were
never read. The output shows the computed batch size, some defaults, and the error for each
mistake.

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
    """Parse a configuration as if RANKS ranks were running. The program starts none."""
    comm.get_rank, comm.get_world_size = lambda: 0, lambda: RANKS
    return DeepSpeedConfig(config)


# --8<-- [start:unread_keys]
class Recorder(dict):
    """A configuration that records which of its top-level keys are read."""

    def __init__(self, config: dict) -> None:
        super().__init__(config)
        self.reads: set[str] = set()

    def __contains__(self, key: str) -> bool:
        self.reads.add(key)
        return super().__contains__(key)

    def __getitem__(self, key: str):
        self.reads.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default=None):
        self.reads.add(key)
        return super().get(key, default)


def unread_keys(config: dict) -> list[str]:
    """The top-level keys that neither DeepSpeedConfig nor deepspeed.initialize reads."""
    recorder = Recorder(config)
    read(recorder)
    if "sequence_parallel_size" in config:  # then deepspeed.initialize reads both sizes
        recorder.reads.add("data_parallel_size")
    return [key for key in config if key not in recorder.reads]


# --8<-- [end:unread_keys]


def main() -> None:
    if len(sys.argv) > 1:
        sys.exit("start this with: python deepspeed_config.py")
    config = json.loads(CONFIG)
    micro, steps = (
        config["train_micro_batch_size_per_gpu"],
        config["gradient_accumulation_steps"],
    )
    batch = read(config).train_batch_size
    assert batch == micro * steps * RANKS
    print(f"computed: train_batch_size {batch} = {micro} × {steps} × {RANKS} ranks")
    zero = DeepSpeedZeroConfig(offload_optimizer={"device": "cpu"})
    for name, default in (
        ("reduce_bucket_size", zero.reduce_bucket_size),
        ("stage3_prefetch_bucket_size", zero.prefetch_bucket_size),
        ("stage3_param_persistence_threshold", zero.param_persistence_threshold),
    ):
        print(f"default of {name}: {default:,} elements")
    overlap = [stage for stage in range(4) if DeepSpeedZeroConfig(stage=stage).overlap_comm]
    print(f"default of overlap_comm: true in stage {', '.join(map(str, overlap))} only")
    print(f"default of pin_memory: {str(zero.offload_optimizer.pin_memory).lower()}")

    wrong = {
        "batch sizes that disagree": {"train_batch_size": 128},
        "no batch size": {"train_micro_batch_size_per_gpu": None},
        "fp16 and bf16": {"fp16": {"enabled": True}},
        "a stage that does not exist": {"zero_optimization": {"stage": 4}},
        "a misspelt key of ZeRO": {"zero_optimization": {"stage": 3, "overlap_com": True}},
    }
    for mistake, change in wrong.items():
        try:
            read(config | change)
        except Exception as error:
            lines = str(error).replace("micro_batch_per_gpu", "\n  micro_batch_per_gpu", 1)
            print(f"\n{mistake}: {type(error).__name__}")
            shown = [line for line in lines.splitlines() if "For further" not in line]
            print("\n".join(f"  {line.strip()}" for line in shown))
        else:
            raise AssertionError(f"{mistake}: DeepSpeed accepted it")

    assert unread_keys(config | {"tensor_parallel": {}, "wandb": {}}) == []  # valid keys
    sizes = {"data_parallel_size": RANKS // 2, "sequence_parallel_size": 2}
    assert unread_keys(config | sizes) == []
    del sizes["sequence_parallel_size"]  # alone, the other size has no effect
    assert unread_keys(config | sizes) == ["data_parallel_size"]
    # valid names in a wrong place: they belong to an inner block
    assert unread_keys(config | {"stage": 3, "enabled": True}) == ["stage", "enabled"]
    print("\nmisspelt keys at the top level: no error")
    no_zero = config | {"zero_optimisation": config["zero_optimization"]}
    del no_zero["zero_optimization"]
    no_clip = config | {"gradient_cliping": 0.5}
    del no_clip["gradient_clipping"]
    stage, limit = read(no_zero).zero_config.stage, read(no_clip).gradient_clipping
    assert (read(config).zero_config.stage, stage, limit) == (3, 0, 1.0)
    print(f"  zero_optimisation: ZeRO stage {stage} in place of 3")
    print(f"  gradient_cliping 0.5: gradients are clipped to a norm of {limit}")
    assert unread_keys(config) == []
    print(f"keys that DeepSpeed never read: {unread_keys(no_zero) + unread_keys(no_clip)}")


if __name__ == "__main__":
    main()
