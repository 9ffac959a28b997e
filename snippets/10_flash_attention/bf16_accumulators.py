"""If the running sum and output are in bf16, their error grows with the number of tiles.

Inputs and weights are bf16 in both columns. The columns differ only in the precision of the sum
and the output between two tiles.
"""

import torch

TILE, D = 32, 16


# --8<-- [start:online]
def online(z: torch.Tensor, v: torch.Tensor, carried: torch.dtype) -> torch.Tensor:
    """Return the output for z [rows, s], v [s, d]. Sum and output are stored as `carried`."""
    m = z.new_full((len(z),), -torch.inf, dtype=torch.float32)
    total, out = (m.new_zeros(shape, dtype=carried) for shape in (len(z), (len(z), v.shape[1])))
    for j in range(0, z.shape[1], TILE):
        new = torch.maximum(m, z[:, j : j + TILE].max(-1).values.float())
        p, shrink = (z[:, j : j + TILE].float() - new[:, None]).exp(), (m - new).exp()
        total = (total.float() * shrink + p.sum(-1)).to(carried)
        product = p.bfloat16().float() @ v[j : j + TILE].float()
        out = (out.float() * shrink[:, None] + product).to(carried)
        m = new
    assert out.dtype == total.dtype == carried
    return out.float() / total.float()[:, None]


# --8<-- [end:online]


def main() -> None:
    torch.set_num_threads(1)
    print("relative error     s   tiles   carried in fp32   carried in bf16")
    errors = {}
    for s in (128, 1024, 8192, 65536):
        torch.manual_seed(0)
        z, v = torch.randn(8, s).bfloat16(), (torch.randn(s, D) + 1).bfloat16()
        truth = z.double().softmax(-1) @ v.double()
        errors[s] = [
            ((online(z, v, kind) - truth).norm() / truth.norm()).item()
            for kind in (torch.float32, torch.bfloat16)
        ]
        cells = [f"≈{error:.1e}" for error in errors[s]]
        print(f"{s:20}  {s // TILE:6}   {cells[0]:>15}   {cells[1]:>15}")
    assert all(fp32 < 2e-3 for fp32, _ in errors.values())
    assert errors[65536][0] < errors[128][0]  # roundings of the weights average out
    assert errors[65536][1] > 0.05 and errors[65536][1] > 3 * errors[1024][1]
    z, ones = torch.randn(8, 128).bfloat16(), torch.ones(128, D).bfloat16()
    off = (online(z, ones, torch.float32) - 1).abs().max()
    assert 1e-6 < off < 2e-3  # the product's weights are rounded, those of the sum are not
    total = torch.zeros((), dtype=torch.bfloat16)
    for _ in range(2048):
        total += TILE  # equal scores: every tile adds 32
    print(
        f"2048 tiles of equal scores: should sum to {2048 * TILE}, stops at {total.item():.0f}"
    )
    assert total.item() == 256 * TILE


if __name__ == "__main__":
    main()
