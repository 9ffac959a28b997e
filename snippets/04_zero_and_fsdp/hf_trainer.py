"""The Hugging Face Trainer uses ZeRO stage 3 if you pass one argument. The losses are equal.

The program builds a tiny Llama and a small data set, and downloads nothing. The Trainer
trains twice from the same weights and on the same batches: first with DDP, then with
DeepSpeed's stage 3. The value "auto" in the DeepSpeed configuration means the value of
TrainingArguments. A third run has a batch size that disagrees with TrainingArguments, and the
Trainer refuses it.

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

STEPS, BATCH = 6, 4

# --8<-- [start:zero_3]
ZERO_3 = {
    "train_micro_batch_size_per_gpu": "auto",  # the value of TrainingArguments
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "zero_allow_untested_optimizer": True,  # allows any optimizer; the Trainer sets it, too
}
# --8<-- [end:zero_3]


def losses(data: list[dict], config: dict | None) -> tuple[str, list[float]]:
    """Train a tiny Llama with the Trainer; return the wrapper and the loss of every step."""
    # --8<-- [start:arguments]
    arguments = TrainingArguments(
        output_dir="run",
        deepspeed=config,  # this argument is the only change
        per_device_train_batch_size=BATCH,
        max_steps=STEPS,
        learning_rate=5e-3,
        lr_scheduler_type="constant",
        optim="adamw_torch",
        max_grad_norm=0.5,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=ON_CPU,
        seed=0,
    )
    # --8<-- [end:arguments]
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **shape, **heads))
    trainer = Trainer(model=model, args=arguments, train_dataset=data)
    trainer.remove_callback(PrinterCallback)
    trainer.remove_callback(ProgressCallback)
    trainer.train()
    engine = trainer.model_wrapped
    wrapper = type(engine).__name__
    if isinstance(engine, deepspeed.DeepSpeedEngine):
        wrapper += f", stage {engine.zero_optimization_stage()}"
        for whole in engine.parameters():  # each rank has one part, and the last one is padded
            assert whole.ds_tensor.numel() == -(-whole.ds_numel // dist.get_world_size())
        assert engine.train_micro_batch_size_per_gpu() == BATCH  # "auto" was replaced
        assert engine.gradient_clipping() == 0.5
    return wrapper, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def main() -> None:
    if "LOCAL_RANK" not in os.environ:
        sys.exit("start this with: torchrun --nproc-per-node=2 hf_trainer.py")
    # 64 sequences of 16 tokens; each sequence counts upwards from a different number
    tokens = (torch.arange(64)[:, None] + torch.arange(16)) % 64
    data = [{"input_ids": row, "labels": row} for row in tokens]
    alone, plain = losses(data, None)
    engine, sharded = losses(data, ZERO_3)
    assert alone == "DistributedDataParallel" or dist.get_world_size() == 1
    assert engine == "DeepSpeedEngine, stage 3"
    if dist.get_rank() == 0:
        print("step   Trainer alone (DDP)   with DeepSpeed stage 3")
        for step, (one, other) in enumerate(zip(plain, sharded, strict=True)):
            print(f"{step:4}   {one:19.3f}   {other:22.3f}")
        torch.testing.assert_close(sharded, plain, rtol=2e-3, atol=2e-3)
        assert sharded[-1] < sharded[0] - 0.5
        print("the losses of both runs are equal, and they decrease")
    try:
        losses(data, ZERO_3 | {"train_micro_batch_size_per_gpu": BATCH + 1})
    except ValueError as error:
        refusal = str(error)
    if dist.get_rank() == 0:
        print(f"micro-batch {BATCH + 1} in the configuration, {BATCH} in the arguments:")
        lines = refusal.replace(" that", "\n that", 1).splitlines()
        print("  ValueError: " + "\n  ".join(line.strip() for line in lines))


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # DeepSpeed keeps its groups in globals of its modules, to the very end
