"""This program attends within sequences of different lengths, without padding and masks.

A jagged nested tensor stores all tokens in one buffer and the offset of each sequence. SDPA
accepts such a tensor. On a CPU it uses the math backend, which refuses is_causal. On a GPU the
program also calls varlen_attn, which needs packed tokens and offsets.
"""

import inspect
import logging
import warnings

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn

LENGTHS, A, D = [5, 3, 9], 2, 16


class Reasons(logging.Handler):
    """Stores the messages that SDPA logs if every backend refuses a nested tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "The PyTorch API of nested tensors is in prototype")
    warnings.filterwarnings("ignore", ".* has been runtime disabled")
    cuda = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if cuda else ("cpu", torch.float32)
    room = {"rtol": 2e-2, "atol": 2e-2} if cuda else {"rtol": 1e-4, "atol": 1e-5}
    parts = [torch.randn(n, A, D, device=device, dtype=dtype) for n in LENGTHS]  # [s, a, d]

    def alone(x: torch.Tensor, causal: bool) -> torch.Tensor:
        x = x.transpose(0, 1)[None]  # [1, a, s, d]
        return F.scaled_dot_product_attention(x, x, x, is_causal=causal)[0].transpose(0, 1)

    for part in parts:  # a causal first token sees itself alone
        torch.testing.assert_close(alone(part, causal=True)[0], part[0], **room)

    # --8<-- [start:nested]
    jagged = torch.nested.nested_tensor(parts, layout=torch.jagged)  # [3, j, a, d]
    x = jagged.transpose(1, 2)  # [3, a, j, d]
    out = F.scaled_dot_product_attention(x, x, x).transpose(1, 2)
    # --8<-- [end:nested]
    for piece, part in zip(out.unbind(), parts, strict=True):
        torch.testing.assert_close(piece, alone(part, causal=False), **room)
    print(f"jagged: {list(jagged.values().shape)} values, offsets {jagged.offsets().tolist()}")
    print("SDPA of the nested tensor equals SDPA of each sequence")

    backends = [SDPBackend.MATH]  # of the others a CUDA build asks its driver, GPU or not
    if cuda:
        backends += [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
    logger, reasons = logging.getLogger("torch.nested._internal.sdpa"), Reasons()
    logger.addHandler(reasons)
    logger.propagate = False
    try:
        with sdpa_kernel(backends):
            out = F.scaled_dot_product_attention(x, x, x, is_causal=True).transpose(1, 2)
        for piece, part in zip(out.unbind(), parts, strict=True):
            torch.testing.assert_close(piece, alone(part, causal=True), **room)
        print("causal: equal to each sequence here, too")
    except RuntimeError as error:
        print(f"causal: {error}")
        print("   ", next(text for text in reasons.said if "not supported" in text))

    # --8<-- [start:varlen]
    tokens = torch.cat(parts)  # [sum of lengths, a, d]
    starts = jagged.offsets().int()  # cu_seq: 0, 5, 8, 17
    longest = max(LENGTHS)
    causal = {"window_size": (-1, 0)}  # all keys to the left, none to the right
    if "is_causal" in inspect.signature(varlen_attn).parameters:  # its first releases
        causal = {"is_causal": True}

    def packed_causal() -> torch.Tensor:
        return varlen_attn(tokens, tokens, tokens, starts, starts, longest, longest, **causal)

    # --8<-- [end:varlen]
    try:
        out = packed_causal()
        torch.testing.assert_close(out, torch.cat([alone(x, True) for x in parts]), **room)
        print("varlen_attn: equal, causal")
    except NotImplementedError as error:
        assert not cuda
        print(f"varlen_attn: {type(error).__name__}: {str(error).split('.')[0]}")


if __name__ == "__main__":
    main()
