"""Step 8: load_universal at the top"""

STEP, HINT = 8, "universal_key"


def universal(config):
    return config | {"load_universal": True}
