"""Step 3: irfft guesses the size"""

STEP, HINT = 3, "odd"


def fft_causal(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    size = fast_size(x.shape[-1] + len(w) - 1)
    spectrum = torch.fft.rfft(x, size) * torch.fft.rfft(w, size)
    return torch.fft.irfft(spectrum)[..., : x.shape[-1]]
