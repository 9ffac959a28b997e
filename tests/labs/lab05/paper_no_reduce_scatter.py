"""Step 5: reduce_scatter off"""

STEP, HINT = 5, "paper_scatter"


def as_in_the_paper(config):
    zero = config["zero_optimization"] | {
        "reduce_scatter": False,
        "stage3_max_reuse_distance": 0,
        "stage3_max_live_parameters": 0,
    }
    return config | {"zero_optimization": zero}
