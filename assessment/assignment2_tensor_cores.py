"""Assignment 2: a convolution for tensor cores, with the accuracy of fp32.

    python assessment/assignment2_tensor_cores.py

What cuBLAS and cuDNN decide for you, written out: numbers rounded to TF32, a product of fp32
matrices from three products in TF32, a convolution as one product in channels_last, the tile
that fits a shape and a number of multiprocessors, and a choice of algorithms by measurement.
`mma` stands for the tensor cores: it takes TF32 numbers and adds up in fp32.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional as F

CALLS: list[bool] = []  # for each call of mma, whether its operands were TF32


def mma(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """[m, k] times [k, n] on tensor cores."""
    CALLS.append(not any((t.view(torch.int32) & 0x1FFF).any() for t in (a.contiguous(), b)))
    return a @ b


def to_tf32(x: torch.Tensor) -> torch.Tensor:
    """fp32 numbers rounded to 10 bits of mantissa: to the nearest, at a tie to the even one."""
    # >>> solution 1: on the bits: view as int32, add, mask, view as float32
    # hint: 13 bits go; adding 0xFFF and the last bit that stays lets the carry do the rest
    bits = x.contiguous().view(torch.int32)
    bits = (bits + 0xFFF + (bits >> 13 & 1)) & ~0x1FFF
    return bits.view(torch.float32)
    # <<< solution


def matmul_3xtf32(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """[m, k] times [k, n] nearly as exact as in fp32, from three calls of mma."""
    # >>> solution 2: split each into a large and a small TF32 number; leave out small·small
    a_large, b_large = to_tf32(a), to_tf32(b)
    a_small, b_small = to_tf32(a - a_large), to_tf32(b - b_large)
    return mma(a_small, b_large) + mma(a_large, b_small) + mma(a_large, b_large)
    # <<< solution


def im2col(x: torch.Tensor, kernel: int, stride: int, padding: int, dilation: int):
    """The rows that a convolution multiplies: [n, c, h, w] -> [n·ho·wo, kernel²·c], ho, wo.

    Within a row, c varies fastest: neighbours in channels_last are neighbours here. Nothing is
    rounded yet.
    """
    n, c, h, w = x.shape
    # >>> solution 3: pad, take a slice for each place in the kernel, stack them before c
    reach = dilation * (kernel - 1) + 1
    ho, wo = ((size + 2 * padding - reach) // stride + 1 for size in (h, w))
    x = F.pad(x, [padding] * 4)
    places = []
    for i in range(kernel):
        for j in range(kernel):
            top, left = i * dilation, j * dilation
            rows = slice(top, top + stride * (ho - 1) + 1, stride)
            columns = slice(left, left + stride * (wo - 1) + 1, stride)
            places.append(x[:, :, rows, columns].permute(0, 2, 3, 1))  # [n, ho, wo, c]
    return torch.stack(places, 3).reshape(n * ho * wo, kernel * kernel * c), ho, wo
    # <<< solution


def conv2d(x: torch.Tensor, weight: torch.Tensor, stride=1, padding=0, dilation=1):
    """The convolution of [n, c, h, w] with [k, c, r, r], in one product in TF32.

    The result is [n, k, ho, wo] in channels_last, as it comes out of the product: no copy.
    """
    # >>> solution 3: the weight in the order of the rows, one mma, a view of its result
    k = len(weight)
    rows, ho, wo = im2col(x, weight.shape[-1], stride, padding, dilation)
    flat = weight.permute(0, 2, 3, 1).reshape(k, -1)
    out = mma(to_tf32(rows), to_tf32(flat.T.contiguous()))
    return out.view(len(x), ho, wo, k).permute(0, 3, 1, 2)
    # <<< solution


@dataclass(frozen=True)
class Tile:
    m: int
    n: int
    share: float  # of the peak, while all multiprocessors have one


def best_tile(m: int, n: int, tiles: list[Tile], sms: int) -> tuple[Tile, float]:
    """The tile by which an m × n product goes fastest on `sms` multiprocessors, and its rate.

    The rate is the share of the peak: of a tile that hangs over the edge only what lies within
    counts, and the last wave takes as long as a full one.
    """

    # >>> solution 4: useful elements over those of all waves, times the share of the tile
    def rate(tile: Tile) -> float:
        count = -(-m // tile.m) * -(-n // tile.n)
        waves = -(-count // sms)
        return tile.share * m * n / (waves * sms * tile.m * tile.n)

    best = max(tiles, key=rate)
    return best, rate(best)
    # <<< solution


@dataclass(frozen=True)
class Algorithm:
    name: str
    workspace: int  # bytes
    deterministic: bool
    run: Callable[[], None]


class Chooser:
    """cudnn.benchmark: the fastest algorithm that is permitted, measured once for each case.

    `deterministic` may be set between two calls, as torch.backends.cudnn.deterministic may.
    """

    def __init__(self, clock: Callable[[], float], limit: int, deterministic: bool = False):
        self.clock, self.limit, self.deterministic = clock, limit, deterministic
        self.chosen: dict[tuple, Algorithm] = {}

    def choose(self, x: torch.Tensor, weight: torch.Tensor, candidates: list[Algorithm]):
        """The algorithm to take for this x and this weight: None if no candidate is permitted.

        A candidate runs once untimed, then three times; the smallest time counts.
        """
        channels_last = x.is_contiguous(memory_format=torch.channels_last)
        # >>> solution 5: a key of all that matters; a measurement if it is new; the choice
        key = (x.shape, x.dtype, channels_last, weight.shape, self.deterministic)
        if key in self.chosen:
            return self.chosen[key]
        best, best_time = None, float("inf")
        for algorithm in candidates:
            if algorithm.workspace > self.limit:
                continue
            if self.deterministic and not algorithm.deterministic:
                continue
            algorithm.run()  # loads its kernel
            for _ in range(3):
                start = self.clock()
                algorithm.run()
                if (time := self.clock() - start) < best_time:
                    best, best_time = algorithm, time
        self.chosen[key] = best
        return best
        # <<< solution


# --8<-- [start:main]
def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    a, b = torch.randn(64, 256), torch.randn(256, 64)
    truth = a.double() @ b.double()

    def error(c: torch.Tensor) -> float:
        return ((c - truth).norm() / truth.norm()).item()

    one, three, fp32 = (
        error(mma(to_tf32(a), to_tf32(b))),
        error(matmul_3xtf32(a, b)),
        error(a @ b),
    )
    assert three < 4 * fp32 < one / 100 and all(CALLS)
    print(f"relative error: TF32 ≈{one:.1e}, three times TF32 ≈{three:.1e}, fp32 ≈{fp32:.1e}")
    x = torch.randn(2, 16, 9, 9).to(memory_format=torch.channels_last)
    w = torch.randn(8, 16, 3, 3)
    y = conv2d(x, w, stride=2, padding=1)
    off = (y - F.conv2d(x, w, stride=2, padding=1)).abs().max().item()
    assert off < 0.05 and y.is_contiguous(memory_format=torch.channels_last)
    print(f"convolution: {tuple(y.shape)}, channels_last, off by ≈{off:.1e}")
    tiles = [Tile(256, 128, 0.9), Tile(128, 128, 0.8), Tile(64, 64, 0.5)]
    for size in (1024, 1536, 4096):
        tile, rate = best_tile(size, size, tiles, sms=132)
        print(f"{size:5} × {size}: tiles of {tile.m} × {tile.n}, {rate:.0%} of the peak")
    if torch.cuda.is_available():  # what do the tensor cores of this GPU make of it?
        torch.backends.cuda.matmul.allow_tf32 = True
        print(f"TF32 on this GPU: error ≈{error((a.cuda() @ b.cuda()).cpu()):.1e}")


# --8<-- [end:main]


def stop_at_blank(kind, error, trace) -> None:
    if kind is not NotImplementedError:
        return sys.__excepthook__(kind, error, trace)
    sys.exit(f"a blank: {error}")


if __name__ == "__main__":
    sys.excepthook = stop_at_blank
    main()
