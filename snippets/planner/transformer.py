"""Parameters and FLOPs of a transformer from its shape, held to published parameter counts.

Grouped-query attention, gated or plain MLP, experts, tied embeddings. Two conventions of
counting FLOPs are in use and both are here: `6N`, all parameters at six FLOPs a token (Kaplan
et al.), and the products that are really done, with attention's scores. A causal mask halves
the scores for who counts work (FlashAttention, this planner) and not for who counts MFU as
PaLM, Megatron-LM and nanotron do. Sections: 01, "Six FLOPs for every parameter and token"; 03
Tensor parallelism, "The bill, with a pencil".
"""

from dataclasses import dataclass


# --8<-- [start:Shape]
@dataclass(frozen=True)
class Shape:
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int  # width of one expert's MLP
    vocabulary: int
    tied: bool = False  # the head uses the embedding's matrix
    gated: bool = True  # three matrices in the MLP, else two
    experts: int = 1
    active: int = 1  # experts a token visits
    head_dim: int = 0  # hidden / heads where it is not said

    @property
    def attention_width(self) -> int:
        """Elements of all queries of a token."""
        return self.heads * (self.head_dim or self.hidden // self.heads)

    @property
    def kv_width(self) -> int:
        """Elements of all keys of a token, and of all values."""
        return self.attention_width // self.heads * self.kv_heads


def layer_matrices(shape: Shape, experts: int) -> int:
    """Elements of the matrices of one layer with so many experts, without the router."""
    attention = shape.hidden * (2 * shape.attention_width + 2 * shape.kv_width)
    return attention + experts * (3 if shape.gated else 2) * shape.hidden * shape.ffn


def parameters(shape: Shape, active: bool = False) -> int:
    """All parameters, or those that a token meets."""
    experts = shape.active if active else shape.experts
    router = shape.hidden * shape.experts if shape.experts > 1 else 0
    layer = layer_matrices(shape, experts) + router + 2 * shape.hidden  # two norms
    ends = (1 if shape.tied else 2) * shape.vocabulary * shape.hidden
    return shape.layers * layer + ends + shape.hidden


def flops_per_token(shape: Shape, sequence: int, causal: bool = True) -> float:
    """Forward and backward of one token: products and scores; the embedding is no product."""
    products = shape.layers * layer_matrices(shape, shape.active)
    products += shape.vocabulary * shape.hidden
    scores = shape.layers * 2 * shape.attention_width * sequence / (2 if causal else 1)
    return 6 * (products + scores)


# --8<-- [end:Shape]


PUBLISHED = {  # in billions, as the model cards and papers say
    "Llama 3 8B": (Shape(32, 4096, 32, 8, 14336, 128256), 8.03),
    "Llama 3 70B": (Shape(80, 8192, 64, 8, 28672, 128256), 70.6),
    "Llama 3 405B": (Shape(126, 16384, 128, 8, 53248, 128256), 406),
    "Mixtral 8x7B": (Shape(32, 4096, 32, 8, 14336, 32000, experts=8, active=2), 46.7),
}


def main() -> None:
    print("parameters, by formula and published; FLOPs a token at s = 8,192 over 6N")
    for name, (shape, published) in PUBLISHED.items():
        count = parameters(shape) / 1e9
        assert abs(count / published - 1) < 0.003, name
        six = 6 * parameters(shape, active=True)
        half, whole = (flops_per_token(shape, 8192, causal) / six for causal in (True, False))
        assert 0.9 < half < whole < 1.6
        print(
            f"{name:13} {count:6.2f} B, published {published:6.2f} B; causal {half:.2f}", end=""
        )
        print(f", without the half {whole:.2f}")
    # Narayanan et al. (2021), equation (3), has 72 B s l h^2 (1 + s/6h + V/12lh) where nothing
    # is recomputed, and its MLP is plain with f = 4h
    layers, h, s, v = 24, 2304, 2048, 51200
    theirs = 72 * layers * h * h * (1 + s / (6 * h) + v / (12 * layers * h))
    ours = flops_per_token(Shape(layers, h, 24, 24, 4 * h, v, gated=False), s, causal=False)
    assert abs(ours / theirs - 1) < 1e-9
    print(f"Megatron-LM's formula for its 1.7B model: {theirs:.4g}, this one: {ours:.4g}")


if __name__ == "__main__":
    main()
