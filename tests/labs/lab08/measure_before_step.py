# ruff: noqa: F821 (names of the lab)
"""Step 1: the moments before the first step"""

STEP, HINT = 1, "moments_when"


def measure_parts(
    memory: Memory, build: Callable[[], nn.Module], inputs: torch.Tensor, targets: torch.Tensor
) -> Parts:
    """The same, measured over one step, in a Memory that is empty so far."""
    model = build()
    adam = make_adam(model)
    parameters = memory.used
    loss = mean_square(model(inputs), targets)
    activations = memory.used - parameters
    loss.backward()
    gradients = memory.used - parameters
    states = memory.used - parameters - gradients
    adam.step()
    return Parts(parameters, gradients, states, activations)
