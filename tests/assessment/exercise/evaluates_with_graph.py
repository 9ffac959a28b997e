"""Step 22: evaluation keeps a graph"""

STEP, HINT = 22, "eval_graph"


def evaluate(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    model.eval()
    loss = loss_of(model, images, labels)
    model.train()
    return loss.detach()
