"""Load the checkpoint of a quantized model.

A float model cannot load it, and a quantized model cannot load a float checkpoint. The program
shows both errors, and then loads the checkpoint with assign=True into a model without data.
"""

import io
import sys

import torch
from torch import nn

try:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_
except ImportError:
    sys.exit("this program needs torchao: pip install torchao==0.18.0")


def float_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64))


def last_line(error: Exception) -> str:
    last = str(error).strip().rpartition("\n")[2].strip()
    return last.rpartition("occurred : ")[2].strip('(),."')


def main() -> None:
    quantized = float_model()
    quantize_(quantized, Int8WeightOnlyConfig())
    file = io.BytesIO()
    torch.save(quantized.state_dict(), file)
    file.seek(0)

    # --8<-- [start:fails]
    saved = torch.load(file)
    for name, model, state in (
        ("quantized into float", float_model(), saved),
        ("float into quantized", quantized, float_model().state_dict()),
    ):
        try:
            model.load_state_dict(state)
            sys.exit(f"{name} was expected to fail")
        except RuntimeError as error:
            print(f"{name}: {last_line(error)}")
    # --8<-- [end:fails]

    # --8<-- [start:fix]
    with torch.device("meta"):
        empty = float_model()  # no memory is allocated
    assert empty[0].weight.is_meta
    empty.load_state_dict(saved, assign=True)  # the checkpoint's tensors become the parameters
    # --8<-- [end:fix]
    x = torch.randn(4, 64)
    assert torch.equal(empty(x), quantized(x))
    assert empty[0].weight.qdata.data_ptr() != quantized[0].weight.qdata.data_ptr()
    print(f"assign=True: {type(empty[0].weight).__name__}, the same output")


if __name__ == "__main__":
    main()
