"""The Hugging Face Trainer with a DeepSpeed configuration: ZeRO by one argument, same losses.

A tiny Llama and a small data set are made on the spot; nothing is downloaded. The Trainer is
run twice from the same weights, without DeepSpeed and with stage 3, on the same batches in the
same order. "auto" in the configuration means: take what TrainingArguments says.

Needs: pip install transformers accelerate deepspeed
"""

import logging
import os
import sys
import warnings

import torch
import torch.distributed as dist
import torch.distributed.nn  # not left to torch: imported after init, it keeps the group alive

logging.disable(logging.WARNING)  # DeepSpeed logs to stdout, with the date
warnings.simplefilter("ignore")
ON_CPU = torch.accelerator.device_count() < int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
if ON_CPU:  # too few accelerators for all ranks; DeepSpeed asks when imported
    os.environ["DS_ACCELERATOR"] = "cpu"
os.environ["HF_HUB_OFFLINE"] = "1"  # nothing here is downloaded

try:
    import deepspeed
    import deepspeed.ops
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
    from transformers.trainer_callback import PrinterCallback, ProgressCallback
except ImportError:
    sys.exit("this program needs: pip install transformers accelerate deepspeed")
# on a CPU, DeepSpeed would compile an all-reduce for inference, which training does not use
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

STEPS, BATCH = 8, 4

# --8<-- [start:trainer]
ZERO_3 = {
    "train_micro_batch_size_per_gpu": "auto",  # auto: from TrainingArguments
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "zero_allow_untested_optimizer": True,  # any that `optim` names; the Trainer sets it, too
}


def losses(data: list[dict], config: dict | None) -> tuple[int, list[float]]:
    """Train a tiny Llama with the Trainer; return ZeRO's stage and the loss of every step."""
    arguments = TrainingArguments(
        output_dir="run",
        deepspeed=config,  # the whole integration
        per_device_train_batch_size=BATCH,
        max_steps=STEPS,
        learning_rate=5e-3,
        lr_scheduler_type="constant",
        optim="adamw_torch",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=ON_CPU,
        seed=0,
    )
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **shape, **heads))
    trainer = Trainer(model=model, args=arguments, train_dataset=data)
    trainer.remove_callback(PrinterCallback)
    trainer.remove_callback(ProgressCallback)
    trainer.train()
    engine = trainer.model_wrapped
    assert isinstance(engine, deepspeed.DeepSpeedEngine) == trainer.is_deepspeed_enabled
    stage = engine.zero_optimization_stage() if trainer.is_deepspeed_enabled else 0
    return stage, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


# --8<-- [end:trainer]


def main() -> None:
    if "LOCAL_RANK" not in os.environ:
        sys.exit("start this with: torchrun --nproc-per-node=2 hf_trainer.py")
    # sequences that count upwards from anywhere: 64 of them, 16 tokens each
    tokens = (torch.arange(64)[:, None] + torch.arange(16)) % 64
    data = [{"input_ids": row, "labels": row} for row in tokens]
    none, plain = losses(data, None)
    stage, sharded = losses(data, ZERO_3)
    assert (none, stage) == (0, 3)
    if dist.get_rank() == 0:
        print("step   Trainer alone (DDP)   with DeepSpeed stage 3")
        for step, (one, other) in enumerate(zip(plain, sharded, strict=True)):
            print(f"{step:4}   {one:19.3f}   {other:22.3f}")
        torch.testing.assert_close(sharded, plain, rtol=2e-3, atol=2e-3)
        assert sharded[-1] < sharded[0] - 0.5
        print("equal, and falling")


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # DeepSpeed keeps its groups in globals of its modules, to the very end
