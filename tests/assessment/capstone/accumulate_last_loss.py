"""The loss of the last micro-batch."""

STEP, HINT = 5, "loss_value"


def accumulate(config: Config, model: GPT, rows: torch.Tensor) -> torch.Tensor:
    """Forward and backward of all micro-batches, without a pipeline; the mean loss of `rows`.

    Gradients are reduced over dp after each micro-batch: no rank ever holds them whole.
    """
    total = torch.zeros((), device=rows.device)
    for part in rows.split(config.micro):
        loss = loss_of(model(part[:, :-1]), part[:, 1:]) / config.micro_batches
        loss.backward()
        total = loss.detach()
    return total
