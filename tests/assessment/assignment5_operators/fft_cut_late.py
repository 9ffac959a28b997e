"""Step 3: as conv1d with padding is cut"""

STEP, HINT = 3, "cut"


def fft_causal(x, w):
    n = fast_size(x.shape[-1] + len(w) - 1)
    return torch.fft.irfft(torch.fft.rfft(x, n) * torch.fft.rfft(w, n), n)[
        ..., len(w) - 1 : len(w) - 1 + x.shape[-1]
    ]
