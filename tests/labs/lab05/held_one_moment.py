"""Step 3: one moment"""

STEP, HINT = 3, "moments_two"


def bytes_held(stage, ranks):
    return {
        "parameters": 4 / ranks if stage == 3 else 4,
        "gradients": 4 / ranks if stage >= 2 else 4,
        "master": 4 / ranks if stage >= 1 else 0,
        "moments": 4 / ranks if stage >= 1 else 4,
    }
