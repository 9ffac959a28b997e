"""Tests of the search in a browser: error messages and descriptions find the right section."""

from __future__ import annotations

import gzip
import re
import time
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

from conftest import SITE, open_complete

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

INPUTS = [*SITE, "tests/pasted.toml", "tests/descriptions.toml"]
TEXT = "search/text.json"  # the browser fetches it, compressed, at the first search
MAX_BYTES, MAX_COMPRESSED_BYTES = 4_750_000, 1_530_000
RESULT = ".md-search-result__item"

# Messages with numbers, names and paths that do not occur in the book.
MESSAGES = """
01_collectives/#timed-out-waiting-for-clients
    torch.distributed.DistStoreError: Timed out after 601 seconds waiting for clients. 3/4 clients joined.
01_collectives/#detected-mismatch-between-collectives-on-ranks
    RuntimeError: Detected mismatch between collectives on ranks. Rank 0 is running collective: CollectiveFingerPrint(SequenceNumber=12, OpType=ALLREDUCE, TensorShape=[1024])
01_collectives/#duplicate-gpu-detected-memory-of-other-ranks-on-gpu-0
    every process allocates memory on GPU 0
02_runs_that_last/#attempting-to-deserialize-object-on-a-cuda-device-but-torchcudais_available-is-false
    RuntimeError: Attempting to deserialize object on a CUDA device but torch.cuda.is_available() is False. If you are running on a CPU-only machine, please use torch.load with map_location=torch.device('cpu') to map your storages to the CPU.
01_communication_costs/#nccl-hangs-on-consumer-gpus-p2p-iommu-and-acs
    NCCL hangs RTX 4090 P2P IOMMU ACS
02_ddp_in_practice/#missing-keys-in-state_dict-unexpected-keys-module
    RuntimeError: Error(s) in loading state_dict for ResNet: Missing key(s) in state_dict: "conv1.weight", "bn1.weight". Unexpected key(s) in state_dict: "module.conv1.weight", "module.bn1.weight".
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
04_checkpoints/#the-checkpoint-being-loaded-used-a-dp-world-size-of-2
    deepspeed.runtime.zero.utils.ZeRORuntimeException: The checkpoint being loaded used a DP world size of 8 but the current world size is 6. Automatic adjustment of ZeRO's optimizer state partitioning with a new world size is not currently supported.
04_checkpoints/#every-rank-loads-the-model-into-host-memory
    every rank loads the model into host memory
04_checkpoints/#convert-fsdp1-fsdp2-dcp-deepspeed-and-safetensors-checkpoints
    convert DeepSpeed checkpoint to safetensors FSDP2
04_checkpoints/#assertionerror-in-distribute_tensor-fsdp2-over-tp-and-rows-that-ranks-do-not-divide
    Can not load full state dictionary containing parameters whose first dimension is not divisible by DP size in FSDP 2 + TP model
04_checkpoints/#size-mismatch-for-0weight-the-state-dict-of-rank-0-alone
    FSDP2 state dict full to sharded different world size
04_deepspeed/#direct-calls-to-tensorbackward-are-not-supported-in-this-configuration
    RuntimeError: Direct calls to tensor.backward() are not supported in this configuration. Please use engine.backward(loss)
04_fsdp/#fsdp-parameters-should-be-materialized-from-meta-device-before-training
    RuntimeError: FSDP parameters should be materialized from meta device before training, but the following were still on meta device: ['tok_embeddings.weight']
05_precision_in_practice/#index_add_-self-float-and-source-bfloat16-must-have-the-same-scalar-type
    RuntimeError: mat1 and mat2 must have the same dtype, but got BFloat16 and Float
05_precision_in_practice/#expected-scalar-type-half-but-found-float-and-its-relatives
    ValueError: Attempting to unscale FP16 gradients.
06_host_and_device/#expected-all-tensors-to-be-on-the-same-device
    RuntimeError: Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! (when checking argument for argument mat1 in method wrapper_CUDA_addmm)
07_memory_and_performance/#trying-to-backward-through-the-graph-a-second-time
    RuntimeError: Trying to backward through the graph a second time (or directly access saved tensors after they have already been freed).
07_memory_and_performance/#one-of-the-variables-needed-for-gradient-computation-has-been-modified-by-an-inplace-operation
    RuntimeError: one of the variables needed for gradient computation has been modified by an inplace operation: [torch.cuda.FloatTensor [64, 256]], which is output 0 of ReluBackward0, is at version 1; expected version 0 instead.
08_int8_layers/#only-tensors-of-floating-point-and-complex-dtype-can-require-gradients-and-other-errors
    RuntimeError: Only Tensors of floating point and complex dtype can require gradients
08_four_bits/#provided-sizes-1-32-dont-multiply-up-to-the-size-of-dim-1
    RuntimeError: unflatten: Provided sizes [-1, 128] don't multiply up to the size of dim 1 (11008) in the input tensor
10_attention_in_practice/#flexattention-does-not-support-backward-on-cpu
    NotImplementedError: FlexAttention does not support backward on CPU
11_tools/#what-did-the-rank-say-that-failed
    torch.distributed.elastic.multiprocessing.errors.ChildFailedError
setup/#use_libuv-was-requested-but-pytorch-was-built-without-libuv-support
    RuntimeError: use_libuv was requested but PyTorch was build without libuv support
setup/#found-no-nvidia-driver-on-your-system
    RuntimeError: Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU and installed a driver from http://www.nvidia.com/Download/index.aspx
"""
OWN_MESSAGES = list(zip(*[iter(MESSAGES.strip().splitlines())] * 2, strict=True))
# Messages from public threads. A search box replaces line ends by spaces.
THREADS = tomllib.loads(Path(__file__).with_name("pasted.toml").read_text("utf-8"))["message"]
THREAD_MESSAGES = [(each["section"], " ".join(each["text"].split())) for each in THREADS]
# Descriptions that a reader without an error message enters.
DESCRIPTIONS = [
    (each["section"], each["text"])
    for each in tomllib.loads(Path(__file__).with_name("descriptions.toml").read_text("utf-8"))[
        "description"
    ]
]
FRAMES = "".join(  # C++ frames, which follow an error message
    f" frame #{i}: c10d::ProcessGroupNCCL::WorkNCCL::checkTimeout(std::optional<long>) + 0x1d2"
    f" (0x7f1554e9e0f{i:x} in /opt/conda/lib/python3.12/site-packages/torch/lib/libtorch_cuda.so)"
    for i in range(12)
)


