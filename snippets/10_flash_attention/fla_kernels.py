"""The kernels of flash-linear-attention give the results of the recurrences of this chapter.

On a GPU, the program runs the library's recurrent and chunked kernels. Without a GPU, Triton's
interpreter runs the recurrent kernels. The interpreter of Triton 3.7 cannot run the chunked
kernels of fla-core 0.6.0, so the program prints the error and compares only the recurrent ones.

The program needs fla-core: pip install -r requirements/fla.txt
"""

import os
import warnings

import torch

GPU = torch.cuda.is_available()
if not GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
    warnings.filterwarnings("ignore", message="Triton is not supported")

from fla.ops.gated_delta_rule import (  # noqa: E402
    chunk_gated_delta_rule,
    fused_recurrent_gated_delta_rule,
)
from fla.ops.simple_gla import chunk_simple_gla, fused_recurrent_simple_gla  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from triton.runtime.autotuner import Autotuner  # noqa: E402

S, D = 96, 16  # tokens and head width


def reference(q, k, v, log_decay, beta=None):
    """Linear attention with decay in float64, or the gated delta rule if `beta` is given."""
    q, k, v, log_decay = (x.double().cpu() for x in (q, k, v, log_decay))
    state, outputs = torch.zeros(D, D, dtype=torch.float64), []
    for t in range(S):
        state = log_decay[t].exp() * state
        value = v[t] if beta is None else beta[t].double().cpu() * (v[t] - k[t] @ state)
        state = state + torch.outer(k[t], value)
        outputs.append(q[t] @ state)
    return torch.stack(outputs)


def main() -> None:
    torch.manual_seed(0)
    device = torch.device("cuda" if GPU else "cpu")
    if not GPU:  # without a driver the autotuner cannot measure: it takes the first choice
        Autotuner.do_bench = lambda self, call, quantiles: [0.0] * 3
    q, k, v = torch.randn(3, S, D, device=device)
    k = F.normalize(k, dim=-1)
    log_decay, beta = (
        F.logsigmoid(torch.randn(S, device=device) + 2),
        torch.rand(S, device=device),
    )
    wide = [x[None, :, None] for x in (q, k, v)]  # [batch, tokens, heads, d]
    gate, rate = log_decay[None, :, None], beta[None, :, None]
    wanted = {
        "linear": reference(q, k, v, log_decay),
        "delta": reference(q, k, v, log_decay, beta),
    }
    assert (wanted["linear"] - wanted["delta"]).abs().max() > 0.5

    calls = {
        "fused_recurrent_simple_gla": ("linear", fused_recurrent_simple_gla, {}),
        "fused_recurrent_gated_delta_rule": (
            "delta",
            fused_recurrent_gated_delta_rule,
            {"beta": rate},
        ),
        "chunk_simple_gla": ("linear", chunk_simple_gla, {}),
        "chunk_gated_delta_rule": ("delta", chunk_gated_delta_rule, {"beta": rate}),
    }
    for name, (rule, function, more) in calls.items():
        try:
            out, _ = function(*wide, g=gate, scale=1.0, **more)
        except Exception as error:  # from the interpreter; on a GPU, every error is a failure
            if GPU or not name.startswith("chunk"):
                raise
            print(f"{name}: {type(error).__name__}: {error}")
            continue
        tolerance = 2e-2 if GPU else 1e-4  # tensor cores round the operands
        difference = (out[0, :, 0].double().cpu() - wanted[rule]).abs().max().item()
        assert difference < tolerance * wanted[rule].abs().max(), (name, difference)
        print(f"{name}: equal to the recurrence in float64")


if __name__ == "__main__":
    main()
