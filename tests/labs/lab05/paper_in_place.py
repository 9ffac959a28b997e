"""Step 5: the inner block is changed"""

STEP, HINT = 5, "config_changed"


def as_in_the_paper(config):
    zero = config["zero_optimization"]
    zero |= {
        "use_multi_rank_bucket_allreduce": False,
        "stage3_max_reuse_distance": 0,
        "stage3_max_live_parameters": 0,
    }
    return config | {"zero_optimization": zero}
