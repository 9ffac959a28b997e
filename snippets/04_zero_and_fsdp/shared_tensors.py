"""Some tensors share memory: safetensors refuses tied weights, and slices of one tensor.

A safetensors file stores each tensor on its own and cannot store that two names belong to one
tensor. Here the output layer of a model uses the weight of its embedding, so both names of its
state dict point to the same memory, and `save_file` refuses it.

    (no flag)    the error, for tied weights and for slices of one tensor
    --fix        save_model and load_model for tied weights, clone() for a slice; and what
                 happens to tied weights if they are cloned

Needs: pip install safetensors
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

try:
    from safetensors.torch import load_file, load_model, save_file, save_model
except ImportError:
    sys.exit("this program needs: pip install safetensors")

VOCABULARY, WIDTH = 256, 32


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight  # one parameter with two names


def refusal(tensors: dict, path: Path) -> str:
    """The sentence of the error that save_file raises."""
    try:
        save_file(tensors, path)
    except RuntimeError as error:
        return str(error).strip().splitlines()[0].split(":")[0]
    raise AssertionError("save_file accepted tensors that share memory")


# --8<-- [start:error]
def errors(folder: Path) -> None:
    tied = Tied().state_dict()
    whole = torch.randn(8, 4)
    overlapping = {"whole": whole, "first rows": whole[:2]}
    for what, tensors in (("tied weights", tied), ("a tensor and its slice", overlapping)):
        print(f"{what}: {', '.join(tensors)}")
        print(f"   RuntimeError: {refusal(tensors, folder / 'refused.safetensors')}")


# --8<-- [end:error]


# --8<-- [start:fixes]
def fixes(folder: Path) -> None:
    model, path = Tied(), folder / "model.safetensors"
    save_model(model, path)  # writes one of the two names
    again = Tied()
    load_model(again, path)  # fills the parameter that both names share
    report("save_model", path, model, again)

    copies = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    save_file(copies, path)
    untied = Tied()
    untied.head.weight = nn.Parameter(torch.empty(VOCABULARY, WIDTH))  # a model without the tie
    untied.load_state_dict(load_file(path))
    report("clone, for tied weights", path, model, untied)

    whole = torch.randn(8, 4)
    save_file({"whole": whole, "first rows": whole[:2].clone()}, path)
    parts = load_file(path)
    same = torch.equal(parts["whole"], whole) and torch.equal(parts["first rows"], whole[:2])
    print(f"clone, for a slice: {len(parts)} tensors, equal to the original: {same}")
    assert same
    halves = {"first rows": whole[:2], "other rows": whole[2:]}  # they do not overlap
    assert len({half.untyped_storage().data_ptr() for half in halves.values()}) == 1
    save_file(halves, path)
    parts = load_file(path)
    same = torch.equal(torch.cat([parts["first rows"], parts["other rows"]]), whole)
    print(f"slices that do not overlap: no error, equal to the original: {same}")
    assert same and len(parts) == 2


# --8<-- [end:fixes]


def report(what: str, path: Path, model: Tied, loaded: Tied) -> None:
    """Compare the loaded model with the saved one, before and after one step of the loss."""
    stored, size = load_file(path), VOCABULARY * WIDTH * 4
    tensors = round(os.path.getsize(path) / size)
    assert tensors == len(stored), "the file holds one copy for each name"
    for name, value in model.state_dict().items():
        assert torch.equal(value, loaded.state_dict()[name]), name
    with torch.no_grad():
        loaded.embedding.weight += 1  # what an optimizer does to this name
    assert not torch.equal(loaded.embedding.weight, model.embedding.weight)  # another model
    tie = torch.equal(loaded.head.weight, loaded.embedding.weight)
    assert tie == (what == "save_model")
    copies = "1 copy" if tensors == 1 else f"{tensors} copies"
    print(f"{what}: {copies} in the file; still tied after an update: {tie}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fix", action="store_true")
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        (fixes if parser.parse_args().fix else errors)(Path(folder))


if __name__ == "__main__":
    main()