TRACEBACK = """2025-03-11 08:41:07,113 INFO train.py:212 epoch 3 step 1200 loss 2.4131 lr 3.0e-04
\x1b[31mTraceback (most recent call last):
  File "/home/anna/project/llm-training/train.py", line 412, in <module>
    main(args)
  File "/home/anna/project/llm-training/train.py", line 330, in main
    loss = train_step(model, batch, optimizer, scheduler)
  File "/home/anna/miniconda3/envs/llm/lib/python3.12/site-packages/torch/nn/modules/module.py", line 1739, in _wrapped_call_impl
    return self._call_impl(*args, **kwargs)
           ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
  File "/home/anna/miniconda3/envs/llm/lib/python3.12/site-packages/torch/nn/modules/module.py", line 1750, in _call_impl
    return forward_call(*args, **kwargs)
           ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
"""
WARNINGS = """\x1b[0m
W0311 08:41:09.120000 41207 site-packages/torch/distributed/elastic/multiprocessing/api.py:897] Sending process 41288 closing signal SIGTERM
[W311 08:41:09.553126 ProcessGroupNCCL.cpp:1496] Warning: WARNING: destroy_process_group() was not called before program exit, which can leak resources. For more info, please see https://pytorch.org/docs/stable/distributed.html#shutdown (function operator())
"""


