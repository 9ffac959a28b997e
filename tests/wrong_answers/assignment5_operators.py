"""Wrong answers to assessment/assignment5_operators.py."""

# fmt: off
from wrong_answers import Body, Table

wrong = Table("assessment/assignment5_operators.py")

# step 1

wrong("kernel_adds", step=1, hint="adds_to_y",
      old="y[r * n + t] = sum;", new="y[r * n + t] += sum;")
wrong("kernel_begins_late", step=1, hint="begin",
      old="for (long j = 0; j < k && j <= t; j++)", new="for (long j = 0; j < k && t >= k - 1; j++)")
wrong("kernel_does_not_compile", step=1, hint="cpp",
      old="sum += w[j]", new="total += w[j]")
wrong("kernel_far_index", step=1, hint="cpp_index",
      old="r * n + t - j", new="r * n + t - j - 100000000")
wrong("kernel_first_row", step=1, hint="first_rows",
      old="r * n + t - j", new="t - j")
wrong("kernel_flipped", step=1, hint="flipped",
      old="for (long j = 0; j < k && j <= t; j++) sum += w[j] * x[r * n + t - j];",
      new="for (long j = 0; j < k && t + j < n; j++) sum += w[j] * x[r * n + t + j];")
wrong("kernel_fp32", step=1, hint="single",
      old="for (long j = 0; j < k && j <= t; j++) sum += w[j] * x[r * n + t - j];",
      new="float total = 0;\nfor (long j = 0; j < k && j <= t; j++) total += w[j] * x[r * n + t - j];\nsum = total;")
wrong("kernel_from_end", step=1, hint="reversed_taps",
      old="sum += w[j]", new="sum += w[k - 1 - j]")
wrong("kernel_leaks", step=1, hint="leak",
      old="j <= t; j++)", new="r * n + t - j >= 0; j++)")
wrong("kernel_no_compiler", step=1, hint="compiler",
      old=Body("build"), new='raise FileNotFoundError(2, "No such file or directory", "g++")')
wrong("kernel_one_tap_less", step=1, hint="taps",
      old="&& j <= t; j", new="- 1 && j <= t; j")
wrong("kernel_one_tap_more", step=1, hint="outside",
      old="j < k && j <= t", new="j <= k && j <= t")
wrong("kernel_short_filter", step=1, hint="long_filter",
      old="j < k && j <= t", new="j < k && k <= n && j <= t")

# step 2

wrong("operator_arguments", step=2, hint="arguments",
      old="rows, n, k)", new="n, rows, k)")
wrong("operator_doubled", step=2, hint="other",
      old="return y.to(x.dtype)", new="return (2 * y).to(x.dtype)")
wrong("operator_buffer", step=2, hint="state",
      old="y = torch.empty_like(signal)",
      new='y = globals().setdefault(f"y{x.shape}", torch.empty_like(signal))')
wrong("operator_double", step=2, hint="dtype",
      old="y.to(x.dtype)", new="y")
wrong("operator_fake_dtype", step=2, hint="fake_result",
      old="torch.empty_like(x, memory_format=torch.contiguous_format)", new="torch.empty(x.shape)")
wrong("operator_fake_like", step=2, hint="fake_strides",
      old="x, memory_format=torch.contiguous_format", new="x")
wrong("operator_forward_in_time", step=2, hint="grad_x",
      old="causal(grad.flip(-1), w).flip(-1)", new="causal(grad, w)")
wrong("operator_freed", step=2, hint="pointer",
      old="kernel(signal.data_ptr(), taps.data_ptr()",
      new="kernel(x.double().data_ptr(), w.double().data_ptr()")
wrong("operator_grad_expanded", step=2, hint="grad_strided",
      old="grad_x = causal(grad.flip(-1), w).flip(-1)", new="""
    grad_x = torch.empty(x.shape, dtype=torch.float64)
    g = grad.flip(-1).double() if grad.is_contiguous() else grad.double()
    kernel(g.data_ptr(), w.data_ptr(), grad_x.data_ptr(), x.numel() // n, n, len(w))
    grad_x = grad_x.flip(-1)
""")
wrong("operator_grad_of_rows", step=2, hint="grad_rows",
      old="grad[..., j:] * x[..., : n - j]", new="grad[:, j:] * x[:, : n - j]")
wrong("operator_long_filter", step=2, hint="long_filter",
      old="(grad[..., j:] * x[..., : n - j]).sum() if j < n else grad.new_zeros(())",
      new="(grad[..., j:] * x[..., : n - j]).sum()")
wrong("operator_name", step=2, hint="not_registered",
      old="torch.library.custom_op(name, ", new='torch.library.custom_op("my::causal", ')
wrong("operator_no_fake", step=2, hint="fake",
      old="@causal.register_fake", new="")
wrong("operator_no_gradients", step=2, hint="no_autograd",
      old="causal.register_autograd(backward, setup_context=save)", new="pass")
wrong("operator_nothing", step=2, hint="none",
      old="return y.to(x.dtype)", new="y = y.to(x.dtype)")
wrong("operator_one_gradient", step=2, hint="grad_count",
      old="return grad_x, torch.stack(taps).to(w.dtype)", new="return grad_x")
wrong("operator_saves_x", step=2, hint="saved",
      old="ctx.save_for_backward(*inputs)", new="ctx.save_for_backward(inputs[0])")
