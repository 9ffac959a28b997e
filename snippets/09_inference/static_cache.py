"""A growing cache makes torch.compile compile again; a static cache does not.

A decode step is compiled with a backend that only counts. The program tries three caches: grown
by torch.cat, grown with the length marked as dynamic, and static with the position as a tensor.
"""

import torch
import torch._dynamo
from torch.nn import functional as F

HEADS, WIDTH, MOST = 4, 16, 64


class Count:
    """A backend that counts compilations and runs the graph as it is."""

    def __init__(self) -> None:
        self.times = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list):
        self.times += 1
        return graph.forward


# --8<-- [start:grown]
def grown(q, k, v, keys, values):  # q, k, v [b, a, 1, d]; keys, values [b, a, c, d]
    keys, values = torch.cat([keys, k], 2), torch.cat([values, v], 2)
    return F.scaled_dot_product_attention(q, keys, values), keys, values


# --8<-- [end:grown]


# --8<-- [start:static]
def static(q, k, v, keys, values, position):  # keys, values [b, a, MOST, d], position [1]
    keys.index_copy_(2, position, k)
    values.index_copy_(2, position, v)
    places = torch.arange(keys.shape[2], device=q.device)
    seen = (places <= position).view(1, 1, 1, -1)  # the rest is not written yet
    return F.scaled_dot_product_attention(q, keys, values, attn_mask=seen)


# --8<-- [end:static]


def decode(way: str, tokens: torch.Tensor, **options) -> tuple[torch.Tensor, list[int]]:
    """The outputs of 12 steps, and the number of compilations after each step."""
    torch._dynamo.reset()
    backend = Count()
    step = torch.compile(static if way == "static" else grown, backend=backend, **options)
    shape = (1, HEADS, MOST, WIDTH) if way == "static" else (1, HEADS, 4, WIDTH)
    keys, values = torch.zeros(shape), torch.zeros(shape)
    keys[:, :, :4], values[:, :, :4] = tokens[1, :, :, :4], tokens[2, :, :, :4]  # the prompt
    outputs, counts = [], []
    for at in range(4, 16):
        q, k, v = (t[:, :, at : at + 1] for t in tokens)
        if way == "static":
            outputs.append(step(q, k, v, keys, values, torch.tensor([at])))
        else:
            if way == "marked":
                torch._dynamo.mark_dynamic(keys, 2)
                torch._dynamo.mark_dynamic(values, 2)
            out, keys, values = step(q, k, v, keys, values)
            outputs.append(out)
        counts.append(backend.times)
    return torch.cat(outputs, 2), counts


@torch.no_grad()
def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    tokens = torch.randn(3, 1, HEADS, 16, WIDTH)  # queries, keys, values of 16 tokens
    right = F.scaled_dot_product_attention(*tokens, is_causal=True)[:, :, 4:]
    for words, way, options in (
        ("grown by cat", "grown", {}),
        ("grown, length marked dynamic", "marked", {}),
        ("static, index_copy_", "static", {}),
    ):
        outputs, counts = decode(way, tokens, **options)
        torch.testing.assert_close(outputs, right)
        print(f"{words:29} compiled {counts}")
        assert counts[-1] == {"grown": 2, "marked": 1, "static": 1}[way]
    print("outputs equal attention over the whole, in all three")

    try:
        decode("grown", tokens, dynamic=False, fullgraph=True)
    except Exception as error:
        print(f"dynamic=False: {type(error).__name__}: {str(error).splitlines()[0]}")
    else:
        raise AssertionError("twelve lengths, and no limit was hit")
    _, counts = decode("static", tokens, dynamic=False, fullgraph=True)
    assert counts == [1] * 12
    print(f"dynamic=False, static cache: compiled {counts}")

    # a static cache cannot grow beyond its length
    keys = torch.zeros(1, HEADS, MOST, WIDTH)
    try:
        keys.index_copy_(2, torch.tensor([MOST]), tokens[1, :, :, :1])
    except (RuntimeError, IndexError) as error:
        print(f"token {MOST} of {MOST}: {type(error).__name__}: {str(error).splitlines()[0]}")
    else:
        raise AssertionError("a write beyond the cache was accepted")


if __name__ == "__main__":
    main()
