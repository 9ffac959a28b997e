"""Step 2: the result is always fp64"""

STEP, HINT = 2, "dtype"


def register(kernel: Callable, name: str = "assignment5::causal") -> Callable:
    @torch.library.custom_op(name, mutates_args=())
    def causal(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        signal, taps = x.double().contiguous(), w.double().contiguous()
        y = torch.empty_like(signal)
        n, k = x.shape[-1], len(w)
        kernel(signal.data_ptr(), taps.data_ptr(), y.data_ptr(), signal.numel() // n, n, k)
        return y

    @causal.register_fake
    def _(x, w):
        return torch.empty_like(x, memory_format=torch.contiguous_format)

    def save(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        n = x.shape[-1]
        grad_x = causal(grad.flip(-1), w).flip(-1)
        taps = [(grad[..., j:] * x[..., : n - j]).sum() for j in range(len(w))]
        return grad_x, torch.stack(taps).to(w.dtype)

    causal.register_autograd(backward, setup_context=save)
    return causal
