"""Step 3: as long as the signal"""

STEP, HINT = 3, "circular"


def fft_causal(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    size = fast_size(max(x.shape[-1], len(w)))
    spectrum = torch.fft.rfft(x, size) * torch.fft.rfft(w, size)
    return torch.fft.irfft(spectrum, size)[..., : x.shape[-1]]
