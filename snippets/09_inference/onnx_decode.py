"""ONNX Runtime runs the exported decoder and agrees with eager mode at several lengths.

The ONNX file contains a graph of operators that ONNX defines, so the runtime does not need
torch. A text that is longer than the table of positions raises an error.
"""

import importlib.util
import sys
import tempfile
from collections import Counter

import torch
from torch import nn
from torch.nn import functional as F


class Decoder(nn.Module):
    """The model of export_decode.py: ids [b, s] -> logits of the next token [b, v]."""

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


@torch.no_grad()
def main() -> None:
    for package in ("onnx", "onnxscript", "onnxruntime"):
        if importlib.util.find_spec(package) is None:
            sys.exit(f"this program needs the package {package}")
    import onnxruntime

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Decoder().eval()
    with tempfile.TemporaryDirectory() as folder:
        # --8<-- [start:onnx]
        batch, length = torch.export.Dim("batch", max=64), torch.export.Dim("length", max=64)
        program = torch.onnx.export(
            model, (torch.randint(37, (2, 16)),), dynamo=True, verbose=False,
            dynamic_shapes=({0: batch, 1: length},),
        )  # fmt: skip
        program.save(f"{folder}/decoder.onnx")
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        session = onnxruntime.InferenceSession(
            f"{folder}/decoder.onnx", options, providers=["CPUExecutionProvider"]
        )
        (name,) = (entry.name for entry in session.get_inputs())
        texts = [torch.randint(37, shape) for shape in ((2, 16), (1, 1), (3, 64))]
        eager = [model(ids) for ids in texts]
        truth = [last_logits(model, ids) for ids in texts]
        for weight in model.parameters():
            weight.zero_()  # from here on, only the file contains the weights
        for ids, *expected in zip(texts, eager, truth, strict=True):
            (logits,) = session.run(None, {name: ids.numpy()})
            for each in expected:
                torch.testing.assert_close(torch.from_numpy(logits), each, rtol=1e-4, atol=1e-4)
            print(f"{ids.shape[0]} × {ids.shape[1]:2} tokens: equal to eager mode")
        # --8<-- [end:onnx]
        operators = Counter(node.op_type for node in program.model.graph)
        products = operators["MatMul"] + operators["Gemm"]
        print(f"≈{sum(operators.values())} nodes of ≈{len(operators)} kinds; "
              f"products among them: {products > 0}")  # fmt: skip
        assert products > 0
        try:
            session.run(None, {name: torch.zeros(1, 65, dtype=torch.long).numpy()})
        except Exception as error:
            print(f"65 tokens, beyond the table: {type(error).__name__}")
        else:
            raise AssertionError("65 tokens were accepted")


if __name__ == "__main__":
    main()
