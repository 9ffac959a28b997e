"""Step 3: the size as it comes"""

STEP, HINT = 3, "not_fast"


def fft_causal(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    size = x.shape[-1] + len(w) - 1
    spectrum = torch.fft.rfft(x, size) * torch.fft.rfft(w, size)
    return torch.fft.irfft(spectrum, size)[..., : x.shape[-1]]
