"""Linear attention gives the same result in its recurrent, parallel and chunked form.

The recurrent form updates a state of d x d numbers for each token. The parallel form computes
a masked matrix of s x s scores. The chunked form computes scores inside a chunk and keeps a
state between chunks. All forms include a decay. The program compares outputs, gradients and
counted FLOPs. With chunks of one token, the chunked form needs 6% more FLOPs than the recurrent
form. With one chunk of s tokens, it needs 12.5% more than the parallel form, because it also
updates the state. At the end, the program shows why the decay is written as a difference of
logarithms: the ratio of two products of decays can divide zero by zero.
"""

import torch
from torch.utils.flop_counter import FlopCounterMode

S, D = 128, 16  # tokens and head width


# --8<-- [start:forms]
def recurrent_form(q, k, v, log_decay):
    """Loop over tokens; q, k, v [s, d] and log_decay [s] -> output [s, d]."""
    state = q.new_zeros(k.shape[1], v.shape[1])
    outputs = []
    for t in range(len(q)):
        state = log_decay[t].exp() * state + k[t, :, None] @ v[t, None, :]
        outputs.append(q[t, None, :] @ state)
    return torch.cat(outputs)


def decay_matrix(log_decay):
    """Entry [i, j] is the product of the decays of tokens j + 1 to i, or 0 if j > i."""
    total = log_decay.cumsum(0)
    difference = total[:, None] - total[None, :]
    later = torch.ones_like(difference).triu(1).bool()
    return difference.masked_fill(later, -torch.inf).exp()


def parallel_form(q, k, v, log_decay):
    """Process all tokens at the same time with a matrix of scores [s, s], without softmax."""
    return (q @ k.T * decay_matrix(log_decay)) @ v


def chunked_form(q, k, v, log_decay, size):
    """Use scores inside each chunk of `size` tokens and a state [d, d] between chunks."""
    state = q.new_zeros(k.shape[1], v.shape[1])
    outputs = []
    for part in torch.arange(len(q)).split(size):
        q_c, k_c, v_c, total = q[part], k[part], v[part], log_decay[part].cumsum(0)
        inside = (q_c @ k_c.T * decay_matrix(log_decay[part])) @ v_c
        before = total.exp()[:, None] * (q_c @ state)  # what earlier chunks contribute
        outputs.append(inside + before)
        to_end = (total[-1] - total).exp()  # the decay from each token to the chunk's end
        state = total[-1].exp() * state + (k_c * to_end[:, None]).T @ v_c
    return torch.cat(outputs)


# --8<-- [end:forms]


def by_definition(q, k, v, log_decay):
    """A loop over pairs of tokens in float64, which shares no code with the three forms."""
    q, k, v, decay = q.double(), k.double(), v.double(), log_decay.double().exp()
    out = torch.zeros_like(v)
    for i in range(len(q)):
        weight = 1.0
        for j in range(i, -1, -1):
            out[i] += weight * q[i].dot(k[j]) * v[j]
            weight = weight * decay[j]
    return out


def run(function, inputs, upstream, *size):
    """The output, the four gradients, and the FLOPs of the forward pass."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    with FlopCounterMode(display=False) as counter:
        out = function(*leaves, *size)
    return out.detach(), torch.autograd.grad(out, leaves, upstream), counter.get_total_flops()


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    small = [torch.randn(16, D, dtype=torch.float64) for _ in range(3)]
    decay = torch.nn.functional.logsigmoid(torch.randn(16, dtype=torch.float64))
    truth = by_definition(*small, decay)
    for form in (
        recurrent_form,
        parallel_form,
        lambda *x: chunked_form(*x, 7),  # 16 tokens: the last chunk has only 2
    ):
        torch.testing.assert_close(form(*small, decay), truth)
    without = by_definition(*small, torch.zeros(16))
    assert (truth - without).abs().max() > 1, "the decay must matter"

    inputs = [torch.randn(S, D, dtype=torch.float64) / D**0.25 for _ in range(3)]
    inputs.append(torch.nn.functional.logsigmoid(torch.randn(S, dtype=torch.float64) + 3))
    upstream = torch.randn(S, D, dtype=torch.float64)
    wanted = run(recurrent_form, inputs, upstream)
    print(f"{S} tokens, heads of {D}: FLOPs in matrix products, forward")
    print(f"recurrent: {wanted[2]:>9,}")
    for name, form, size in (
        ("parallel", parallel_form, ()),
        ("chunks of 1", chunked_form, (1,)),
        ("chunks of 16", chunked_form, (16,)),
        ("chunks of 64", chunked_form, (64,)),
        (f"one chunk of {S}", chunked_form, (S,)),
    ):
        out, gradients, flops = run(form, inputs, upstream, *size)
        torch.testing.assert_close(out, wanted[0])
        torch.testing.assert_close(gradients, wanted[1])
        per_pair = 4 * S * (size[0] if size else S) * D  # two products inside the chunks
        assert flops == per_pair + (4 * S * D * D if size else 0)
        print(f"{name}: {flops:>9,}")
    assert wanted[2] == 4 * S * D * D
    print("outputs and gradients are equal in all forms")

    strong = torch.full((S,), -1.0)  # in fp32: each token keeps 37% of the state
    total = strong.cumsum(0)
    ratio = (total.exp()[:, None] / total.exp()[None, :]).tril()
    exact = decay_matrix(strong)
    bad = int(ratio.isnan().sum())
    zeros = int((total.exp() == 0).sum())  # products that underflow
    assert bad == zeros * (zeros + 1) // 2 > 0
    assert exact.isfinite().all() and exact.diagonal().eq(1).all()
    print(f"decay as a ratio of products: {bad:,} entries are NaN; as exp(a - b): 0")


if __name__ == "__main__":
    main()
