"""Step 2: all that initialize returns"""

import deepspeed

STEP, HINT = 2, "engine_first"


def make_engine(config, device="cpu"):
    model = build_model(device)  # noqa: F821
    optimizer = build_optimizer(model)  # noqa: F821
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)
