"""In a hybrid model, only the attention layers need a cache that grows with the sequence.

The program builds a small Qwen3-Next model of four layers with random weights: three layers
with the gated delta rule and one layer with attention. It decodes 32 tokens and counts the
bytes that each layer stores. It compares the logits with those of a pass over the whole
sequence. Then it compares the library's chunked delta rule with the recurrence of this chapter.
"""

import torch
from torch.nn import functional as F
from transformers import Qwen3NextConfig
from transformers.models.qwen3_next import modeling_qwen3_next as library
from transformers.utils import logging

KEY_HEADS, HEADS, WIDTH, CONV = 2, 4, 8, 4  # of a layer with the delta rule
KV_HEADS, HEAD = 2, 16  # of the layer with attention


def recurrent_delta(q, k, v, log_decay, beta):
    """Loop over tokens; q, k, v [s, d], log_decay and beta [s] -> output, last state."""
    state = q.new_zeros(k.shape[1], v.shape[1])
    outputs = []
    for t in range(len(q)):
        state = log_decay[t].exp() * state  # forget
        error = v[t] - k[t] @ state  # the new value minus what the state returns for this key
        state = state + beta[t] * torch.outer(k[t], error)
        outputs.append(q[t] @ state)
    return torch.stack(outputs), state


def layer_bytes(cache) -> list[int]:
    """The bytes of all tensors that each layer of the cache stores."""
    totals = []
    for layer in cache.layers:
        tensors, total = list(vars(layer).values()), 0
        while tensors:
            x = tensors.pop()
            if isinstance(x, torch.Tensor):
                total += x.nbytes
            elif isinstance(x, list | tuple):
                tensors += x
            elif isinstance(x, dict):
                tensors += x.values()
        totals.append(total)
    return totals


def main() -> None:
    logging.set_verbosity_error()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    config = Qwen3NextConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=4, intermediate_size=32,
        num_attention_heads=4, num_key_value_heads=KV_HEADS, head_dim=HEAD,
        linear_num_key_heads=KEY_HEADS, linear_num_value_heads=HEADS,
        linear_key_head_dim=WIDTH, linear_value_head_dim=WIDTH, linear_conv_kernel_dim=CONV,
        num_experts=0, mlp_only_layers=[0, 1, 2, 3],
    )  # fmt: skip
    model = library.Qwen3NextForCausalLM(config).eval()
    tokens = torch.randint(64, (1, 64))
    # --8<-- [start:decode]
    sizes = {}
    with torch.no_grad():
        whole = model(tokens).logits
        result = model(tokens[:, :32], use_cache=True)
        for t in range(32, 64):
            sizes[t] = layer_bytes(result.past_key_values)
            past = result.past_key_values
            result = model(tokens[:, t : t + 1], past_key_values=past, use_cache=True)
            torch.testing.assert_close(result.logits[:, -1], whole[:, t], rtol=1e-3, atol=1e-4)
        sizes[64] = layer_bytes(result.past_key_values)
    # --8<-- [end:decode]
    for n in (32, 48, 64):
        print(f"{n} tokens: bytes of layers 0 to 3: {sizes[n]}")
        assert sizes[n][3] == 2 * KV_HEADS * HEAD * 4 * n  # keys and values in fp32
    channels = (2 * KEY_HEADS + HEADS) * WIDTH  # of the short convolution
    state = 4 * HEADS * WIDTH * WIDTH + 4 * channels * CONV
    assert all(size[:3] == [state] * 3 for size in sizes.values())
    print("decoding token by token gives the logits of a pass over the whole sequence")

    q, k, v = torch.randn(3, 100, WIDTH)  # 100 tokens are more than one chunk of 64
    k = F.normalize(k, dim=-1)
    gates = F.logsigmoid(torch.randn(100) + 3), torch.rand(100)
    ours, ours_state = recurrent_delta(q * WIDTH**-0.5, k, v, *gates)
    for wrong in ((0 * gates[0], gates[1]), (gates[0], torch.ones(100))):  # both gates matter
        assert (recurrent_delta(q * WIDTH**-0.5, k, v, *wrong)[0] - ours).abs().max() > 0.1
    inputs, outputs = [x[None, :, None] for x in (q, k, v, *gates)], []
    for size in (64, 25):
        out, last = library.torch_chunk_gated_delta_rule(
            *inputs, chunk_size=size, output_final_state=True
        )
        torch.testing.assert_close(out[0, :, 0], ours, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(last[0, 0], ours_state, rtol=1e-4, atol=1e-5)
        outputs.append(out)
    assert not torch.equal(*outputs), "another chunk size rounds in another way"
    print("the library's chunked delta rule gives the output and the state of our recurrence")


if __name__ == "__main__":
    main()
