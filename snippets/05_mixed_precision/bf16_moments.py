"""In bf16, Adam's second moment v can grow, but with beta2 = 0.999 it cannot decay.

One update of Adam reduces v by at most 1/1000 of v. Half the distance from v to the next bf16
number is at least 1/512 of v, so rounding undoes the reduction. v therefore remains at its
highest value, and the updates of its parameter remain too small. Look at
the column "at the end": a single large gradient has this effect for the rest of the run. The
table below counts the bytes of five ways to store weights and moments.
"""

import torch

BETA2, SPIKE, STEPS = 0.999, 100.0, 5000


def decay(dtype: torch.dtype, beta2: float, stochastic: bool) -> tuple[float, torch.Tensor]:
    """Average the squares of one gradient SPIKE and many gradients 1.

    Return the mean of 256 copies of v after the first gradient, and all copies at the end.
    """
    v = torch.zeros(256, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    after = 0.0
    for step in range(STEPS):
        gradient = SPIKE if step == 0 else 1.0
        v = beta2 * v.float() + (1 - beta2) * gradient**2
        if stochastic:  # as in stochastic_rounding.py
            noise = torch.randint(0, 2**16, v.shape, generator=generator, dtype=torch.int32)
            v = ((v.view(torch.int32) + noise) & -(2**16)).view(torch.float32)
        v = v.to(dtype)
        after = v.float().mean().item() if step == 0 else after
    return after, v


def state_bytes(master: str, moment: torch.dtype) -> list[int]:
    """Return the bytes per parameter of weight, gradient, copy of the weight, and moments."""
    bf16 = torch.bfloat16
    copy = {"none": [], "Kahan": [bf16], "fp32": [torch.float32]}[master]
    return [sum(d.itemsize for d in part) for part in ([bf16], [bf16], copy, [moment] * 2)]


def main() -> None:
    expected = 1 + (BETA2 ** (STEPS - 1)) * ((1 - BETA2) * SPIKE**2 - 1)
    print(f"v after a gradient of {SPIKE:.0f} and {STEPS - 1:,} gradients of 1")
    print(f"exact v at the end with beta2 = {BETA2}: {expected:.3f}")
    print("                           after the spike   at the end   update / right update")
    rows = (
        ("fp32, beta2 0.999", torch.float32, 0.999, False),
        ("bf16, beta2 0.999", torch.bfloat16, 0.999, False),
        ("bf16, beta2 0.99", torch.bfloat16, 0.99, False),
        ("bf16, 0.999, stochastic", torch.bfloat16, 0.999, True),
    )
    ends, sizes = {}, {}
    for name, dtype, beta2, stochastic in rows:
        after, v = decay(dtype, beta2, stochastic)
        assert v.dtype == dtype and (v.float().std() > 0) == stochastic
        end = v.double().mean().item()
        right = 1 + beta2 ** (STEPS - 1) * ((1 - beta2) * SPIKE**2 - 1)
        ends[name] = end
        mark = "≈" if stochastic else ""
        size = sizes[name] = (right / end) ** 0.5  # Adam divides by √v
        print(f"{name:25}  {after:15.2f}   {mark}{end:<10.3f}   {mark}{size:.2f}")
    assert abs(ends["fp32, beta2 0.999"] - expected) < 1e-3
    assert abs(ends["bf16, beta2 0.99"] - (1 + 100 * 2**-8)) <= 2**-7  # 1% is half a step
    assert abs(ends["bf16, 0.999, stochastic"] - expected) < 0.05

    half_step = 2.0**-9  # the smallest half step of bf16, relative to the value
    print(
        f"an update removes at most {1 - BETA2:.4f} of v; "
        f"half a bf16 spacing is at least {half_step:.4f} of v"
    )
    v = torch.linspace(1, 2, 129).bfloat16().float()  # every mantissa
    decays = [
        ((v - n * half_step * v).bfloat16() < v).double().mean() for n in (0.99, 1.01, 2.01)
    ]
    assert decays[0] == 0 < decays[1] < 1 == decays[2]  # beta2 above 1 - 2^-9: no decay
    assert ((BETA2 * v + (1 - BETA2) * 6 * v).bfloat16() > v).all()  # but v can grow

    print("bytes per parameter        weight  gradient  copy  moments  sum")
    for name, master, moment in (
        ("fp32 master, fp32 moments", "fp32", torch.float32),
        ("fp32 master, bf16 moments", "fp32", torch.bfloat16),
        ("Kahan, fp32 moments", "Kahan", torch.float32),
        ("Kahan, bf16 moments", "Kahan", torch.bfloat16),
        ("all bf16", "none", torch.bfloat16),
    ):
        parts = state_bytes(master, moment)
        print(
            f"{name:25}  {parts[0]:6}  {parts[1]:8}  {parts[2]:4}  {parts[3]:7}  {sum(parts):3}"
        )

    weight = torch.ones(1, dtype=torch.bfloat16, requires_grad=True)
    adam = torch.optim.Adam([weight])
    for step in range(STEPS):
        weight.grad = torch.full_like(weight, SPIKE if step == 0 else 1.0)
        weight.data.zero_()  # so that the update is not rounded
        adam.step()
    m, v = (adam.state[weight][key].item() for key in ("exp_avg", "exp_avg_sq"))
    assert v == ends["bf16, beta2 0.999"]
    right = 1e-3 / (expected / (1 - BETA2**STEPS)) ** 0.5  # the default learning rate is 1e-3
    assert abs(-weight.item() / right - m * sizes["bf16, beta2 0.999"]) < 0.01
    assert 2**-9 <= 0.1 * (m - 1) <= 2**-8  # m stops where a tenth of its error is half a step
    print(f"torch.optim.Adam, the same gradients in bf16: v {v:.3f}, m {m:.3f}; m should be 1")

    layer = torch.nn.Linear(1000, 1000, bias=False, dtype=torch.bfloat16)
    adam = torch.optim.Adam(layer.parameters())
    layer(torch.ones(1, 1000, dtype=torch.bfloat16)).sum().backward()
    adam.step()
    tensors = [layer.weight, layer.weight.grad]
    tensors += [s for s in adam.state[layer.weight].values() if s.dim()]
    size, dtype = sum(t.nbytes for t in tensors) // 10**6, str(tensors[-1].dtype).split(".")[1]
    assert size == sum(state_bytes("none", torch.bfloat16))
    print(f"torch.optim.Adam on a bf16 module: {size} bytes a parameter, moments in {dtype}")


if __name__ == "__main__":
    main()
