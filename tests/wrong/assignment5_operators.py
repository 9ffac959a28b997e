"""Wrong answers to assessment/assignment5_operators.py."""

# fmt: off
from wrong import Body, Table

wrong = Table("assessment/assignment5_operators.py")

# step 1

wrong("kernel_first_row", step=1, hint="first_rows",
      old="r * n + t - j", new="t - j")
wrong("kernel_flipped", step=1, hint="flipped",
      old="for (long j = 0; j < k && j <= t; j++) sum += w[j] * x[r * n + t - j];",
      new="for (long j = 0; j < k && t + j < n; j++) sum += w[j] * x[r * n + t + j];")
wrong("kernel_leaks", step=1, hint="leak",
      old="j <= t; j++)", new="r * n + t - j >= 0; j++)")
wrong("kernel_no_compiler", step=1, hint="compiler",
      old=Body("build"), new='raise FileNotFoundError(2, "No such file or directory", "g++")')
wrong("kernel_one_tap_less", step=1, hint="taps",
      old="&& j <= t; j", new="- 1 && j <= t; j")

# step 2

wrong("operator_double", step=2, hint="dtype",
      old="y.to(x.dtype)", new="y")
wrong("operator_fake_like", step=2, hint="fake_strides",
      old="x, memory_format=torch.contiguous_format", new="x")
wrong("operator_forward_in_time", step=2, hint="grad_x",
      old="causal(grad.flip(-1), w).flip(-1)", new="causal(grad, w)")
wrong("operator_no_fake", step=2, hint="fake",
      old="@causal.register_fake", new="")
wrong("operator_no_gradients", step=2, hint="no_autograd",
      old="causal.register_autograd(backward, setup_context=save)", new="pass")
wrong("operator_strided", step=2, hint="strided",
      old="signal, taps = x.double().contiguous(), w.double().contiguous()", new="""
    signal, taps = (
        torch.empty(x.shape, dtype=torch.float64).set_(
            x.double().untyped_storage(), 0, x.shape
        ),
        w.double(),
    )
""")
wrong("operator_taps_reversed", step=2, hint="other",
      old="w.double().contiguous()", new="w.double().flip(0)")
wrong("operator_two_dimensions", step=2, hint="rows",
      old="rows = signal.numel() // n if n else 0", new="rows = len(signal) if x.dim() == 2 else 1")
wrong("operator_two_rows", step=2, hint="rows", old=Body("register"), new="""
    def causal(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        s, t = x.double().contiguous(), w.double().contiguous()
        y = torch.empty_like(s)
        kernel(s.data_ptr(), t.data_ptr(), y.data_ptr(), 2, x.shape[-1], len(w))
        return y.to(x.dtype)

    causal.register_fake(lambda x, w: x.new_empty(x.shape))

    def backward(ctx, g):
        x, w = ctx.saved_tensors
        n = x.shape[-1]
        return causal(g.flip(-1), w).flip(-1), torch.stack(
            [(g[..., j:] * x[..., : n - j]).sum() for j in range(len(w))]
        )

    causal.register_autograd(
        backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs)
    )
    return causal
""")
wrong("operator_w_flipped", step=2, hint="grad_w",
      old="(grad[..., j:] * x[..., : n - j]).sum() if j < n else grad.new_zeros(())",
      new="(grad[..., len(w) - 1 - j :] * x[..., : n - len(w) + 1 + j]).sum()")
wrong("operator_w_strided", step=2, hint="strided", old=Body("register"), new="""
    def causal(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        s, t = x.double().contiguous(), w.double()
        y = torch.empty_like(s)
        kernel(
            s.data_ptr(),
            t.data_ptr(),
            y.data_ptr(),
            x.numel() // x.shape[-1],
            x.shape[-1],
            len(w),
        )
        return y.to(x.dtype)

    causal.register_fake(lambda x, w: x.new_empty(x.shape))

    def backward(ctx, g):
        x, w = ctx.saved_tensors
        n = x.shape[-1]
        return causal(g.flip(-1), w).flip(-1), torch.stack(
            [(g[..., j:] * x[..., : n - j]).sum() for j in range(len(w))]
        )

    causal.register_autograd(
        backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs)
    )
    return causal
""")

# step 3

wrong("fft_any_size", step=3, hint="not_fast",
      old="fast_size(x.shape[-1] + len(w) - 1)", new="x.shape[-1] + len(w) - 1")
wrong("fft_circular", step=3, hint="circular",
      old="x.shape[-1] + len(w) - 1", new="max(x.shape[-1], len(w))")
wrong("fft_complex", step=3, hint="complex",
      old="torch.fft.irfft(spectrum, size)",
      new="torch.fft.ifft(torch.fft.fft(x, size) * torch.fft.fft(w, size))")
wrong("fft_cut_late", step=3, hint="cut", old=Body("fft_causal"), new="""
    n = fast_size(x.shape[-1] + len(w) - 1)
    return torch.fft.irfft(torch.fft.rfft(x, n) * torch.fft.rfft(w, n), n)[
        ..., len(w) - 1 : len(w) - 1 + x.shape[-1]
    ]
""")
wrong("fft_even", step=3, hint="odd",
      old="torch.fft.irfft(spectrum, size)", new="torch.fft.irfft(spectrum)")
wrong("fft_not_cut", step=3, hint="cut", old=Body("fft_causal"), new="""
    n = fast_size(x.shape[-1] + len(w) - 1)
    return torch.fft.irfft(torch.fft.rfft(x, n) * torch.fft.rfft(w, n), n)
""")
wrong("fft_power_of_two", step=3, hint="slow_size",
      old=Body("fast_size"), new="return 1 << (n - 1).bit_length()")

# step 4

wrong("sparse_dense", step=4, hint="dense", edits=[
    ("out = dense.new_zeros(m, dense.shape[1])", "matrix = dense.new_zeros(m, len(dense))"),
    ("out.index_add_(0, rows, values[:, None] * dense[cols])",
     "matrix.index_put_((rows, cols), values, accumulate=True) @ dense")])
wrong("sparse_dense_gradient", step=4, hint="dense",
      old="(grad[rows] * dense[cols]).sum(1)", new="(grad @ dense.t())[rows, cols]")
wrong("sparse_not_transposed", step=4, hint="transposed", old="""
    grad_dense = torch.zeros_like(dense).index_add_(0, cols, values[:, None] * grad[rows])
""", new="""
    at = cols % len(grad)
    grad_dense = torch.zeros_like(dense).index_add_(0, rows, values[:, None] * grad[at])
""")
wrong("sparse_overwrites", step=4, hint="repeated",
      old="return out.index_add_(0, rows, values[:, None] * dense[cols])",
      new="out[rows] += values[:, None] * dense[cols]\nreturn out")
wrong("sparse_values_scaled", step=4, hint="values",
      old="grad_values =", new="grad_values = values *")
