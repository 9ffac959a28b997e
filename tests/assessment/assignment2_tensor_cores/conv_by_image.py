"""Step 3: one product for each image"""

STEP, HINT = 3, "calls"


def conv2d(x: torch.Tensor, weight: torch.Tensor, stride=1, padding=0, dilation=1):
    k, images = len(weight), []
    flat = to_tf32(weight.permute(0, 2, 3, 1).reshape(k, -1).T.contiguous())
    for image in x.split(1):
        rows, ho, wo = im2col(image, weight.shape[-1], stride, padding, dilation)
        images.append(mma(to_tf32(rows), flat).view(1, ho, wo, k))
    return torch.cat(images).permute(0, 3, 1, 2)
