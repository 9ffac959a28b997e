"""AOTInductor compiles an exported decode step to a library and packs it with its weights.

The loaded package needs no Python code of the model and no compiler. Its tokens equal those of
eager mode. By default it does not check its inputs, as the last lines of the output show. The
program needs a C++ compiler.
"""

import os
import shutil
import sys
import tempfile
import time

import torch
from torch import nn
from torch.nn import functional as F

MOST = 32


# --8<-- [start:model]
class DecodeStep(nn.Module):
    """Compute one block with a static cache: an embedded token [1, h], a position -> [1, h]."""

    def __init__(self, hidden=128, heads=4, layers=1) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.ModuleList(nn.Linear(hidden, 3 * hidden) for _ in range(layers))
        self.out = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(layers))

    def forward(self, x, position, cache):  # cache [layers, 2, a, MOST, d], written in place
        seen = torch.arange(MOST) <= position
        for i, (qkv, out) in enumerate(zip(self.qkv, self.out, strict=True)):
            q, k, v = qkv(F.rms_norm(x, x.shape[-1:])).view(3, self.heads, 1, -1)
            cache[i, 0].index_copy_(1, position, k)
            cache[i, 1].index_copy_(1, position, v)
            scores = (q @ cache[i, 0].mT / q.shape[-1] ** 0.5).masked_fill(~seen, -torch.inf)
            x = x + out((scores.softmax(-1) @ cache[i, 1]).view(1, -1))
        return x


# --8<-- [end:model]


def decode(step, tokens: int) -> tuple[torch.Tensor, float]:
    """Return the outputs of `tokens` steps and the seconds per step."""
    cache, x, outputs = torch.zeros(1, 2, 4, MOST, 32), torch.ones(1, 128), []
    begin = time.perf_counter()
    for at in range(tokens):
        x = step(x, torch.tensor([at]), cache)
        x = x / x.norm()
        outputs.append(x)
    return torch.cat(outputs), (time.perf_counter() - begin) / tokens


@torch.no_grad()
def main() -> None:
    if shutil.which("g++") is None:
        sys.exit("AOTInductor compiles C++: this program needs g++")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = DecodeStep().eval()
    arguments = (torch.ones(1, 128), torch.tensor([0]), torch.zeros(1, 2, 4, MOST, 32))

    # --8<-- [start:package]
    folder = tempfile.TemporaryDirectory()
    begin = time.perf_counter()
    program = torch.export.export(model, arguments)
    path = torch._inductor.aoti_compile_and_package(
        program,
        package_path=os.path.join(folder.name, "step.pt2"),
        inductor_configs={  # these options compile faster, because speed does not matter here
            "aot_inductor.compile_wrapper_opt_level": "O0",
            "aot_inductor.precompile_headers": False,
            "cpp.vec_isa_ok": False,  # without vector code; this skips a test compilation
        },
    )
    compiled = time.perf_counter() - begin
    step = torch._inductor.aoti_load_package(path)
    # --8<-- [end:package]
    size, weights = os.path.getsize(path), sum(p.nbytes for p in model.parameters())
    print(f"compiled in ≈{compiled:.0f} s to step.pt2: ≈{size / 2**20:.1f} MiB, "
          f"of which weights {weights / 2**20:.1f} MiB")  # fmt: skip
    assert size > weights

    calls = []
    model.register_forward_hook(lambda *_: calls.append(1))
    eager, _ = decode(model, MOST)
    loaded, _ = decode(step, MOST)
    assert len(calls) == MOST  # those of eager mode: the package does not call the model
    torch.testing.assert_close(loaded, eager, rtol=1e-4, atol=1e-4)
    print(f"{MOST} tokens: equal to eager mode, the cache written in place")
    x = torch.cat([arguments[0], eager[:-1]])  # the inputs of all steps, without a cache
    qkv = model.qkv[0](F.rms_norm(x, (128,))).view(1, MOST, 3, 4, 32)
    mixed = F.scaled_dot_product_attention(*qkv.permute(2, 0, 3, 1, 4), is_causal=True)
    x = x + model.out[0](mixed[0].transpose(0, 1).flatten(1))
    torch.testing.assert_close(eager, F.normalize(x), rtol=1e-4, atol=1e-4)
    rounds = [(decode(model, MOST)[1], decode(step, MOST)[1]) for _ in range(4)]
    assert len(calls) == 5 * MOST  # the eager ones
    slow, fast = (min(times) for times in zip(*rounds, strict=True))
    print(f"per token: eager ≈{1e6 * slow:.0f} µs, compiled ahead ≈{1e6 * fast:.0f} µs")

    # --8<-- [start:unchecked]
    two = torch.stack([torch.ones(128), torch.zeros(128)])
    print(f"2 tokens, where 1 was exported: a result of shape "
          f"{list(step(two, torch.tensor([0]), arguments[2]).shape)}, no error")  # fmt: skip
    first = step(two[:1], torch.tensor([0]), arguments[2])
    torch.testing.assert_close(step(two, torch.tensor([0]), arguments[2]), first)
    print("the result is that of the first token")
    os.environ["AOTI_RUNTIME_CHECK_INPUTS"] = (
        "1"  # read once, before the first run of a package
    )
    checked = torch._inductor.aoti_load_package(path)
    torch.testing.assert_close(checked(*arguments), step(*arguments))
    try:
        checked(two, torch.tensor([0]), arguments[2])
    except RuntimeError as error:
        said = str(error).partition("\n")[0].partition(" at /")[0]  # without the line in torch
        print(f"with AOTI_RUNTIME_CHECK_INPUTS=1: {said}")
    else:
        raise AssertionError("two tokens were accepted")
    # --8<-- [end:unchecked]
    folder.cleanup()


if __name__ == "__main__":
    main()
