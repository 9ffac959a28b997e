"""Step 3: gradients sharded from stage 1 on"""

STEP, HINT = 3, "gradients_stage"


def bytes_held(stage, ranks):
    return {
        "parameters": 4 / ranks if stage == 3 else 4,
        "gradients": 4 / ranks if stage >= 1 else 4,
        "master": 4 / ranks if stage >= 1 else 0,
        "moments": 8 / ranks if stage >= 1 else 8,
    }
