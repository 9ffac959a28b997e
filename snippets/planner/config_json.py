"""Read the shape of a model from the config.json that Hugging Face publishes with it.

    python config_json.py path/config.json

The program reads only architectures with layers that the planner can count: one norm before
attention and one before the MLP, a gated MLP, and experts of equal size. It does not count
biases and the norms of queries and keys, which are 0.002% of the parameters of Qwen 2.5 7B.
Without arguments the program compares the parameter counts of nine models with the counts of
their published files.
"""

import json
import sys
from pathlib import Path

from transformer import Shape, parameters

SUPPORTED = {  # for each architecture: the field with its number of experts
    "LlamaForCausalLM": None,
    "MistralForCausalLM": None,
    "Qwen2ForCausalLM": None,
    "Qwen3ForCausalLM": None,
    "MixtralForCausalLM": "num_local_experts",
    "Qwen3MoeForCausalLM": "num_experts",
}


class Unreadable(ValueError):
    """One sentence that says why a file gives no shape."""


# --8<-- [start:read]
def shape_of(config: dict) -> Shape:
    """The shape that a config.json describes; raises Unreadable with one sentence."""
    named = config.get("architectures")
    if not isinstance(named, list) or not named:
        raise Unreadable('has no "architectures", so it is no config.json of a whole model')
    architecture = named[0]
    if architecture not in SUPPORTED:
        known = ", ".join(SUPPORTED)
        raise Unreadable(f"describes {architecture}; the planner reads {known}")
    if config.get("quantization_config"):
        raise Unreadable("describes quantized weights; give the config.json of the bf16 model")

    def integer(name: str, default: int | None = None) -> int:
        value = config.get(name)
        if value is None and default is not None:
            return default
        if type(value) is not int or value < 1:
            found = f"is {json.dumps(value)}" if name in config else "is missing"
            raise Unreadable(f'"{name}" {found}, and {architecture} needs a whole number there')
        return value

    heads = integer("num_attention_heads")
    experts = SUPPORTED[architecture]
    width = "intermediate_size"
    if architecture == "Qwen3MoeForCausalLM":
        width = "moe_intermediate_size"
        if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
            raise Unreadable(
                "mixes layers with and without experts; the planner needs one kind"
            )
    hidden = integer("hidden_size")
    head_dim = integer("head_dim", hidden // heads)
    return Shape(
        layers=integer("num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=integer("num_key_value_heads", heads),
        ffn=integer(width),
        vocabulary=integer("vocab_size"),
        tied=config.get("tie_word_embeddings") is True,
        experts=integer(experts) if experts else 1,
        active=integer("num_experts_per_tok") if experts else 1,
        head_dim=0 if head_dim * heads == hidden else head_dim,
    )


def window(config: dict) -> int | None:
    """The length of the sliding window of attention in tokens, or None if there is no limit."""
    limited = config.get("use_sliding_window", True) and config.get("sliding_window")
    return limited or None


def read(path: Path) -> dict:
    """The contents of a config.json, or of the one in a folder."""
    path = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise Unreadable(f"cannot be read: {error.strerror}") from None
    except ValueError as error:  # of JSON, or of UTF-8
        raise Unreadable(f"is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise Unreadable("is JSON, but not an object with named fields")
    return config


# --8<-- [end:read]


def made(architecture: str, *values: int, **more: object) -> dict:
    """A config.json, from its numbers in the order of the names below."""
    names = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads")
    names += ("intermediate_size", "vocab_size")
    fields = dict(zip(names, values, strict=True))
    return {"architectures": [f"{architecture}ForCausalLM"], **fields, **more}


SMALL = {"num_local_experts": 8, "num_experts_per_tok": 2}
MANY = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
# the numbers of the published config.json, and the parameters in the published files
PUBLISHED = {
    "Llama 3 8B": (made("Llama", 32, 4096, 32, 8, 14336, 128256), 8_030_261_248),
    "Llama 3 70B": (made("Llama", 80, 8192, 64, 8, 28672, 128256), 70_553_706_496),
    "Mistral 7B v0.3": (
        made("Mistral", 32, 4096, 32, 8, 14336, 32768, head_dim=128), 7_248_023_552,
    ),
    "Mistral Small 24B": (
        made("Mistral", 40, 5120, 32, 8, 32768, 131072, head_dim=128), 23_572_403_200,
    ),
    "Mixtral 8x7B": (made("Mixtral", 32, 4096, 32, 8, 14336, 32000, **SMALL), 46_702_792_704),
    "Qwen 2.5 7B": (made("Qwen2", 28, 3584, 28, 4, 18944, 152064), 7_615_616_512),
    "Qwen 3 8B": (
        made("Qwen3", 36, 4096, 32, 8, 12288, 151936, head_dim=128), 8_190_735_360,
    ),
    "Qwen 3 32B": (
        made("Qwen3", 64, 5120, 64, 8, 25600, 151936, head_dim=128), 32_762_123_264,
    ),
    "Qwen 3 30B-A3B": (
        made("Qwen3Moe", 48, 2048, 32, 4, 6144, 151936, head_dim=128, **MANY), 30_532_122_624,
    ),
}  # fmt: skip


def left_out(config: dict, shape: Shape) -> int:
    """Parameters that the planner does not count: biases, and norms of queries and keys."""
    name = config["architectures"][0]
    if name.startswith("Qwen3"):
        return shape.layers * 2 * config["head_dim"]
    if name.startswith("Qwen2"):
        return shape.layers * (shape.attention_width + 2 * shape.kv_width)
    return 0


def main() -> None:
    if len(sys.argv) > 1:
        try:
            config = read(Path(sys.argv[1]))
            shape = shape_of(config)
        except Unreadable as error:
            sys.exit(f"{sys.argv[1]} {error}")
        print(f"{parameters(shape) / 1e9:.2f} B parameters, {shape}")
        return
    print("parameters by the planner; left out; in the published files")
    for name, (config, published) in PUBLISHED.items():
        shape = shape_of(config)
        count, rest = parameters(shape), left_out(config, shape)
        print(f"{name:17} {count:15,} {rest:8,} {published:15,}")
        assert count + rest == published, name
        assert rest < 1e-4 * published
    # fields that do not change a sum above: a tied head, active experts, and a window
    one = made("Llama", 16, 2048, 32, 8, 8192, 128256, tie_word_embeddings=True)
    assert parameters(shape_of(one)) == 1_235_814_400  # in the file of Llama 3.2 1B
    for name, billions in (("Mixtral 8x7B", 12.9), ("Qwen 3 30B-A3B", 3.3)):  # model cards
        active = parameters(shape_of(PUBLISHED[name][0]), active=True)
        assert abs(active / 1e9 - billions) < 0.06, name
    assert window({"sliding_window": 4096}) == 4096 and window({}) is None
    assert window({"use_sliding_window": False, "sliding_window": 131072}) is None
    for field, value in (("mlp_only_layers", [0]), ("decoder_sparse_step", 2)):
        try:
            shape_of(PUBLISHED["Qwen 3 30B-A3B"][0] | {field: value})
        except Unreadable as error:
            assert "mixes layers" in str(error)
        else:
            raise AssertionError(field)
    for name, change, why in (
        ("a Gemma", {"architectures": ["Gemma2ForCausalLM"]}, "describes Gemma2ForCausalLM"),
        ("no layers", {"num_hidden_layers": None}, '"num_hidden_layers" is null'),
        ("in 4 bits", {"quantization_config": {"bits": 4}}, "describes quantized weights"),
    ):
        try:
            shape_of(PUBLISHED["Llama 3 8B"][0] | change)
        except Unreadable as error:
            assert str(error).startswith(why)
            print(f"{name}: it {error}"[:72])
        else:
            raise AssertionError(name)


if __name__ == "__main__":
    main()
