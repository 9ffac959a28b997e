"""Failure: an input is always zero, or there is too little text, so H has no inverse."""

import sys

import torch

K = 64


def factor(h: torch.Tensor) -> torch.Tensor:
    return torch.linalg.cholesky(torch.linalg.inv(h), upper=True)


# --8<-- [start:fix]
def prepared(
    h: torch.Tensor, w: torch.Tensor, damping=0.01
) -> tuple[torch.Tensor, torch.Tensor]:
    """Give dead inputs a weight of 0, and add to the diagonal, so that H has an inverse."""
    h, w = h.clone(), w.clone()
    dead = h.diagonal() == 0
    h[dead, dead] = 1
    w[:, dead] = 0
    return h + damping * h.diagonal().mean() * torch.eye(len(h)), w


# --8<-- [end:fix]


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dead = torch.randn(512, K)
    dead[:, 5] = 0
    dead[:, 9] *= 1e-3  # small, but not dead: it keeps its weight
    inputs = {"a dead channel": dead, "48 rows for 64 inputs": torch.randn(48, K)}
    w = torch.randn(8, K)
    for name, x in inputs.items():
        h = x.T @ x
        try:
            torch.linalg.cholesky(h)
            sys.exit(f"{name} was expected to fail")
        except torch.linalg.LinAlgError as error:
            print(f"{name}: {str(error).split('(')[0].strip()}")
        fixed, kept = prepared(h, w)
        assert torch.equal(h, x.T @ x)  # the fix returns a copy
        upper = factor(fixed)
        torch.testing.assert_close(upper.T @ upper @ fixed, torch.eye(K), atol=1e-3, rtol=0)
        torch.testing.assert_close(x @ kept.T, x @ w.T)  # a dead input needs no weight
        added = (fixed - h).diagonal()[h.diagonal() > 0] / h.diagonal().mean()
        assert (added - 0.01).abs().max() < 1e-4  # 1%, independent of the size of the inputs
        zeros = kept.eq(0).any(0).nonzero().flatten().tolist()
        assert zeros == ([5] if name == "a dead channel" else [])
    factor(prepared(dead.T @ dead, w, damping=0)[0])  # a dead input needs no damping
    try:  # fewer rows than inputs need damping
        factor(prepared(h, w, damping=0)[0])
        sys.exit("48 rows without damping were expected to fail")
    except torch.linalg.LinAlgError:
        pass
    print("with the fix for dead inputs and 1% on the diagonal, both have a factor")
    try:
        factor(dead.T @ dead)
        sys.exit("this was expected to fail")
    except torch.linalg.LinAlgError as error:
        print(f"without: {str(error).split(',')[0]}")


if __name__ == "__main__":
    main()
