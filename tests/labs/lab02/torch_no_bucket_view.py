"""Step 8: gradients are copied"""

from torch.nn.parallel import DistributedDataParallel

STEP, HINT = 8, "not_bucket_view"


def wrap(module, device):
    return DistributedDataParallel(module)
