"""Compute the random numbers that torch draws on a GPU, with the generator Philox4x32-10.

The generator is a function without a state. Its inputs are seed, thread and offset, and its
output is four words, so every thread has its own stream. The program compares it with the known
answers of Random123 (Salmon et al., 2011) and with numbers that torch drew on NVIDIA GPUs and
that other projects published in their tests. On a GPU it also compares with torch itself.
"""

import torch

MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
WEYL = 0x9E3779B9, 0xBB67AE85  # added to the key after each round
MASK = 0xFFFFFFFF

KNOWN_ANSWERS = [  # Random123, tests/kat_vectors: counter, key, result
    ([0] * 4, (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ([MASK] * 4, (MASK, MASK), "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        (0xA4093822, 0x299F31D0),
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]
PUBLISHED = {  # what torch.rand drew on GPUs after torch.manual_seed(0): call, numbers
    # the first call, from TensorRT-LLM, redrafter/test_unpack_gen_data.py
    1: "0.3990 0.5167 0.0249 0.9401 0.9459 0.7967 0.4150 0.8203 0.2290 0.9096 0.1183 0.0752 "
    "0.4092 0.9601 0.2093 0.1940 0.8909 0.4387 0.3570 0.5454 0.8299 0.2099 0.7684 0.4290 "
    "0.2117 0.6606 0.1654 0.4250 0.9927 0.6964 0.2472 0.7028 0.7494 0.9303 0.0494 0.0750",
    # later ones, from MMDetection3D, test_heads/test_heads.py; the third call was randint
    2: "0.9722 0.7910 0.4690 0.3300 0.3345",
    4: "0.7874 0.1344 0.2190 0.8193 0.6969 0.7304 0.2328 0.9028 0.3900 0.6177 0.5012 0.2330 "
    "0.8985 0.4894 0.7152",
}


def philox(counter: torch.Tensor, key: tuple[int, int]) -> torch.Tensor:
    """Run ten rounds of Philox. `counter` [..., 4] has 32-bit words in int64 -> [..., 4]."""
    a, b, c, d = counter.unbind(-1)
    k0, k1 = key
    for _ in range(10):
        hi0, lo0 = multiply(MULTIPLIERS[0], a)
        hi1, lo1 = multiply(MULTIPLIERS[1], c)
        a, b, c, d = hi1 ^ b ^ k0, lo1, hi0 ^ d ^ k1, lo0
        k0, k1 = (k0 + WEYL[0]) & MASK, (k1 + WEYL[1]) & MASK
    return torch.stack([a, b, c, d], -1)


def multiply(m: int, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the high and the low 32 bits of m·x. Halves of 16 bits fit into a signed int64."""
    low, high = m * (x & 0xFFFF), m * (x >> 16)  # below 2^48
    high = high + (low >> 16)
    return high >> 16, ((high & 0xFFFF) << 16) | (low & 0xFFFF)


def cuda_rand(n: int, seed: int, offset: int = 0) -> torch.Tensor:
    """Return torch.rand(n, device="cuda") for a small n, where thread i computes element i.

    The key is the seed. The counter has offset/4 in its low half, the thread in its high half.
    """
    counter = torch.zeros(n, 4, dtype=torch.int64)
    counter[:, 0] = offset // 4
    counter[:, 2] = torch.arange(n)
    words = philox(counter, (seed & MASK, seed >> 32))[:, 0]  # first of four
    return to_uniform(words)


def to_uniform(words: torch.Tensor) -> torch.Tensor:
    uniform = words.float() * 2.0**-32 + 2.0**-33  # cuRAND's range is (0, 1]
    return torch.where(uniform == 1, 0.0, uniform)  # torch's is [0, 1)


def main() -> None:
    for counter, key, answer in KNOWN_ANSWERS:
        words = philox(torch.tensor(counter), key).tolist()
        assert " ".join(f"{word:08x}" for word in words) == answer
        print(f"counter {counter[0]:08x}…  {answer}")
    print("equal to the known answers of Random123")
    for call, numbers in PUBLISHED.items():
        published = torch.tensor([float(number) for number in numbers.split()])
        ours = cuda_rand(len(published), seed=0, offset=4 * (call - 1))
        torch.testing.assert_close(ours, published, rtol=0, atol=5.1e-5)
        print(f"torch.rand on a GPU, seed 0, call {call}: {shown(ours[:4])}…")
    print("equal to the 56 published numbers, to their four digits")
    torch.manual_seed(0)
    print(f"torch.rand on a CPU, seed 0, call 1: {shown(torch.rand(4))}…")
    if torch.cuda.is_available():
        torch.manual_seed(0)
        for call in range(2):
            assert torch.equal(
                torch.rand(100, device="cuda").cpu(), cuda_rand(100, 0, 4 * call)
            )

    assert to_uniform(torch.tensor([0, MASK])).tolist() == [2.0**-33, 0]  # the two ends
    # every one of the 64 bits of the seed changes the result
    assert len({cuda_rand(1, 1 << bit).item() for bit in range(64)}) == 64
    n = 1 << 16
    numbers = cuda_rand(n, seed=1234).double()
    print("one number from each of 2^16 threads; off its expectation by, in standard errors")
    for k in (1, 2, 3, 4):  # E[u^k] = 1/(k+1), variance 1/(2k+1) - 1/(k+1)^2
        mean, deviation = 1 / (k + 1), (1 / (2 * k + 1) - 1 / (k + 1) ** 2) ** 0.5
        score = (numbers.pow(k).mean().item() - mean) / deviation * n**0.5
        assert abs(score) < 4
        print(f"  moment {k}: {score:+.2f}")
    neighbours = ((numbers[1:] - 0.5) * (numbers[:-1] - 0.5)).mean().item() * 12 * n**0.5
    assert abs(neighbours) < 4
    print(f"  neighbouring threads, correlation: {neighbours:+.2f}")


def shown(x: torch.Tensor) -> str:
    return ", ".join(f"{value:.4f}" for value in x.tolist())


if __name__ == "__main__":
    main()
