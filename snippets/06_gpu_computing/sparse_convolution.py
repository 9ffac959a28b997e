"""Convolve only at the few sites of a grid that are not empty: gather, multiply, scatter.

The points of a laser scan fill a few hundredths of their grid. A submanifold convolution
(Graham et al., 2018) computes only where there is an input. For each of the 27 offsets of the
kernel it gathers the neighbours that exist, multiplies them by the weights of this offset, and
adds the results. At the active sites it equals the dense convolution, forward and backward.
"""

import itertools

import torch
import torch.nn.functional as F


# --8<-- [start:convolution]
def pairs(sites: torch.Tensor, size: int, offset: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
    """Return the indices of sites and of their neighbours at `offset`, if both are active.

    `sites` [n, 3] has integers below `size`, and no site twice.
    """
    line = torch.tensor([size * size, size, 1])
    keys, order = (sites * line).sum(1).sort()
    wanted = sites + torch.tensor(offset)
    inside = ((wanted >= 0) & (wanted < size)).all(1)
    key = (wanted * line).sum(1)
    place = torch.searchsorted(keys, key).clamp(max=len(keys) - 1)
    found = inside & (keys[place] == key)
    return found.nonzero()[:, 0], order[place[found]]


def convolve(
    features: torch.Tensor, sites: torch.Tensor, size: int, weight: torch.Tensor
) -> tuple[torch.Tensor, int]:
    """Convolve features [n, in] with weight [out, in, 3, 3, 3] -> [n, out], and count pairs."""
    result, count = features.new_zeros(len(sites), weight.shape[0]), 0
    for i, j, k in itertools.product(range(3), repeat=3):
        to, source = pairs(sites, size, (i - 1, j - 1, k - 1))
        product = features[source] @ weight[:, :, i, j, k].T  # [pairs, in] -> [pairs, out]
        result = result.index_add(0, to, product)
        count += len(to)
    return result, count


# --8<-- [end:convolution]


def compare(sites: torch.Tensor, size: int) -> tuple[int, torch.Tensor]:
    """Compare with the dense convolution. Return the pairs and the output of the dense one."""
    channels_in, channels_out = 8, 12
    features = torch.randn(len(sites), channels_in, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(channels_out, channels_in, 3, 3, 3, dtype=torch.float64) / 10
    weight.requires_grad_()
    ours, count = convolve(features, sites, size, weight)

    x, y, z = sites.T
    dense = torch.zeros(channels_in, size, size, size, dtype=torch.float64)
    dense = dense.index_put((torch.arange(channels_in)[:, None], x, y, z), features.T)
    whole = F.conv3d(dense[None], weight, padding=1)[0]
    reference = whole[:, x, y, z].T
    torch.testing.assert_close(ours, reference)

    ahead = torch.randn_like(ours)
    got = torch.autograd.grad(ours, (features, weight), ahead)
    wanted = torch.autograd.grad(reference, (features, weight), ahead)
    torch.testing.assert_close(got, wanted)
    return count, whole.detach()


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    size = 48
    # the surface of a ball, as a scanner sees it: one cell thick
    grid = torch.cartesian_prod(*[torch.arange(size)] * 3)
    radius = (grid - (size - 1) / 2).double().norm(dim=1)
    sites = grid[(radius - 18).abs() < 0.25]
    sites = sites[torch.randperm(len(sites))]
    count, whole = compare(sites, size)
    compare(torch.cartesian_prod(*[torch.arange(4)] * 3)[torch.randperm(64)[:40]], 4)  # borders

    filled = int(whole.ne(0).any(0).sum())
    neighbours = count / len(sites)
    share = count / (27 * size**3)
    assert share < 0.01 and filled > 2 * len(sites)
    print(f"active sites: {len(sites):,} of {size**3:,}, {len(sites) / size**3:.1%}")
    print(f"neighbours of a site, itself included: {neighbours:.1f} of 27")
    print(f"products of the dense convolution: {share:.2%} are left")
    print(
        f"a dense convolution fills {filled:,}, {filled / len(sites):.1f} times as many sites"
    )
    print("outputs and both gradients at the active sites equal the dense convolution's: True")


if __name__ == "__main__":
    main()
