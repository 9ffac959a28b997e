"""Step 8: an empty folder starts from 0"""

STEP, HINT = 8, "silent_restart"


def resume(engine, folder):
    _, state = engine.load_checkpoint(folder)
    return state.get("step", 0)
