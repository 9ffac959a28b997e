"""Step 1: no micro-batch at all is not noticed"""

STEP, HINT = 1, "not_divisible"


def make_config(ranks, micro, batch, stage):
    accumulation = batch // (micro * ranks)
    if batch % (micro * accumulation if accumulation else 1):
        raise ValueError("it does not divide")
    layer = WIDTH * WIDTH  # noqa: F821
    return {
        "train_batch_size": batch,
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
