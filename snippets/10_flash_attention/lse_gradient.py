"""This program shows that a merge by log-sum-exp needs the gradient of the log-sum-exp.

A loss on the merged output depends on the scores in two ways: through the output of each part
and through the log-sum-exp (lse) of each part. A backward pass that ignores the lse returns
wrong gradients of Q and K without any error. The merged output and dV are still right.
"""

import torch

S, D = 32, 8


# --8<-- [start:part]
class Part(torch.autograd.Function):
    """Attention over some keys: output [..., s, d] and lse [..., s, 1]."""

    @staticmethod
    def forward(ctx, q, k, v, use_lse_gradient: bool):
        scores = q @ k.mT / q.shape[-1] ** 0.5
        lse = scores.logsumexp(-1, keepdim=True)
        out = torch.exp(scores - lse) @ v
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.use_lse_gradient = use_lse_gradient
        return out, lse

    @staticmethod
    def backward(ctx, d_out, d_lse):
        q, k, v, out, lse = ctx.saved_tensors
        weights = torch.exp(q @ k.mT / q.shape[-1] ** 0.5 - lse)
        dot = (d_out * out).sum(-1, keepdim=True)
        if ctx.use_lse_gradient:
            dot = dot - d_lse  # the derivative of the lse by a score is the weight
        d_scores = weights * (d_out @ v.mT - dot) / q.shape[-1] ** 0.5
        return d_scores @ k, d_scores.mT @ q, weights.mT @ d_out, None


# --8<-- [end:part]


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    inputs = [torch.randn(S, D, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    loss_weights = torch.randn(S, D, dtype=torch.float64)

    def gradients(out: torch.Tensor) -> list[torch.Tensor]:
        return list(torch.autograd.grad((out * loss_weights).sum(), inputs))

    q, k, v = inputs
    truth = gradients(torch.softmax(q @ k.T / D**0.5, -1) @ v)
    for use in (True, False):
        # --8<-- [start:merge]
        first, lse_1 = Part.apply(q, k[:20], v[:20], use)
        second, lse_2 = Part.apply(q, k[20:], v[20:], use)
        lse = torch.logaddexp(lse_1, lse_2)
        out = torch.exp(lse_1 - lse) * first + torch.exp(lse_2 - lse) * second
        # --8<-- [end:merge]
        torch.testing.assert_close(out, torch.softmax(q @ k.T / D**0.5, -1) @ v)
        found = gradients(out)
        off = [(a - b).norm() / b.norm() for a, b in zip(found, truth, strict=True)]
        print(f"the lse's gradient {'used:   ' if use else 'dropped:'} output equal,", end=" ")
        if use:
            assert max(off) < 1e-12
            print("dQ, dK and dV equal")
        else:
            assert min(off[:2]) > 0.01 and off[2] < 1e-12
            assert (found[1] - truth[1]).norm(dim=1).min() > 1e-4  # for the keys of both parts
            print(f"dV equal, dQ off by {100 * off[0]:.0f}%, dK by {100 * off[1]:.0f}%")


if __name__ == "__main__":
    main()
