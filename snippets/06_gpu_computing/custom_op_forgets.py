"""Six operators compute the right numbers, but each of them breaks one rule of PyTorch.

Five mistakes cause an error: at the first call, in training, in opcheck, or in a compiled
function. The sixth causes no error. It gives a wrong gradient, and opcheck finds it.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import custom_op, opcheck


@custom_op("forgets::no_fake", mutates_args=())
def no_fake(x: Tensor) -> Tensor:
    return x.sin()


@custom_op("forgets::no_backward", mutates_args=())
def no_backward(x: Tensor) -> Tensor:
    return x.sin()


@custom_op("forgets::returns_view", mutates_args=())
def returns_view(x: Tensor) -> Tensor:
    return x.view(-1)


@custom_op("forgets::wrong_fake", mutates_args=())
def wrong_fake(x: Tensor) -> Tensor:
    return x.sum(0)


@wrong_fake.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


@custom_op("forgets::wrong_strides", mutates_args=())
def wrong_strides(x: Tensor) -> Tensor:
    return x.contiguous().sin()


@wrong_strides.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)  # keeps the strides of x, even if x is transposed


# --8<-- [start:writes]
@custom_op("forgets::writes", mutates_args=())
def writes(x: Tensor) -> None:
    array = x.numpy()  # like a kernel that gets a pointer: autograd does not notice the write
    array *= 2


@custom_op("forgets::declares", mutates_args={"x"})
def declares(x: Tensor) -> None:
    array = x.numpy()
    array *= 2


def gradient(double_in_place) -> Tensor:
    """Return d(h²)/dx at x = 3 for h = x + 0, if h is doubled before the backward pass."""
    x = torch.tensor([3.0], requires_grad=True)
    h = x + 0
    square = h * h  # saves h for the backward pass
    double_in_place(h.detach())
    square.backward()
    return x.grad


# --8<-- [end:writes]


def show(what: str, attempt: Callable[[], object], pick: str = "") -> None:
    """Print the error of `attempt()`: one sentence, which begins with `pick` if it is given."""
    try:
        attempt()
    except Exception as error:
        text = str(error)[str(error).index(pick) :].splitlines()[0]
        text = text.split(". ")[0].split(": [")[0].split(" (scroll")[0]
        print(f"{what}\n    {type(error).__name__}: {text}")
    else:
        raise AssertionError(f"{what}: expected an error")


def main() -> None:
    x = torch.randn(2, 3)
    for operator in (no_fake, no_backward, wrong_strides):
        torch.testing.assert_close(operator(x.T), x.T.sin())  # also right if transposed
    torch.testing.assert_close(wrong_fake(x), x.sum(0))
    for operator in (writes, declares):
        operator(doubled := x.clone())
        assert torch.equal(doubled, 2 * x)
    trained = x.clone().requires_grad_()
    with FakeTensorMode() as mode:  # torch.compile and torch.export trace with fake tensors
        show("no fake kernel", lambda: no_fake(mode.from_tensor(x)), "There was no fake impl")
    show("no backward formula", lambda: no_backward(trained).sum().backward())
    show("the output is a view of the input", lambda: returns_view(x), "The output of this")
    show("a fake kernel with another shape", lambda: opcheck(wrong_fake, (x,)))
    compiled = torch.compile(wrong_strides, fullgraph=True)
    torch.testing.assert_close(compiled(x), x.sin())  # a contiguous input causes no error
    show("a fake kernel with other strides, in a compiled function", lambda: compiled(x.T))

    assert gradient(lambda h: None).item() == 6  # the right gradient, without the write
    assert gradient(writes).item() == 12  # no error
    print("the operator writes to its argument, and the schema does not say so")
    print(f"  d(h²)/dx at x = 3 is {gradient(writes).item():.0f}, not 6, and there is no error")
    show("  the same with mutates_args={'x'}", lambda: gradient(declares))
    show("  opcheck of the operator without mutates_args", lambda: opcheck(writes, (x,)))


if __name__ == "__main__":
    main()
