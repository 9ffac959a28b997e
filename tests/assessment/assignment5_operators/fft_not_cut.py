"""Step 3: all that the transform gives"""

STEP, HINT = 3, "cut"


def fft_causal(x, w):
    n = fast_size(x.shape[-1] + len(w) - 1)
    return torch.fft.irfft(torch.fft.rfft(x, n) * torch.fft.rfft(w, n), n)
