"""Step 3: parameters sharded from stage 2 on"""

STEP, HINT = 3, "parameters_stage"


def bytes_held(stage, ranks):
    return {
        "parameters": 4 / ranks if stage >= 2 else 4,
        "gradients": 4 / ranks if stage >= 2 else 4,
        "master": 4 / ranks if stage >= 1 else 0,
        "moments": 8 / ranks if stage >= 1 else 8,
    }
