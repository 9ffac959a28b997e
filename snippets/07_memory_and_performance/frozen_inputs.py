"""element 0 of tensors does not require grad: LoRA with `use_reentrant=True` checkpointing.

A frozen embedding feeds frozen layers that have trainable adapters. Reentrant checkpointing
runs a layer without recording it, and the output requires a gradient only if an *input* does.
Here no input does. The adapters get no gradient, and backward raises if nothing else is
trained. If the head is trained too, nothing is raised, and the adapters are not trained.

Look at the second line of each case. It compares the gradients of the adapters with those of
the same model without checkpointing.
"""

import warnings

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH, RANK, LAYERS, WORDS = 8, 2, 3, 11


class Adapted(nn.Module):
    """A frozen linear layer with an adapter of low rank."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.adapter = nn.Sequential(
            nn.Linear(WIDTH, RANK, bias=False), nn.Linear(RANK, WIDTH, bias=False)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.frozen(x) + self.adapter(x))


class Model(nn.Module):
    def __init__(self, train_head: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(WORDS, WIDTH).requires_grad_(False)
        self.layers = nn.ModuleList(Adapted() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, WORDS).requires_grad_(train_head)

    # --8<-- [start:forward]
    def forward(self, words: torch.Tensor, reentrant: bool | None) -> torch.Tensor:
        x = self.embedding(words)  # [words, width], and it requires no gradient
        for layer in self.layers:
            x = layer(x) if reentrant is None else checkpoint(layer, x, use_reentrant=reentrant)
        return self.head(x)

    # --8<-- [end:forward]


# --8<-- [start:fix]
def require_grad(_module: nn.Module, _inputs: tuple, output: torch.Tensor) -> None:
    output.requires_grad_()  # what enable_input_require_grads() of Transformers does


# --8<-- [end:fix]


def train(reentrant: bool | None, train_head: bool, hook: bool) -> tuple[str, bool, list, list]:
    """The error of backward, whether checkpoint warned, the adapters' gradients, and the modes.

    The modes are one bool for each run of the first layer: whether autograd recorded the run.
    """
    model, modes = Model(train_head), []
    model.layers[0].register_forward_pre_hook(lambda *_: modes.append(torch.is_grad_enabled()))
    if hook:
        model.embedding.register_forward_hook(require_grad)
    words = torch.arange(WORDS)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loss = nn.functional.cross_entropy(model(words, reentrant), words.flip(0))
    said = "none"
    try:
        loss.backward()
    except RuntimeError as error:
        said = f"RuntimeError: {error}"
    warned = any("None of the inputs have requires_grad=True" in str(w.message) for w in caught)
    grads = [p.grad for layer in model.layers for p in layer.adapter.parameters()]
    return said, warned, grads, modes


def main() -> None:
    ways = {
        "use_reentrant=True": (True, False),
        "use_reentrant=True, hook": (True, True),
        "use_reentrant=False": (False, False),
    }
    for train_head in (False, True):
        said, _, truth, modes = train(None, train_head, hook=False)
        assert modes == [True]  # without checkpointing, the layer runs once
        assert said == "none" and all(grad.abs().max() > 0 for grad in truth)
        print("adapters and head are trained:" if train_head else "only adapters are trained:")
        for title, (reentrant, hook) in ways.items():
            said, warned, grads, modes = train(reentrant, train_head, hook)
            missing = sum(grad is None for grad in grads)
            result = f"{missing} of {len(grads)} gradients are None" if missing else "equal"
            print(f"  {title:24}  error: {said}")
            print(f"  {'':24}  {'warning, ' if warned else ''}adapters: {result}")
            if title == "use_reentrant=True":
                assert missing == len(grads) and warned and modes == [False]
                assert said.startswith("RuntimeError: element 0") != train_head
            else:
                assert said == "none" and not warned
                assert modes == [not reentrant, True]  # backward runs the layer again
                torch.testing.assert_close(grads, truth)


if __name__ == "__main__":
    main()
