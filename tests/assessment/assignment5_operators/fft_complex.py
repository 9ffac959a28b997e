"""Step 3: complex transforms"""

STEP, HINT = 3, "complex"


def fft_causal(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    size = fast_size(x.shape[-1] + len(w) - 1)
    return torch.fft.ifft(torch.fft.fft(x, size) * torch.fft.fft(w, size))[..., : x.shape[-1]]
