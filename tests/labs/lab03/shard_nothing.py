"""Step 5: nothing is wrapped"""

STEP, HINT = 5, "not_wrapped"


def shard_model(model):
    return model, make_adam(list(model.parameters()))  # noqa: F821
