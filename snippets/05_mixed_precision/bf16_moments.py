"""Adam's moments in bf16: the second one can grow, but with beta2 = 0.999 it cannot decay.

v ← 0.999·v takes away a thousandth; half a step of bf16 is at least a 512th. So v stays at its
highest value, and the learning rate at its lowest. One spike in the gradient is enough.
"""

import torch

BETA2, SPIKE, STEPS = 0.999, 100.0, 5000


def decay(dtype: torch.dtype, beta2: float, stochastic: bool = False) -> tuple[float, float]:
    """Feed gradients of size 1 after one of SPIKE; return v after it and at the end."""
    v = torch.zeros(256, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    after = 0.0
    for step in range(STEPS):
        gradient = SPIKE if step == 0 else 1.0
        v = beta2 * v.float() + (1 - beta2) * gradient**2
        if stochastic:  # see stochastic_rounding.py
            noise = torch.randint(0, 2**16, v.shape, generator=generator, dtype=torch.int32)
            v = ((v.view(torch.int32) + noise) & -(2**16)).view(torch.float32)
        v = v.to(dtype)
        after = v.float().mean().item() if step == 0 else after
    return after, v.float().mean().item()


def state_bytes(master: str, moment: torch.dtype) -> list[int]:
    """Bytes per parameter: bf16 weight and gradient, what the weight needs, two moments."""
    bf16 = torch.bfloat16
    beside = {"none": [], "Kahan": [bf16], "fp32": [torch.float32]}[master]
    return [sum(d.itemsize for d in part) for part in ([bf16], [bf16], beside, [moment] * 2)]


def main() -> None:
    expected = 1 + (BETA2 ** (STEPS - 1)) * ((1 - BETA2) * SPIKE**2 - 1)
    print(f"v after a gradient of {SPIKE:.0f} and {STEPS - 1:,} of 1; exact: {expected:.3f}")
    print("                           after the spike   at the end   step size, of right")
    rows = (
        ("fp32, beta2 0.999", torch.float32, 0.999, False),
        ("bf16, beta2 0.999", torch.bfloat16, 0.999, False),
        ("bf16, beta2 0.99", torch.bfloat16, 0.99, False),
        ("bf16, 0.999, stochastic", torch.bfloat16, 0.999, True),
    )
    ends = {}
    for name, dtype, beta2, stochastic in rows:
        after, end = decay(dtype, beta2, stochastic)
        right = 1 + beta2 ** (STEPS - 1) * ((1 - beta2) * SPIKE**2 - 1)
        ends[name] = end
        mark = "≈" if stochastic else ""
        size = (right / end) ** 0.5  # Adam divides by √v
        print(f"{name:25}  {after:15.2f}   {mark}{end:<10.3f}   {mark}{size:.2f}")
    assert ends["bf16, beta2 0.999"] > 9
    assert abs(ends["bf16, 0.999, stochastic"] - expected) < 0.05

    half_step = 2.0**-9  # the least that half a step of bf16 is, relative to the value
    print(f"a decay of {1 - BETA2:.4f} a step against at least {half_step:.4f} for half a step")

    print("bytes per parameter        weight  gradient  beside  moments  sum")
    for name, master, moment in (
        ("fp32 master, fp32 moments", "fp32", torch.float32),
        ("fp32 master, bf16 moments", "fp32", torch.bfloat16),
        ("Kahan, fp32 moments", "Kahan", torch.float32),
        ("Kahan, bf16 moments", "Kahan", torch.bfloat16),
        ("all bf16", "none", torch.bfloat16),
    ):
        parts = state_bytes(master, moment)
        print(
            f"{name:25}  {parts[0]:6}  {parts[1]:8}  {parts[2]:6}  {parts[3]:7}  {sum(parts):3}"
        )

    weight = torch.ones(1, dtype=torch.bfloat16, requires_grad=True)
    adam = torch.optim.Adam([weight])
    for step in range(STEPS):
        weight.grad = torch.full_like(weight, SPIKE if step == 0 else 1.0)
        adam.step()
    m, v = (adam.state[weight][key].item() for key in ("exp_avg", "exp_avg_sq"))
    assert v == ends["bf16, beta2 0.999"]
    print(f"torch.optim.Adam, the same gradients in bf16: v {v:.3f}, m {m:.3f}; m should be 1")

    layer = torch.nn.Linear(1000, 1000, bias=False, dtype=torch.bfloat16)
    adam = torch.optim.Adam(layer.parameters())
    layer(torch.ones(1, 1000, dtype=torch.bfloat16)).sum().backward()
    adam.step()
    held = [layer.weight, layer.weight.grad]
    held += [s for s in adam.state[layer.weight].values() if s.dim()]
    size, dtype = sum(t.nbytes for t in held) // 10**6, str(held[-1].dtype).split(".")[1]
    print(f"torch.optim.Adam on a bf16 module: {size} bytes a parameter, moments in {dtype}")


if __name__ == "__main__":
    main()
