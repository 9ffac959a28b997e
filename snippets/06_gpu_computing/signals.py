"""Filter signals by FFT, and invert a short-time Fourier transform.

The product of two spectra is a circular convolution. If the inputs are padded to n + k - 1, it
is the linear convolution. A short-time transform can be inverted where the squared windows add
up to more than zero (NOLA). Look at the number of wrong values without padding, and at the
windows for which istft refuses.
"""

import torch
import torch.nn.functional as F


# --8<-- [start:convolve]
def direct(x: torch.Tensor, kernel: torch.Tensor) -> torch.Tensor:
    """Convolve x [n] and kernel [k] by definition -> [n + k - 1]. n·k multiplications."""
    k = len(kernel)
    return F.conv1d(x[None, None], kernel.flip(0)[None, None], padding=k - 1)[0, 0]


def by_fft(x: torch.Tensor, kernel: torch.Tensor, length: int) -> torch.Tensor:
    """Convolve by two spectra of `length`: linear if length >= n + k - 1, else circular."""
    product = torch.fft.rfft(x, length) * torch.fft.rfft(kernel, length)
    return torch.fft.irfft(product, length)  # irfft alone cannot know an odd length


def overlap_add(x: torch.Tensor, kernel: torch.Tensor, block: int) -> torch.Tensor:
    """Convolve a long signal block by block, and add the tails to the next block."""
    k = len(kernel)
    y = x.new_zeros(len(x) + k - 1)
    for start in range(0, len(x), block):
        piece = x[start : start + block]
        y[start : start + len(piece) + k - 1] += by_fft(piece, kernel, len(piece) + k - 1)
    return y


# --8<-- [end:convolve]


def low_pass(cutoff: float, rate: float, taps: int) -> torch.Tensor:
    """Return a windowed sinc [taps], which removes frequencies above `cutoff` Hz. Odd taps."""
    t = torch.arange(taps, dtype=torch.float64) - taps // 2
    kernel = torch.sinc(2 * cutoff / rate * t) * torch.hann_window(taps, False, dtype=t.dtype)
    return kernel / kernel.sum()


# --8<-- [start:nola]
def squared_windows(window: torch.Tensor, hop: int) -> torch.Tensor:
    """Return the sum of the squared windows over all frames, at each place of a hop: [hop]."""
    padded = F.pad(window.square(), (0, -len(window) % hop))
    return padded.view(-1, hop).sum(0)


# --8<-- [end:nola]


def main() -> None:
    torch.manual_seed(0)
    x, kernel = torch.randn(1000, dtype=torch.float64), torch.randn(101, dtype=torch.float64)
    expected = direct(x, kernel)
    torch.testing.assert_close(by_fft(x, kernel, 1100), expected)
    torch.testing.assert_close(overlap_add(x, kernel, 255), expected)  # of odd length, 355
    print("padded to n + k - 1: equal to the direct convolution; so is overlap-add")
    wrapped = by_fft(x, kernel, 1000)
    wrong = (wrapped - expected[:1000]).abs().gt(1e-9)
    torch.testing.assert_close(wrapped[:100], expected[:100] + expected[1000:])
    print(f"not padded: the first {int(wrong.sum())} of 1000 values are wrong, by the tail")
    odd = torch.fft.irfft(torch.fft.rfft(x[:999]))
    assert len(odd) == 998
    print(f"irfft without a length: 999 values became {len(odd)}")

    rate, n = 8000.0, 8000
    time = torch.arange(n, dtype=torch.float64) / rate
    tone, noise = torch.sin(2 * torch.pi * 200 * time), torch.sin(2 * torch.pi * 3000 * time)
    taps = 101
    kernel = low_pass(1000, rate, taps)
    assert abs(torch.fft.rfft(kernel, n)[1000].abs() - 0.5) < 0.01  # half, at the cutoff
    filtered = overlap_add(tone + noise, kernel, 1000)[taps // 2 : taps // 2 + n]
    for name, signal in {"before": tone + noise, "after": filtered}.items():
        spectrum = torch.fft.rfft(signal[:n]).abs() * 2 / n  # bins of 1 Hz
        print(f"low-pass at 1000 Hz, {name:6}: ", end="")
        print(f"200 Hz {spectrum[200]:.3f}, 3000 Hz {spectrum[3000]:.3f}")
    assert abs(spectrum[200] - 1) < 0.01 and spectrum[3000] < 0.01  # after

    signal = torch.randn(4000, dtype=torch.float64)
    print("window          hop   smallest sum of w²   istft")
    for name, window, hop in [
        ("hann 256", torch.hann_window(256, dtype=torch.float64), 64),
        ("hann 256", torch.hann_window(256, dtype=torch.float64), 128),
        ("hann 256", torch.hann_window(256, dtype=torch.float64), 256),
        ("ones 256", torch.ones(256, dtype=torch.float64), 256),
        ("hann 128 in 256", F.pad(torch.hann_window(128, dtype=torch.float64), (64, 64)), 192),
    ]:
        smallest = squared_windows(window, hop).min().item()
        spectrogram = torch.stft(signal, 256, hop, window=window, return_complex=True)
        try:
            back = torch.istft(spectrogram, 256, hop, window=window, length=3840)
            torch.testing.assert_close(back, signal[:3840])
            verdict = "equal"
        except RuntimeError as error:
            verdict = "RuntimeError: … " + str(error).split(") ")[-1].splitlines()[0]
        assert (verdict == "equal") == (smallest > 1e-11)  # NOLA, and torch's threshold
        print(f"{name:15} {hop:3}   {smallest:18.2f}   {verdict}")


if __name__ == "__main__":
    main()