def in_a_log(message: str) -> str:
    """Return a log with rank prefixes that contains a traceback, the message and warnings."""
    lines = (TRACEBACK + message.strip("\n") + WARNINGS).splitlines()
    return " ".join(" ".join(f"[rank3]: {line}" for line in lines).split())


def test_the_search_index_is_small(built_site) -> None:
    """The size determines how long the first search takes."""
    whole = (built_site / TEXT).read_bytes()
    assert len(whole) < MAX_BYTES
    assert len(gzip.compress(whole, 6)) < MAX_COMPRESSED_BYTES
    assert (built_site / "search/search_index.json").stat().st_size < 1000  # all pages load it


def search(page: Page, question: str) -> float:
    """Paste a text into the search box; return the seconds until a result is visible."""
    page.fill("[data-md-component=search-query]", "")
    page.wait_for_function(f"!document.querySelector('{RESULT}')")
    start = time.perf_counter()
    page.fill("[data-md-component=search-query]", question)
    page.wait_for_selector(RESULT)
    return time.perf_counter() - start


def test_a_message_or_a_description_finds_its_section(browser: Browser, site_url: str) -> None:
    """One of the first three results of the worker must begin with the expected section."""
    page = browser.new_page()
    page.goto(f"{site_url}404.html")
    questions = [
        *OWN_MESSAGES,
        *THREAD_MESSAGES,
        *((section, message + FRAMES) for section, message in THREAD_MESSAGES),
        *((each["section"], in_a_log(each["text"])) for each in THREADS),
        *DESCRIPTIONS,
    ]
    answers = page.evaluate(
        """async questions => {
            const worker = new Worker("assets/search.js"), answers = []
            for (const data of questions) {
                const answer = new Promise(done => { worker.onmessage = done })
                worker.postMessage({ type: 2, data })
                const { items } = (await answer).data.data
                answers.push(items.slice(0, 3).map(([first]) => first.location))
            }
            return answers
        }""",
        [message for _, message in questions],
    )
    faults = [
        f"{message}\n    {section}\n    is not among {found}"
        for (section, message), found in zip(questions, answers, strict=True)
        # the home page, whose address is empty, must not be the first result
        if section not in found or not found[0]
    ]
    assert not faults, "\n".join(faults)
    assert all(each["found"].startswith("https://") for each in THREADS)
    page.close()


def test_a_pasted_message_is_found_and_the_index_is_fetched_once(
    browser: Browser, site_url: str
) -> None:
    page = browser.new_page(viewport={"width": 1440, "height": 900})
    requested = []
    page.on("request", lambda request: requested.append(request.url.removeprefix(site_url)))
    open_complete(page, f"{site_url}setup/")
    assert TEXT not in requested  # the index is not fetched before the first search
    seconds = []
    for section, message in THREAD_MESSAGES[:3]:
        seconds.append(search(page, message))
        shown = (
            page.locator(RESULT)
            .first.locator("a:visible")
            .evaluate_all(
                "links => links.map(({ pathname, hash }) => pathname.slice(1) + hash)"
            )
        )
        assert section in shown, (message, shown)
    print(f"first result: {seconds[0]:.2f} s, then at most {max(seconds[1:]):.2f} s")
    assert [url for url in requested if url.startswith("search/")].count(TEXT) == 1
    assert not [url for url in requested if "workers/search" in url]
    page.close()


def test_search_works_by_keyboard(browser: Browser, site_url: str) -> None:
    page = browser.new_page(viewport={"width": 1440, "height": 900})
    open_complete(page, site_url)
    page.keyboard.press("/")
    page.keyboard.type("unused parameters")
    page.locator(f"{RESULT} mark", has_text=re.compile("^parameters$")).first.wait_for()  # last
    assert "<" not in page.locator(f"{RESULT} article").first.inner_text()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    page.wait_for_url("**/02_ddp*/**")
    page.wait_for_selector(
        "article mark", state="attached"
    )  # the words of the search are marked on the page
    page.close()
