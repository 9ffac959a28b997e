"""Search in a browser: a pasted error message finds the section that explains it."""

from __future__ import annotations

import gzip
import re
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

INPUTS = [
    "assessment", "book", "docs", "labs", "mkdocs.yml", "overrides", "snippets",
]  # fmt: skip
TEXT = "search/text.json"  # a reader who searches fetches it, compressed, and reads it whole
MOST, MOST_COMPRESSED = 2_900_000, 980_000
FOUND = ".md-search-result__item"

# As readers have them: with numbers, names and paths that are not the book's.
MESSAGES = """
01_collectives/#environment-variable-rank-expected-but-not-set
    ValueError: Error initializing torch.distributed using env:// rendezvous: environment variable RANK expected, but not set
01_collectives/#eaddrinuse-address-already-in-use
    torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address. port: 29500, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use
01_collectives/#timed-out-waiting-for-clients
    torch.distributed.DistStoreError: Timed out after 601 seconds waiting for clients. 3/4 clients joined.
01_collectives/#detected-mismatch-between-collectives-on-ranks
    RuntimeError: Detected mismatch between collectives on ranks. Rank 0 is running collective: CollectiveFingerPrint(SequenceNumber=12, OpType=ALLREDUCE, TensorShape=[1024])
01_collectives/#duplicate-gpu-detected-memory-of-other-ranks-on-gpu-0
    torch.distributed.DistBackendError: NCCL error in: /opt/pytorch/pytorch/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:1727, invalid usage (run with NCCL_DEBUG=WARN for details), NCCL version 2.19.3 ncclInvalidUsage: This usually reflects invalid usage of NCCL library. Last error: Duplicate GPU detected : rank 3 and rank 0 both on CUDA device f000
01_collectives/#duplicate-gpu-detected-memory-of-other-ranks-on-gpu-0
    every process allocates memory on GPU 0
01_collectives/#nccl-hangs-on-consumer-gpus-p2p-iommu-and-acs
    NCCL hangs RTX 4090 P2P IOMMU ACS
02_ddp_in_practice/#expected-to-have-finished-reduction-in-the-prior-iteration
    RuntimeError: Expected to have finished reduction in the prior iteration before starting a new one.
02_ddp_in_practice/#expected-to-have-finished-reduction-in-the-prior-iteration
    Traceback (most recent call last): File "/home/ada/project/train.py", line 214, in <module> main() File "/home/ada/.venv/lib/python3.12/site-packages/torch/nn/parallel/distributed.py", line 1637, in forward RuntimeError: Expected to have finished reduction in the prior iteration before starting a new one. This error indicates that your module has parameters that were not used in producing loss.
02_ddp_in_practice/#expected-to-mark-a-variable-ready-only-once
    RuntimeError: Expected to mark a variable ready only once. This error is caused by one of the following reasons: 1) Use of a module parameter outside the `forward` function.
02_ddp_in_practice/#ddp-expects-same-model-across-all-ranks
    [rank3]: RuntimeError: DDP expects same model across all ranks, but Rank 3 has 148 params, while rank 0 has inconsistent 150 params.
02_ddp_in_practice/#missing-keys-in-state_dict-unexpected-keys-module
    RuntimeError: Error(s) in loading state_dict for ResNet: Missing key(s) in state_dict: "conv1.weight", "bn1.weight". Unexpected key(s) in state_dict: "module.conv1.weight", "module.bn1.weight".
02_runs_that_last/#connection-closed-by-peer-a-rank-was-killed
    RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.7]:43211
02_runs_that_last/#nccl-times-out-in-the-first-step-one-rank-compiles-longer
    NCCL timeout one rank compiles longer torch.compile
02_runs_that_last/#statefuldataloader-state-doesnt-contain-key-_num_yielded
    AssertionError: State doesn't contain key '_num_yielded' expected for single process dataloader
02_runs_that_last/#a-stream-resumed-in-the-middle-of-an-epoch
    resume IterableDataset in the middle of an epoch
02_ddp_in_practice/#cant-detach-views-in-place
    RuntimeError: Can't detach views in-place. Use detach() instead.
03_experts/#inlengthperrankmyrank-outlengthperrankmyrank
    RuntimeError: [enforce fail at /pytorch/third_party/gloo/gloo/alltoallv.cc:61] inLengthPerRank[myRank] == outLengthPerRank[myRank]. 96 vs 128
03_experts/#for-real-grouped_mm-dtensor-and-fsdp2
    RuntimeError: strides should be multiple of 16 bytes
03_experts/#for-real-grouped_mm-dtensor-and-fsdp2
    RuntimeError: Cannot use ReduceOp.PREMUL_SUM with Gloo
03_several_cuts/#failed-to-run-stage-backward-dynamic-shapes-in-a-pipeline
    RuntimeError: Failed to run stage backward: Stage output: ('Tensor(torch.Size([1, 512, 4096]), grad=True, dtype=torch.bfloat16)',)
03_tensor_parallelism/#shape-is-invalid-for-input-of-size
    RuntimeError: shape '[4, 512, 32, 64]' is invalid for input of size 2097152
04_checkpoints/#missing-key-in-checkpoint-state_dict-modelgateweight
    RuntimeError: Missing key in checkpoint state_dict: model.layers.0.attention.wq.weight.
04_checkpoints/#every-rank-loads-the-model-into-host-memory
    every rank loads the model into host memory
04_checkpoints/#convert-fsdp1-fsdp2-dcp-deepspeed-and-safetensors-checkpoints
    convert DeepSpeed checkpoint to safetensors FSDP2
04_deepspeed/#direct-calls-to-tensorbackward-are-not-supported-in-this-configuration
    RuntimeError: Direct calls to tensor.backward() are not supported in this configuration. Please use engine.backward(loss)
04_deepspeed/#check-batch-related-parameters
    AssertionError: Check batch related parameters. train_batch_size is not equal to micro_batch_per_gpu * gradient_acc_step * world_size 32 != 4 * 1 * 4
04_fsdp/#got-mixed-torchtensor-and-dtensor
    RuntimeError: aten.embedding.default got mixed torch.Tensor and DTensor, need to convert all torch.Tensor to DTensor before calling distributed operators!
04_fsdp/#fsdp-parameters-should-be-materialized-from-meta-device-before-training
    RuntimeError: FSDP parameters should be materialized from meta device before training, but the following were still on meta device: ['tok_embeddings.weight']
04_fsdp/#setstorage-out-of-bounds-for-storage-of-size-0
    RuntimeError: setStorage: sizes [4096, 4096], strides [4096, 1], storage offset 0, and itemsize 2 requiring a storage size of 33554432 are out of bounds for storage of size 0
05_precision_in_practice/#index_add_-self-float-and-source-bfloat16-must-have-the-same-scalar-type
    RuntimeError: mat1 and mat2 must have the same dtype, but got BFloat16 and Float
05_precision_in_practice/#expected-scalar-type-half-but-found-float-and-its-relatives
    RuntimeError: expected scalar type Half but found Float
05_precision_in_practice/#expected-scalar-type-half-but-found-float-and-its-relatives
    ValueError: Attempting to unscale FP16 gradients.
06_host_and_device/#expected-all-tensors-to-be-on-the-same-device
    RuntimeError: Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! (when checking argument for argument mat1 in method wrapper_CUDA_addmm)
06_kernels/#an-illegal-memory-access-was-encountered
    torch.AcceleratorError: CUDA error: an illegal memory access was encountered. CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect.
07_out_of_memory/#torchoutofmemoryerror-cuda-out-of-memory-tried-to-allocate-line-by-line
    torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.15 GiB of which 1.44 GiB is free. Including non-PyTorch memory, this process has 77.70 GiB memory in use.
07_memory_and_performance/#trying-to-backward-through-the-graph-a-second-time
    RuntimeError: Trying to backward through the graph a second time (or directly access saved tensors after they have already been freed).
07_memory_and_performance/#one-of-the-variables-needed-for-gradient-computation-has-been-modified-by-an-inplace-operation
    RuntimeError: one of the variables needed for gradient computation has been modified by an inplace operation: [torch.cuda.FloatTensor [64, 256]], which is output 0 of ReluBackward0, is at version 1; expected version 0 instead.
07_faster_steps/#dataloader-worker-is-killed-by-signal
    RuntimeError: DataLoader worker (pid 48213) is killed by signal: Bus error. It is possible that dataloader's workers are out of shared memory. Please try to raise your shared memory limit.
08_int8_layers/#only-tensors-of-floating-point-and-complex-dtype-can-require-gradients-and-other-errors
    RuntimeError: Only Tensors of floating point and complex dtype can require gradients
08_four_bits/#provided-sizes-1-32-dont-multiply-up-to-the-size-of-dim-1
    RuntimeError: unflatten: Provided sizes [-1, 128] don't multiply up to the size of dim 1 (11008) in the input tensor
09_next_token/#probability-tensor-contains-either-inf-nan-or-element-0
    RuntimeError: probability tensor contains either `inf`, `nan` or element < 0
10_attention_in_practice/#flexattention-does-not-support-backward-on-cpu
    NotImplementedError: FlexAttention does not support backward on CPU
11_tools/#what-did-the-rank-say-that-failed
    torch.distributed.elastic.multiprocessing.errors.ChildFailedError
11_tools/#what-did-the-rank-say-that-failed
    torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ============ train.py FAILED ------------ Failures: <NO_OTHER_FAILURES> Root Cause (first observed failure): [0]: time : 2026-11-24_15:07:22 host : node-3 rank : 1 (local_rank: 1) exitcode : 1 (pid: 4711) error_file: <N/A>
clusters/scale/#watchdog-caught-collective-operation-timeout
    [rank5]:[E1124 15:07:22 ProcessGroupNCCL.cpp:632] [Rank 5] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=812, OpType=ALLREDUCE, NumelIn=4096, NumelOut=4096, Timeout(ms)=600000) ran for 600012 milliseconds before timing out.
clusters/failures/#unexpected-pos-a-disk-fills-during-a-save
    RuntimeError: [enforce fail at inline_container.cc:664] . unexpected pos 1728 vs 1622
clusters/from_one_to_many/#the-client-socket-has-timed-out
    torch.distributed.DistNetworkError: The client socket has timed out after 600000ms while trying to connect to (node-0, 29500).
setup/#use_libuv-was-requested-but-pytorch-was-built-without-libuv-support
    RuntimeError: use_libuv was requested but PyTorch was build without libuv support
setup/#found-no-nvidia-driver-on-your-system
    RuntimeError: Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU and installed a driver from http://www.nvidia.com/Download/index.aspx
setup/#no-kernel-image-is-available-for-execution-on-the-device
    RuntimeError: CUDA error: no kernel image is available for execution on the device
setup/#ninja-is-required-cuda_home-environment-variable-is-not-set-no-working-c-compiler-found
    OSError: CUDA_HOME environment variable is not set. Please set it to your CUDA install root.
"""
PASTED = [
    (message.strip(), section)
    for section, message in zip(*[iter(MESSAGES.strip().splitlines())] * 2, strict=True)
]


