"""Step 2: two rows, always"""

STEP, HINT = 2, "rows"


def register(kernel, name="assignment5::causal"):
    @torch.library.custom_op(name, mutates_args=())
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
