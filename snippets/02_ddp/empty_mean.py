"""A mean over zero targets: five ways to write it give a NaN loss, and two a NaN gradient.

`cross_entropy` leaves out the positions with the target −100 in backward too, so its gradient
is 0 although its loss is NaN. If you multiply by a mask of your own and divide by its sum, the
gradient is 0 · (1/0), which is NaN. Compare the two columns of the output.
"""

import torch
import torch.nn.functional as F

IGNORED, WORDS = -100, 7


# --8<-- [start:ways]
def built_in(scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(scores, targets)  # ignore_index=-100 is the default


def sum_over_count(scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(scores, targets, reduction="sum") / (targets != IGNORED).sum()


def selected(scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    losses = F.cross_entropy(scores, targets, reduction="none")
    return losses[targets != IGNORED].mean()


def masked(scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    mask = (targets != IGNORED).float()
    losses = F.cross_entropy(scores, targets.clamp(min=0), reduction="none")
    return (losses * mask).sum() / mask.sum()


def masked_log_probabilities(scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    mask = (targets != IGNORED).float()
    words = targets.clamp(min=0).unsqueeze(1)
    log_p = scores.log_softmax(1).gather(1, words).squeeze(1)  # as in many losses for RL
    return -(log_p * mask).sum() / mask.sum()


# --8<-- [end:ways]


def try_out(way, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss, and the norm of the gradient of the scores."""
    scores = torch.randn(len(targets), WORDS, generator=torch.Generator().manual_seed(0))
    scores.requires_grad_()
    loss = way(scores, targets)
    loss.backward()
    return loss.detach(), scores.grad.norm()


def main() -> None:
    some, none = torch.tensor([3, IGNORED, 0, 5]), torch.full((4,), IGNORED)
    print(f"{'without a target':24}  loss  gradient norm")
    for way in (built_in, sum_over_count, selected, masked, masked_log_probabilities):
        loss, norm = try_out(way, none)
        print(f"{way.__name__:24}  {loss.item():4}  {norm.item()}")
        assert loss.isnan()
        assert norm == 0 if way in (built_in, sum_over_count, selected) else norm.isnan()
        torch.testing.assert_close(try_out(way, some), try_out(built_in, some))  # the control


if __name__ == "__main__":
    main()
