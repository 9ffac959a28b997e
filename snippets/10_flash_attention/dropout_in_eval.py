"""This program shows that model.eval() does not turn off the dropout of SDPA.

dropout_p is an argument of a function, and no module stores it. A model that passes a constant
therefore still drops attention weights during evaluation. Compare the two lines of the output.
"""

from unittest import mock

import torch
from torch import nn
from torch.nn import functional as F


# --8<-- [start:modules]
class Forgetful(nn.Module):
    def forward(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.1, is_causal=True)


class Fixed(nn.Module):
    def forward(self, q, k, v):
        p = 0.1 if self.training else 0.0
        return F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)


# --8<-- [end:modules]


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    q, k, v = (torch.randn(1, 4, 64, 16) for _ in range(3))
    eye = torch.eye(64).expand(1, 4, 64, 64)  # with these values the output is the weights
    weights = F.scaled_dot_product_attention(q, k, eye, is_causal=True)
    truth = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    for module in (Forgetful().eval(), Fixed().eval()):
        first, second = module(q, k, v), module(q, k, v)
        assert not module.training
        off = ((first - truth).norm() / truth.norm()).item()
        name = type(module).__name__
        print(f"{name:10} in eval: twice the same {torch.equal(first, second)!s:5}", end="  ")
        print(f"off by ≈{100 * off:.0f}% of the norm")
        with mock.patch.object(F, "scaled_dot_product_attention") as sdpa:
            assert module(q, k, v) is sdpa.return_value  # it returns the result of SDPA
        p = 0.1 if name == "Forgetful" else 0.0
        sdpa.assert_called_once_with(q, k, v, dropout_p=p, is_causal=True)
        assert (name == "Fixed") == torch.equal(first, second) == (off < 1e-5)
        expected = (1 / 9) ** 0.5  # each weight has the relative variance p / (1 - p)
        assert name == "Fixed" or 0.75 < off / expected < 1.33
        with_one_seed = []
        for mode, values in ((True, v), (False, v), (True, eye)):
            torch.manual_seed(1)
            with_one_seed.append(module.train(mode)(q, k, values))
        training, evaluation, dropped = with_one_seed
        # eval() changes nothing in the forgetful module, and turns off dropout in the fixed one
        assert torch.equal(training, evaluation) == (name == "Forgetful")
        # in training, both modules drop weights, and not elements of the output
        torch.testing.assert_close(training, dropped @ v)
        stays, used = dropped > 0, weights > 0
        assert (dropped * (1 - 0.1) - weights)[stays].abs().max() < 1e-6
        assert 0.87 < (stays & used).sum() / used.sum() < 0.93, "a tenth of all weights"


if __name__ == "__main__":
    main()
