# ruff: noqa: F821 (names of the lab)
"""Step 1: activations when they are gone"""

STEP, HINT = 1, "after_backward"


def measure_parts(
    memory: Memory, build: Callable[[], nn.Module], inputs: torch.Tensor, targets: torch.Tensor
) -> Parts:
    """The same, measured over one step, in a Memory that is empty so far."""
    model = build()
    adam = make_adam(model)
    parameters = memory.used
    loss = mean_square(model(inputs), targets)
    loss.backward()
    gradients = memory.used - parameters
    activations = memory.used - parameters - gradients
    adam.step()
    states = memory.used - parameters - gradients
    return Parts(parameters, gradients, states, activations)
