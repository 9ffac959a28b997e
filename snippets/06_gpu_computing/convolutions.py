"""Compute one convolution by four algorithms with different work, scratch memory and rounding.

A convolution with 3 × 3 weights is nine shifted products, one product with a matrix of windows
(im2col), sixteen small products of transformed tiles (Winograd, arXiv 1509.09308), or one
product for each frequency. No algorithm is the best in every column, so a library has them all
and chooses. On a GPU the program also times cuDNN with and without trials, in both layouts.
"""

import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

Rounding = Callable[[torch.Tensor], torch.Tensor]
Result = tuple[torch.Tensor, int, int]  # outputs, elements of scratch, multiplications


# --8<-- [start:algorithms]
def shifts(x: torch.Tensor, w: torch.Tensor, cut: Rounding) -> Result:
    """Return x [b, i, h, w] * w [o, i, 3, 3] -> [b, o, h, w], scratch and multiplications."""
    x, w = cut(F.pad(x, (1, 1, 1, 1))), cut(w)
    h, v = x.shape[2] - 2, x.shape[3] - 2
    y, count = 0, 0
    for r in range(3):
        for c in range(3):
            shifted = x[:, :, r : r + h, c : c + v]
            y = y + torch.einsum("bihv,oi->bohv", shifted, w[:, :, r, c])
            count += shifted.numel() * len(w)
    return y, 0, count


def im2col(x: torch.Tensor, w: torch.Tensor, cut: Rounding) -> Result:
    windows = F.unfold(cut(x), 3, padding=1)  # [b, i · 9, h · w]
    y = cut(w).flatten(1) @ windows
    return y.view(len(x), -1, *x.shape[2:]), windows.numel(), windows.numel() * len(w)


def winograd(x: torch.Tensor, w: torch.Tensor, cut: Rounding) -> Result:
    """Compute 2 × 2 outputs from each tile of 4 × 4: 16 multiplications instead of 36."""
    before = x.new_tensor([[1, 0, -1, 0], [0, 1, 1, 0], [0, -1, 1, 0], [0, 1, 0, -1]])
    weights = x.new_tensor([[1, 0, 0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0, 0, 1]])
    after = x.new_tensor([[1, 1, 1, 0], [0, 1, -1, -1]])
    tiles = F.pad(x, (1, 1, 1, 1)).unfold(2, 4, 2).unfold(3, 4, 2)  # [b, i, h / 2, w / 2, 4, 4]
    tiles = cut(before @ tiles @ before.T)
    products = torch.einsum("bihvxy,oixy->bohvxy", tiles, cut(weights @ w @ weights.T))
    y = after @ products @ after.T  # [b, o, h / 2, w / 2, 2, 2]
    y = y.transpose(3, 4).reshape(len(x), -1, *x.shape[2:])
    return y, tiles.numel(), tiles.numel() * len(w)


def fourier(x: torch.Tensor, w: torch.Tensor, cut: Rounding) -> Result:
    h, v = x.shape[2:]
    size = (h + 2, v + 2)  # room for the border, so that nothing wraps around
    spectrum = torch.fft.rfft2(cut(x), size)  # [b, i, h + 2, w / 2 + 2]
    kernel = torch.fft.rfft2(cut(w).flip(2, 3), size)
    y = torch.fft.irfft2(torch.einsum("bihv,oihv->bohv", spectrum, kernel), size)
    real = 2 * spectrum.numel()  # two for each complex number
    return y[:, :, 1 : h + 1, 1 : v + 1], real, 2 * real * len(w)  # (a + bi)(c + di): four


# --8<-- [end:algorithms]


def timed(call: Callable[[], torch.Tensor]) -> tuple[float, float]:
    """Return the milliseconds of the first call, and the least of ten more calls."""
    times = []
    for _ in range(11):
        torch.accelerator.synchronize()
        start = time.perf_counter()
        call()
        torch.accelerator.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    return times[0], min(times[1:])


def cudnn(device: torch.device) -> None:
    """Time a layer in fp16, with 3 × 3 weights, in two layouts, with and without trials.

    The images for the trials are one column wider, so their shape is new to cuDNN.
    """
    print("\ncuDNN, [64, 128, 56, 56] in fp16       first call ms  later ms")
    layer = torch.nn.Conv2d(128, 128, 3, padding=1, device=device, dtype=torch.float16)
    for layout in (torch.contiguous_format, torch.channels_last):
        for trials in (False, True):
            torch.backends.cudnn.benchmark = trials
            x = torch.randn(64, 128, 56, 56 + trials, device=device, dtype=torch.float16)
            x, layer = x.to(memory_format=layout), layer.to(memory_format=layout)
            first, later = timed(lambda: layer(x))  # noqa: B023
            name = f"{str(layout)[6:]}, benchmark = {trials}"
            print(f"{name:37}≈{first:13.1f}  ≈{later:.2f}")


def main() -> None:
    gpu = torch.cuda.is_available()
    device = torch.device("cuda" if gpu else "cpu")
    torch.backends.cudnn.conv.fp32_precision = "ieee"  # tf32 is the default
    torch.manual_seed(0)
    b, i, o, n = 4, 32, 32, 32
    x, w = torch.randn(b, i, n, n, device=device), torch.randn(o, i, 3, 3, device=device)
    truth = F.conv2d(x.double(), w.double(), padding=1)
    print("3 × 3          × for each     scratch,   error with factors in")
    print("               pair, output   × input       fp32        bf16")
    error = {}
    for algorithm in (shifts, im2col, winograd, fourier):
        for name, cut in (("fp32", lambda t: t), ("bf16", lambda t: t.bfloat16().float())):
            y, scratch, count = algorithm(x, w, cut)
            error[algorithm, name] = ((y - truth).norm() / truth.norm()).item()
        cells = "".join(f"{error[algorithm, name]:12.1e}" for name in ("fp32", "bf16"))
        each = count / (y.numel() * i)  # for one output, and one pair of channels
        print(f"{algorithm.__name__:15}{each:8.1f}{scratch / x.numel():13.1f}  {cells}")
    assert all(e < 3e-6 for (_, name), e in error.items() if name == "fp32")
    assert error[winograd, "bf16"] > 1.5 * error[shifts, "bf16"]

    windows = F.unfold(x, 2, stride=2).view(b, i, 4, n // 2, n // 2)
    assert windows.amax(2).equal(torch.nn.MaxPool2d(2)(x))
    torch.testing.assert_close(windows.mean(2), torch.nn.AvgPool2d(2)(x))
    print("\nwindows' maximum and mean: MaxPool2d and AvgPool2d")

    last = x.to(memory_format=torch.channels_last)
    y = F.conv2d(last, w, padding=1)
    torch.testing.assert_close(y.double(), truth, rtol=1e-4, atol=1e-4)
    assert last.shape == x.shape and last.permute(0, 2, 3, 1).is_contiguous()
    assert y.is_contiguous(memory_format=torch.channels_last)  # the result keeps the layout
    print(f"strides of {tuple(x.shape)}: {x.stride()}, channels_last {last.stride()}")
    if gpu:
        cudnn(device)


if __name__ == "__main__":
    main()
