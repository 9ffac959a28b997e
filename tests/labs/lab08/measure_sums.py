# ruff: noqa: F821 (names of the lab)
"""Step 1: nothing is subtracted"""

STEP, HINT = 1, "differences"


def measure_parts(
    memory: Memory, build: Callable[[], nn.Module], inputs: torch.Tensor, targets: torch.Tensor
) -> Parts:
    """The same, measured over one step, in a Memory that is empty so far."""
    model = build()
    adam = make_adam(model)
    parameters = memory.used
    loss = mean_square(model(inputs), targets)
    activations = memory.used
    loss.backward()
    gradients = memory.used - parameters
    adam.step()
    states = memory.used
    return Parts(parameters, gradients, states, activations)