wrong("operator_strided", step=2, hint="strided",
      old="signal, taps = x.double().contiguous(), w.double().contiguous()", new="""
    signal, taps = (
        torch.empty(x.shape, dtype=torch.float64).set_(
            x.double().untyped_storage(), 0, x.shape
        ),
        w.double(),
    )
""")
wrong("operator_taps_reversed", step=2, hint="reversed_taps",
      old="w.double().contiguous()", new="w.double().flip(0)")
wrong("operator_two_dimensions", step=2, hint="rows",
      old="rows = signal.numel() // n if n else 0", new="rows = len(signal) if x.dim() == 2 else 1")
wrong("operator_w_flipped", step=2, hint="grad_w",
      old="(grad[..., j:] * x[..., : n - j]).sum() if j < n else grad.new_zeros(())",
      new="(grad[..., len(w) - 1 - j :] * x[..., : n - len(w) + 1 + j]).sum()")
# step 3

wrong("fft_again", step=3,
      old="torch.fft.rfft(x, size)", new="torch.fft.rfft(input=x, n=size, dim=-1)")
wrong("fft_any_size", step=3, hint="not_fast",
      old="fast_size(x.shape[-1] + len(w) - 1)", new="x.shape[-1] + len(w) - 1")
wrong("fft_circular", step=3, hint="circular",
      old="x.shape[-1] + len(w) - 1", new="max(x.shape[-1], len(w))")
wrong("fft_complex", step=3, hint="complex",
      old="torch.fft.irfft(spectrum, size)",
      new="torch.fft.ifft(torch.fft.fft(x, size) * torch.fft.fft(w, size))")
wrong("fft_conjugate", step=3, hint="correlation",
      old="torch.fft.rfft(w, size)", new="torch.fft.rfft(w, size).conj()")
wrong("fft_cut_late", step=3, hint="cut", old=Body("fft_causal"), new="""
    n = fast_size(x.shape[-1] + len(w) - 1)
    return torch.fft.irfft(torch.fft.rfft(x, n) * torch.fft.rfft(w, n), n)[
        ..., len(w) - 1 : len(w) - 1 + x.shape[-1]
    ]
""")
wrong("fft_double", step=3, hint="fft_dtype",
      old="torch.fft.rfft(x, size)", new="torch.fft.rfft(x.double(), size)")
wrong("fft_even", step=3, hint="inverse_size",
      old="torch.fft.irfft(spectrum, size)", new="torch.fft.irfft(spectrum)")
wrong("fft_for_short_filters", step=3, hint="circular",
      old="fast_size(x.shape[-1] + len(w) - 1)", new="fast_size(2 * x.shape[-1])")
wrong("fft_of_neither", step=3, hint="no_fft",
      old=Body("fft_causal"), new="""
    rows = torch.nn.functional.pad(x.reshape(-1, 1, x.shape[-1]), (len(w) - 1, 0))
    return torch.nn.functional.conv1d(rows, w.flip(0)[None, None]).reshape(x.shape)
""")
wrong("fft_power_of_two", step=3, hint="slow_size",
      old=Body("fast_size"), new="return 1 << (n - 1).bit_length()")
wrong("fft_two_dimensions", step=3, hint="fft_rows",
      old="[..., : x.shape[-1]]", new="[:, : x.shape[-1]]")

# step 4

wrong("sparse_dense", step=4, hint="dense", edits=[
    ("out = dense.new_zeros(m, dense.shape[1])", "matrix = dense.new_zeros(m, len(dense))"),
    ("out.index_add_(0, rows, values[:, None] * dense[cols])",
     "matrix.index_put_((rows, cols), values, accumulate=True) @ dense")])
wrong("sparse_exchanged", step=4, hint="index",
      old="out.index_add_(0, rows, values[:, None] * dense[cols])",
      new="out.index_add_(0, cols, values[:, None] * dense[rows])")
wrong("sparse_gradient_overwrites", step=4, hint="repeated",
      old="grad_dense = torch.zeros_like(dense).index_add_(0, cols, values[:, None] * grad[rows])",
      new="grad_dense = torch.zeros_like(dense)\ngrad_dense[cols] += values[:, None] * grad[rows]")
wrong("sparse_gradient_unscaled", step=4, hint="scale",
      old="index_add_(0, cols, values[:, None] * grad[rows])", new="index_add_(0, cols, grad[rows])")
wrong("sparse_in_place", step=4, hint="in_place",
      old="return out.index_add_(0, rows, values[:, None] * dense[cols])",
      new="return out.index_add_(0, rows, dense.mul_(2)[cols] * values[:, None] / 2)")
wrong("sparse_last_rows", step=4, hint="shape",
      old="dense.new_zeros(m, ", new="dense.new_zeros(int(rows.max()) + 1, ")
wrong("sparse_not_added", step=4, hint="product",
      old="return out.index_add_(0, rows, values[:, None] * dense[cols])",
      new="out.index_add(0, rows, values[:, None] * dense[cols])\nreturn out")
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
wrong("sparse_state", step=4, hint="state", edits=[
    ("ctx.save_for_backward(values", "SparseProduct.saved = (values"),
    ("values, rows, cols, dense = ctx.saved_tensors",
     "values, rows, cols, dense = SparseProduct.saved")])