def test_what_a_search_fetches_is_small(built_site) -> None:
    """How long the first search takes follows from it."""
    whole = (built_site / TEXT).read_bytes()
    assert len(whole) < MOST
    assert len(gzip.compress(whole, 6)) < MOST_COMPRESSED
    assert (built_site / "search/search_index.json").stat().st_size < 1000  # on every page


def ask(page: Page, question: str) -> float:
    """Paste into the search box; return how long it took until the first result was shown."""
    page.fill("[data-md-component=search-query]", "")
    page.wait_for_function(f"!document.querySelector('{FOUND}')")
    start = time.perf_counter()
    page.fill("[data-md-component=search-query]", question)
    page.wait_for_selector(FOUND)
    return time.perf_counter() - start


def test_a_pasted_message_finds_its_section(browser: Browser, address: str) -> None:
    page = browser.new_page(viewport={"width": 1440, "height": 900})
    fetched = []
    page.on("request", lambda request: fetched.append(request.url.removeprefix(address)))
    page.goto(f"{address}setup/", wait_until="networkidle")
    assert TEXT not in fetched  # before anybody searches
    took, faults = [], []
    for message, section in PASTED:
        took.append(ask(page, message))
        found = page.locator(FOUND).evaluate_all(
            """items => items.slice(0, 3).map(item => [...item.querySelectorAll("a")]
                .filter(link => link.checkVisibility()).map(link => link.href))"""
        )
        if f"{address}{section}" not in {
            link.split("?")[0] + "".join(link.partition("#")[1:])
            for links in found
            for link in links
        }:
            faults.append(f"{message}\n    {section}\n    is not among {found}")
    print(f"first result: {took[0]:.2f} s, then at most {max(took[1:]):.2f} s")
    assert not faults, "\n".join(faults)
    assert [url for url in fetched if url.startswith("search/")].count(TEXT) == 1
    assert not [url for url in fetched if "workers/search" in url]
    page.close()


def test_search_works_from_the_keyboard(browser: Browser, address: str) -> None:
    page = browser.new_page(viewport={"width": 1440, "height": 900})
    page.goto(address, wait_until="networkidle")
    page.keyboard.press("/")
    page.keyboard.type("unused parameters")
    page.locator(f"{FOUND} mark", has_text=re.compile("^parameters$")).first.wait_for()  # last
    assert "<" not in page.locator(f"{FOUND} article").first.inner_text()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    page.wait_for_url("**/02_ddp*/**")
    page.wait_for_selector(
        "article mark", state="attached"
    )  # what was asked for is marked on the page
    page.close()
