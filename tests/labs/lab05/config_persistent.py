"""Step 1: the threshold is left out"""

STEP, HINT = 1, "persistence"


def make_config(ranks, micro, batch, stage):
    accumulation, rest = divmod(batch, micro * ranks)
    if rest or accumulation == 0:
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
        },
    }
