"""torch.export turns a model into one graph that needs no Python code of the model.

Every dimension that is not declared dynamic becomes a constant. The program shows three errors:
a length that is a constant of the graph, a declared range of lengths that the model does not
support, and a Python `if` that depends on the value of a tensor.
"""

import io
from unittest.mock import patch

import torch
from torch import nn
from torch.export import Dim, export
from torch.nn import functional as F


# --8<-- [start:model]
class Decoder(nn.Module):
    """A model of one block: ids [b, s] -> logits of the next token [b, v]."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(37, 64), nn.Embedding(64, 64)
        self.qkv, self.head = nn.Linear(64, 192), nn.Linear(64, 37)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.token(ids) + self.position.weight[: ids.shape[1]]
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 16)).unbind(-3)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.head((x + mixed.transpose(1, 2).flatten(2))[:, -1])


# --8<-- [end:model]


# --8<-- [start:broken]
class Halves(Decoder):
    def forward(self, ids):  # works only for an even number of tokens
        return super().forward(ids.unflatten(1, (2, -1)).flatten(1))


class Stops(Decoder):
    def forward(self, ids):
        logits = super().forward(ids)
        if logits.max() > 100:  # Python needs a value that does not exist yet
            return logits / 2
        return logits


class StopsNot(Decoder):
    def forward(self, ids):
        logits = super().forward(ids)
        return torch.where(logits.max() > 100, logits / 2, logits)


# --8<-- [end:broken]


def last_logits(model: Decoder, ids: torch.Tensor) -> torch.Tensor:
    """Compute the logits [b, v] from the weights, in float64 and head by head."""
    w = {name: weight.double() for name, weight in model.named_parameters()}
    rows = []
    for row in ids:
        x = w["token.weight"][row] + w["position.weight"][: len(row)]
        q, k, v = (x @ w["qkv.weight"].T + w["qkv.bias"]).split(64, -1)
        mixed = x[-1].clone()
        for head in (slice(at, at + 16) for at in range(0, 64, 16)):
            share = (k[:, head] @ q[-1, head] / 4).exp()
            mixed[head] += share @ v[:, head] / share.sum()
        rows.append(w["head.weight"] @ mixed + w["head.bias"])
    return torch.stack(rows).float()


def words(error: Exception, *looked_for: str) -> str:
    """Return the line of the error message that contains one of the words."""
    lines = [line.strip() for line in str(error).splitlines()]
    line = next(line for line in lines if any(w in line for w in looked_for))
    return line.partition(" Eq(")[0]  # what follows differs between versions


@torch.no_grad()
def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Decoder().eval()
    example, longer = torch.randint(37, (2, 16)), torch.randint(37, (2, 40))

    # --8<-- [start:dynamic]
    batch, length = Dim("batch", min=1, max=64), Dim("length", min=2, max=64)
    program = export(model, (example,), dynamic_shapes=({0: batch, 1: length},))
    graph = program.module()
    for ids in (example, longer, longer[:1]):
        torch.testing.assert_close(graph(ids), model(ids))
    print("dynamic: equal to the model for 2 × 16, 2 × 40 and 1 × 40 tokens")

    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    torch.testing.assert_close(loaded(longer), model(longer))
    print("saved and loaded: equal; the class Decoder is not in the file")
    # --8<-- [end:dynamic]
    torch.testing.assert_close(model(longer), last_logits(model, longer), rtol=1e-4, atol=1e-4)
    assert loaded.head.weight.data_ptr() != model.head.weight.data_ptr(), "nothing was loaded"
    truth = model(longer)
    with patch.object(Decoder, "forward", None):  # neither graph needs the code of the class
        for each in (graph, loaded):
            torch.testing.assert_close(each(longer), truth)

    fixed = export(model, (example,)).module()
    for name, work, looked_for in (
        ("a length that differs from the example", lambda: fixed(longer),
         ("Guard", "Expected")),
        ("a length outside the declared range", lambda: graph(
            torch.zeros(1, 65, dtype=torch.long)), ("Guard", "Expected")),
        ("only even lengths work, but any is declared", lambda: export(
            Halves(), (example,), dynamic_shapes=({1: length},)), ("Not all values",
            "must be", "specialized", "violated")),
        ("an if on the value of a tensor", lambda: export(Stops(), (example,)),
         ("data-dependent", "Data-dependent")),
    ):  # fmt: skip
        try:
            work()
        except Exception as error:
            print(f"{name}: {type(error).__name__}")
            print(f"  {words(error, *looked_for)}")
            if name.startswith("only even"):
                assert "% 2" in str(error) and "length = 2*_length" in str(error)
                print("  and further down: length = 2*_length")
        else:
            raise AssertionError(f"{name}: no error")
    fixed, plain = export(StopsNot(), (example,)).module(), Decoder()
    for scale, part in ((1, 1), (1e4, 0.5)):  # logits below 100, and above
        fixed.head.weight.mul_(scale)
        plain.load_state_dict(fixed.state_dict())
        assert (plain(example).max() > 100) == (scale > 1)
        with patch.object(StopsNot, "forward", None):
            torch.testing.assert_close(fixed(example), part * plain(example))
    print("torch.where instead of if: exported, and equal on both sides of the limit")


if __name__ == "__main__":
    main()
