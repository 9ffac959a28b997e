"""Step 1: train_batch_size of one rank"""

STEP, HINT = 1, "batch_global"


def make_config(ranks, micro, batch, stage):
    accumulation, rest = divmod(batch, micro * ranks)
    if rest or accumulation == 0:
        raise ValueError("it does not divide")
    layer = WIDTH * WIDTH  # noqa: F821
    return {
        "train_batch_size": batch // ranks,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": CLIP,  # noqa: F821
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": layer,
            "stage3_prefetch_bucket_size": layer,
            "stage3_param_persistence_threshold": 0,
        },
    }
