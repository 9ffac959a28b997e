"""model.half() and misused scalers raise seven errors. This program fixes four of them.

Look at the words of each message: three different texts mean that two types meet in a product.
"""

import torch
from torch import nn

F16 = torch.float16


def half_model() -> None:
    """The weights are fp16, and the input is fp32."""
    nn.Linear(4, 4).half()(torch.ones(2, 4))


def half_model_fix() -> torch.Tensor:
    model = nn.Linear(4, 4)  # stays in fp32; autocast casts weight and input for the product
    with torch.autocast("cpu", F16):
        return model(torch.ones(2, 4))


def own_matrix() -> None:
    """Outside autocast, an fp16 output is multiplied by an fp32 matrix."""
    half_model_fix() @ torch.ones(4, 4)


def own_matrix_fix() -> torch.Tensor:
    return half_model_fix().float() @ torch.ones(4, 4)  # or do it inside the region


def batched() -> None:
    """The same mistake with a batch of matrices has a different message."""
    torch.bmm(torch.ones(1, 4, 4, dtype=F16), torch.ones(1, 4, 4))


def mask() -> None:
    """The number -1e9 is outside the range of fp16."""
    scores = torch.ones(2, 2, dtype=F16)
    scores.masked_fill(torch.eye(2, dtype=torch.bool), -1e9)


def mask_fix() -> torch.Tensor:
    scores = torch.ones(2, 2, dtype=F16)
    return scores.masked_fill(torch.eye(2, dtype=torch.bool), torch.finfo(F16).min)


def half_gradients(half: bool = True) -> torch.Tensor:
    """GradScaler requires fp32 gradients, because small fp16 gradients would underflow."""
    model = nn.Linear(4, 4).half() if half else nn.Linear(4, 4)
    optimizer, scaler = torch.optim.SGD(model.parameters()), torch.amp.GradScaler("cpu")
    with torch.autocast("cpu", F16):
        output = model(torch.ones(2, 4))
    scaler.scale(output.float().mean()).backward()
    scaled = model.weight.grad.clone()
    scaler.unscale_(optimizer)
    assert output.dtype == F16
    assert scaled.equal(2.0**16 * model.weight.grad)  # 2^16 is the initial scale
    return model.weight.grad


def half_gradients_fix() -> torch.Tensor:
    return half_gradients(half=False)


def no_scale(scale: bool = False) -> None:
    """The program called backward on the loss without scaler.scale(loss)."""
    model = nn.Linear(4, 1)
    optimizer, scaler = torch.optim.SGD(model.parameters()), torch.amp.GradScaler("cpu")
    loss = model(torch.ones(4))
    (scaler.scale(loss) if scale else loss).backward()
    scaler.step(optimizer)


def twice(update: bool = False) -> None:
    """Two calls of unscale_ in one step, for example from two places that clip."""
    model = nn.Linear(4, 1)
    optimizer, scaler = torch.optim.SGD(model.parameters()), torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.ones(4))).backward()
    scaler.unscale_(optimizer)
    if update:
        scaler.update()  # ends the step
    scaler.unscale_(optimizer)


def main() -> None:
    types: list[tuple[torch.dtype, torch.dtype]] = []  # weight and input of each linear layer
    nn.modules.module.register_module_forward_pre_hook(
        lambda layer, args: types.append((layer.weight.dtype, args[0].dtype))
    )
    for fail in (half_model, own_matrix, batched, mask, half_gradients, no_scale, twice):
        try:
            fail()
        except (RuntimeError, ValueError, AssertionError) as error:
            print(f"{fail.__name__}: {type(error).__name__}: {str(error).splitlines()[0]}")
            weight = F16 if fail in (half_model, half_gradients) else torch.float32
            assert types == [(weight, torch.float32)] * (fail not in (batched, mask))
            types.clear()
        else:
            raise AssertionError(f"{fail.__name__} was expected to fail")
    for fix in (half_model_fix, own_matrix_fix, mask_fix, half_gradients_fix):
        result = fix()
        assert types == [(torch.float32, torch.float32)] * (fix is not mask_fix)
        types.clear()
        assert result.isfinite().all()
        print(f"{fix.__name__}: {str(result.dtype).removeprefix('torch.')}, finite")
    with torch.autocast("cpu", F16):  # inside the region, these three raise no error
        half_model(), own_matrix(), batched()
    no_scale(scale=True), twice(update=True)
    assert mask_fix().tolist() == [[-65504, 1], [1, -65504]]
    assert half_gradients_fix().eq(2 / 8).all()  # 2 samples of ones, a mean over 8 outputs
    torch.manual_seed(0)
    exact = nn.Linear(4, 4)(torch.ones(2, 4))
    for fix, right in ((half_model_fix, exact), (own_matrix_fix, exact @ torch.ones(4, 4))):
        torch.manual_seed(0)
        torch.testing.assert_close(fix().float(), right, rtol=2e-3, atol=2e-3)


if __name__ == "__main__":
    main()
