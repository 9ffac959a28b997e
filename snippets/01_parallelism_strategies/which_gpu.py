"""Computes the memory of several models, and how many GPUs of each kind they need at least.

Training must store the state, which has 16 bytes per parameter, and the activations of at least
one sequence. With fused attention, the activations are 34sbh bytes per layer. With full
recomputation, they are 2sbh bytes per layer and 34sbh bytes for one layer. The last columns
divide the sum by the memory of a GPU. The result is the smallest number of GPUs, if everything
could be cut evenly. The sizes are those of Table 1 in Narayanan et al. (2021), of GPT-3 and of
Table 3 in the Llama 3 paper. The memory is from the datasheets of the vendors.
"""

import math
from dataclasses import dataclass

GPUS = {"RTX 4090": 24e9, "H100": 80e9, "H200": 141e9, "MI300X": 192e9}  # bytes
BYTES_PER_PARAMETER = 16


@dataclass
class Model:
    name: str
    parameters: float
    layers: int
    hidden: int
    sequence: int

    def state(self) -> float:
        """Bytes of the parameters, the gradients and the state of Adam."""
        return BYTES_PER_PARAMETER * self.parameters

    def activations(self, recompute: bool) -> float:
        """Bytes that one sequence keeps for backward, in 16 bits with fused attention."""
        layer_input = 2 * self.sequence * self.hidden
        layer = 34 * self.sequence * self.hidden
        return self.layers * layer_input + layer if recompute else self.layers * layer


MODELS = [
    Model("GPT 1.7B", 1.7e9, 24, 2304, 2048),
    Model("GPT 7.5B", 7.5e9, 36, 4096, 2048),
    Model("Llama 3 8B", 8e9, 32, 4096, 8192),
    Model("Llama 3 70B", 70e9, 80, 8192, 8192),
    Model("GPT-3 175B", 175e9, 96, 12288, 2048),
    Model("Llama 3 405B", 405e9, 126, 16384, 8192),
]


def main() -> None:
    largest = ", ".join(
        f"{name} {memory / BYTES_PER_PARAMETER / 1e9:.1f}" for name, memory in GPUS.items()
    )
    print(f"billions of parameters whose state alone fills one GPU: {largest}")
    print()
    print(f"{'':13}    state  one sequence of activations  GPUs that could hold it")
    print(f"{'':13}       GB     kept GB  recomputed GB    ", end="")
    print("".join(f"{name:>10}" for name in GPUS))
    for model in MODELS:
        kept, recomputed = model.activations(False), model.activations(True)
        fewest = [math.ceil((model.state() + recomputed) / memory) for memory in GPUS.values()]
        print(
            f"{model.name:13}  {model.state() / 1e9:7.0f}  {kept / 1e9:10.1f}  "
            f"{recomputed / 1e9:13.1f}    " + "".join(f"{count:10}" for count in fewest)
        )


if __name__ == "__main__":
    main()
