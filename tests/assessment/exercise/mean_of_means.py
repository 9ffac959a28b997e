"""Step 1: a mean of means over batches of 60 and 4"""

STEP, HINT = 1, "unseen"


def evaluate(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The mean loss over the validation samples, still on the device."""
    with torch.no_grad():
        parts = zip(images.split(60), labels.split(60), strict=True)
        return torch.stack([loss_of(model, x, y) for x, y in parts]).mean()
