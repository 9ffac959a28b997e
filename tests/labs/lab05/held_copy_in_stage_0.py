"""Step 3: a copy in stage 0"""

STEP, HINT = 3, "master_stage0"


def bytes_held(stage, ranks):
    return {
        "parameters": 4 / ranks if stage == 3 else 4,
        "gradients": 4 / ranks if stage >= 2 else 4,
        "master": 4 / ranks if stage >= 1 else 4,
        "moments": 8 / ranks if stage >= 1 else 8,
    }
