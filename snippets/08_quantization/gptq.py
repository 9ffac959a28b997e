"""GPTQ from scratch: round a column, and compensate its error in the columns not yet rounded.

After Frantar et al., GPTQ (2022). The goal is a small error of the layer's output,
|Xwᵀ - Xŵᵀ|², whose Hessian for each row of weights is 2XᵀX. `slow` is the plain rule with an
inverse for each column. `gptq` uses one Cholesky factorization and gives the same weights. The
program predicts both errors from Δ²/12: the error of rounding to nearest from the diagonal of
XᵀX, and the error of GPTQ from the diagonal of the Cholesky factor.
"""

import time

import torch

SAMPLES, K, N = 2048, 256, 256  # calibration rows, inputs, outputs


# --8<-- [start:grid]
def grid(w: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the scale of each output: [n, k] -> [n, 1]."""
    return w.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 0.5)


def to_grid(w: torch.Tensor, scale: torch.Tensor, bits: int) -> torch.Tensor:
    """Round to the nearest of 2^bits levels around zero; zero is not a level."""
    top = 2 ** (bits - 1) - 0.5
    return ((w / scale - 0.5).round() + 0.5).clamp(-top, top) * scale


# --8<-- [end:grid]


# --8<-- [start:slow]
def slow(w: torch.Tensor, h: torch.Tensor, bits: int) -> torch.Tensor:
    """Round column 0, move the others to compensate its error, drop column 0, and repeat."""
    w, scale, done = w.clone(), grid(w, bits), []
    for _ in range(w.shape[1]):
        inverse = torch.linalg.inv(h)
        q = to_grid(w[:, :1], scale, bits)
        step = (w[:, :1] - q) / inverse[0, 0]  # [n, 1]
        w = (w - step * inverse[:1])[:, 1:]
        h = h[1:, 1:]
        done.append(q)
    return torch.cat(done, 1)


# --8<-- [end:slow]


# --8<-- [start:gptq]
def gptq(w: torch.Tensor, h: torch.Tensor, bits: int, block=64) -> torch.Tensor:
    """The same in one pass: w [n, k], h = XᵀX [k, k] -> quantized w.

    Row i of the upper Cholesky factor of h⁻¹ is row 0 of the inverse that `slow` computes at
    column i, divided by the root of its first entry.
    """
    w, scale = w.clone(), grid(w, bits)
    upper = torch.linalg.cholesky(torch.linalg.inv(h), upper=True)
    for start in range(0, w.shape[1], block):
        stop = min(start + block, w.shape[1])
        steps = []
        for i in range(start, stop):
            q = to_grid(w[:, i : i + 1], scale, bits)
            steps.append((w[:, i : i + 1] - q) / upper[i, i])
            w[:, i + 1 : stop] -= steps[-1] * upper[i, i + 1 : stop]
            w[:, i : i + 1] = q
        # the columns after the block receive all its changes in one product
        w[:, stop:] -= torch.cat(steps, 1) @ upper[start:stop, stop:]
    return w


# --8<-- [end:gptq]


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    mixing = torch.randn(K, K, dtype=torch.float64) / K**0.5
    spread = torch.logspace(0, -2, K, dtype=torch.float64)
    inputs = {
        "orthogonal": torch.linalg.qr(torch.randn(SAMPLES, K, dtype=torch.float64)).Q * 45,
        "correlated": torch.randn(SAMPLES, K, dtype=torch.float64) * spread @ mixing,
    }
    w = torch.randn(N, K, dtype=torch.float64) / K**0.5

    print("error of the output   to nearest  Δ²/12      GPTQ  Δ²/12   ratio  error of weights")
    for name, x in inputs.items():
        # damping as in the paper, 1% of H's mean diagonal: K more rows of calibration
        x = torch.cat([x, (0.01 * x.square().sum() / K).sqrt() * torch.eye(K)])
        h, size = x.T @ x, (x @ w.T).norm()
        upper = torch.linalg.cholesky(torch.linalg.inv(h), upper=True)
        for bits in (4, 3, 2):
            nearest, ours = to_grid(w, grid(w, bits), bits), gptq(w, h, bits)
            a, b = ((x @ (w - q).T).norm() / size for q in (nearest, ours))
            # --8<-- [start:predicted]
            noise = grid(w, bits).square().sum() / 12  # Δ²/12, summed over the outputs
            for_nearest = (noise * h.diagonal().sum()).sqrt() / size
            for_gptq = (noise * upper.diagonal().pow(-2).sum()).sqrt() / size
            # --8<-- [end:predicted]
            farther = (w - ours).norm() / (w - nearest).norm()
            print(f"{name:12}{bits:3} bits{a:15.1%}{for_nearest:8.1%}{b:10.1%}{for_gptq:7.1%}"
                  f"{a / b:8.2f}   × {farther:.2f}")  # fmt: skip
            assert abs(a / for_nearest - 1) < 0.03 and abs(b / for_gptq - 1) < 0.03
            halves = 2 * ours / grid(w, bits)  # every weight is a level, and no level is 0
            torch.testing.assert_close(halves, halves.round())
            assert halves.round().unique().tolist() == [*range(1 - 2**bits, 2**bits, 2)]
            if name == "orthogonal":
                torch.testing.assert_close(nearest, ours)  # there is no error to compensate
            else:
                assert b < 0.5 * a and farther > 1.3
        # 1/U² is the residual of a regression of this input on all later inputs
        later = x[:, 101:] @ torch.linalg.lstsq(x[:, 101:], x[:, 100]).solution
        torch.testing.assert_close((x[:, 100] - later).square().sum(), upper[100, 100] ** -2)

    start = time.process_time()
    one = slow(w, h, 3)
    middle = time.process_time()
    other = gptq(w, h, 3)
    end = time.process_time()
    many, single = middle - start, end - middle
    assert single < many
    torch.testing.assert_close(one, other)
    for block in (1, 100, K):
        torch.testing.assert_close(gptq(w, h, 3, block), other)
    print(f"an inverse per column: ≈{many:.2f} s, one Cholesky: "
          f"≈{single:.2f} s, the same weights")  # fmt: skip


if __name__ == "__main__":
    main()
