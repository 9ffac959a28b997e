"""Nothing is ever whole."""

STEP, HINT = 7, "gathered"


def budget(config: Config, stage: int) -> dict[str, int]:
    """Bytes that a rank of this stage may need at most, by what they are for."""
    h, v, s, b = config.hidden, config.vocabulary, config.sequence, config.micro
    item, layers = config.dtype.itemsize, len(layers_of_stage(config, stage))
    first, last = stage == 0, stage == config.pp - 1
    block = 12 * h * h // config.tp + 4 * h
    ends = (first + last) * v * h // config.tp + 2 * h * last
    state = 16 * (layers * block + ends) // config.dp
    # without a pipeline two blocks at once, and the ends; with it all, for the whole step
    whole = layers * block
    gathered = whole * (2 * item + 4)  # weight and gradient, and the gradient to be reduced
    live = min(config.micro_batches, config.pp - stage) if config.pp > 1 else 1
    stream = b * s * h // config.tp  # the residual stream of one micro-batch
    per_block = 1 if config.recompute else 24 + 4 * config.tp
    kept = live * layers * stream * per_block * item
    # one block as backward has it, and gradients of the same shapes
    working = 2 * (24 + 4 * config.tp) * stream * item
    logits = 4 * b * s * v * 4 * last
    parts = {"state": state, "gathered": gathered, "kept": kept, "block": working}
    return parts | {"logits": logits, "gathered": 0, "block": 0}
