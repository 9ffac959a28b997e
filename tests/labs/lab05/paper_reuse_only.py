"""Step 5: one of the two limits of stage 3"""

STEP, HINT = 5, "paper_release"


def as_in_the_paper(config):
    zero = config["zero_optimization"] | {
        "use_multi_rank_bucket_allreduce": False,
        "stage3_max_live_parameters": 0,
    }
    return config | {"zero_optimization": zero}
