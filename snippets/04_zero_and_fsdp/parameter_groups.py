"""An optimizer state that does not fit the optimizer: two errors, and one silent loss.

A run trains the head of a model while the backbone is frozen. Later it adds the backbone to
the optimizer. The checkpoint is from the first part of the run. `load_state_dict` compares the
number of parameter groups and the number of parameters in each group, and nothing else:

    (no flag)    three ways to load the state that are wrong; the third one raises no error
    --fix        build the optimizer as it was when the state was saved, or load by names

Each resumed run is compared with the run that was never interrupted.
"""

import argparse
import copy

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

WIDTH, BEFORE, AFTER = 8, 20, 3  # features, steps before the save, steps after it


class PartlyFrozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.backbone, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.backbone(x)))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, steps: int) -> list:
    """The losses of some steps. The batch depends only on the number of the step."""
    losses = []
    for step in range(first, first + steps):
        x = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(step))
        loss = nn.functional.mse_loss(model(x), x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def adam(*layers: nn.Module) -> torch.optim.Adam:
    """One parameter group with the parameters of these layers, in this order."""
    return torch.optim.Adam([p for layer in layers for p in layer.parameters()], lr=1e-2)


def resumed(checkpoint: dict) -> PartlyFrozen:
    model = PartlyFrozen()
    model.load_state_dict(checkpoint["model"])
    return model


# --8<-- [start:wrong]
def all_at_once(model: PartlyFrozen, state: dict) -> torch.optim.Optimizer:
    optimizer = adam(model.backbone, model.head)  # four parameters; the state has two
    optimizer.load_state_dict(state)
    return optimizer


def groups_first(model: PartlyFrozen, state: dict) -> torch.optim.Optimizer:
    optimizer = adam(model.head)
    optimizer.add_param_group({"params": model.backbone.parameters()})  # too early
    optimizer.load_state_dict(state)
    return optimizer


def other_layer(model: PartlyFrozen, state: dict) -> torch.optim.Optimizer:
    optimizer = adam(model.backbone)  # two parameters, as in the state, but not the same two
    optimizer.load_state_dict(state)
    optimizer.add_param_group({"params": model.head.parameters()})
    return optimizer


# --8<-- [end:wrong]


# --8<-- [start:right]
def as_saved(model: PartlyFrozen, state: dict) -> torch.optim.Optimizer:
    optimizer = adam(model.head)  # as it was when the state was saved
    optimizer.load_state_dict(state)
    optimizer.add_param_group({"params": model.backbone.parameters()})
    return optimizer


def by_name(model: PartlyFrozen, state: dict) -> torch.optim.Optimizer:
    optimizer = adam(model.backbone, model.head)  # the state is from (head, backbone)
    set_optimizer_state_dict(model, optimizer, state)
    return optimizer


# --8<-- [end:right]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fix", action="store_true")
    fix = parser.parse_args().fix

    model = PartlyFrozen()
    model.backbone.requires_grad_(False)
    optimizer = adam(model.head)
    train(model, optimizer, 0, BEFORE)
    early = copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    model.backbone.requires_grad_(True)
    optimizer.add_param_group({"params": model.backbone.parameters()})
    truth = train(model, optimizer, BEFORE, AFTER)

    full = resumed(early)  # a second run, whose optimizer has all parameters in one group
    optimizer = adam(full.head, full.backbone)
    train(full, optimizer, 0, BEFORE)
    names = get_optimizer_state_dict(full, optimizer)
    numbers = copy.deepcopy(optimizer.state_dict())
    late = copy.deepcopy({"model": full.state_dict(), "optimizer": names})
    late_truth = train(full, optimizer, BEFORE, AFTER)

    if fix:
        cases = [("as it was saved, then add_param_group", as_saved, early, truth)]
        cases += [("by name, in a different order", by_name, late, late_truth)]
    else:
        cases = [("1. all parameters at once", all_at_once, early, truth)]
        cases += [("2. add_param_group before the load", groups_first, early, truth)]
        cases += [("3. a different layer of the same size", other_layer, early, truth)]
    outcomes = []
    for what, load, checkpoint, expected in cases:
        network = resumed(checkpoint)
        try:
            optimizer = load(network, checkpoint["optimizer"])
        except ValueError as error:
            print(f"{what}:\n   ValueError: {error}")
            outcomes.append(str(error).split(" group")[0])
            continue
        if load is other_layer:  # the backbone has the moments of the head
            moment = optimizer.state[network.backbone.weight]["exp_avg"]
            assert torch.equal(moment, checkpoint["optimizer"]["state"][0]["exp_avg"])
        losses = train(network, optimizer, BEFORE, AFTER)
        assert losses[0] == expected[0], "the parameters are those of the checkpoint"
        print(f"{what}: no error, continues as before: {losses == expected}")
        outcomes.append(losses == expected)

    contains = "loaded state dict contains a parameter"
    number = "loaded state dict has a different number of parameter"
    assert outcomes == ([True, True] if fix else [contains, number, False])
    # The two orders differ: loaded by number, the last checkpoint continues differently.
    other = resumed(late)
    assert list(by_name(other, late["optimizer"]).param_groups[0]["params"]) == [
        *other.backbone.parameters(), *other.head.parameters()
    ]  # fmt: skip
    optimizer = adam(other.backbone, other.head)
    optimizer.load_state_dict(numbers)
    assert train(other, optimizer, BEFORE, AFTER) != late_truth
    new = resumed(early)  # the control: without the state, the run must continue differently
    assert train(new, adam(new.head, new.backbone), BEFORE, AFTER) != truth


if __name__ == "__main__":
    main()
