"""Step 2: no optimizer for the engine"""

import deepspeed

STEP, HINT = 2, "optimizer_missing"


def make_engine(config, device="cpu"):
    model = build_model(device)  # noqa: F821
    engine, *_ = deepspeed.initialize(model=model, config=config)
    return engine
