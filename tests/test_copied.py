"""Tests that classes and functions that readers copy from pages work on different models."""

from __future__ import annotations

import ast
import importlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from processes import HANG, start

ROOT = Path(__file__).resolve().parent.parent
INPUTS = ["docs", "code of snippets", "tests/copied.py"]
CHAPTERS = ("02", "03", "04", "05", "07", "09", "10")
EMBEDDED = re.compile(r'--8<-- "snippets/([^":]+)\.py:(\w+)"')
MODEL_TYPE = re.compile(r"Module|Sequential|Parameter|Optimizer|DistributedDataParallel|DDP")
MODEL_NAMES = {"model", "module", "ddp", "optimizer", "layers", "stage", "experts"}
NO_MODEL_BASES = {  # bases of classes that contain data or answer requests
    "TorchDispatchMode",
    "NamedTuple",
    "Dataset",
    "IterableDataset",
    "Exception",
    "BaseHTTPRequestHandler",
    "dict",
}
# the programs that tests/copied.py imports
IMPORTED = re.findall(r'program\("(\w+/\w+)"', (ROOT / "tests/copied.py").read_text("utf-8"))
# no page shows this class, but it uses the class Bucket, which a page shows
NOT_ON_A_PAGE = {"ZeRO2"}
# the reason why copied.py does not test a class or function → a list of PROGRAM:NAME
REASONS = {
    "copied.py tests it together with its wrapper or optimizer": """
        buckets:Bucket mini_ddp:Bucket mini_ddp:fill_buckets zero1:Flat zero2:Bucket
        mini_fsdp:Unit""",
    "torch's wrappers or state dicts do the work, for every model": """
        torch_ddp:wrap uneven_inputs:train_with_join accumulation:synchronize_last
        expert_parallel_api:ExpertParallel expert_parallel_api:cut
        clip_two_meshes:clip_by_mesh optimizer_by_name:load_by_number
        optimizer_by_name:load_by_name loss_scale_minimum:LossScaler
        loss_scale_minimum:first_overflow checkpoint_reshard:save fsdp2:shard_blocks
        wrapping:blocks wrapping:linears prefetch:look_ahead clip_and_accumulate:reduce_last
        clip_and_accumulate:stay_whole checkpointing_with_sharding:checkpoint_inside
        checkpointing_with_sharding:checkpoint_outside fsdp1_strategies:old
        fsdp1_strategies:new patchwork:broadcast pipelining_api:train_step
        clip_before_unscale:right mean_of_means:global_mean conversions:save conversions:load
        uneven_mesh:from_every_rank uneven_mesh:from_rank_0 uneven_mesh:through_dcp lora:train
        lora:shard peft_lora:with_peft checkpoint_reshard:load device_map_auto:automatic
        uniform_dtype:wrap inf_on_one_rank:AllRanksScaler""",
    "a function of tensors, whose program compares the gradients": """
        fp8_training:Scale custom_function:Plain custom_function:SameState
        custom_function:Always32 lse_gradient:Part triton_autograd:FlashAttention""",
    "a model or a part of a model with the sizes of its program": """
        unused_parameters:TwoHeads flex_context_parallel:Attention moe_dense:MixtureOfExperts
        grouped_experts:Experts grouped_experts:MixtureOfExperts two_link_dispatch:two_links
        pipelining_tracer:Net tensor_parallel_block:Block
        tensor_parallel_block:TensorParallelBlock bypassed_hooks:Model view_output:Model
        stages:Layer torchscript:Gate sharded_embeddings:train bytes_held:NormedBlock
        bf16_positions:Buffers graphed_all_reduce:Step exposed_wrappers:Stack""",
    "it serves the model of its program": """
        continuous_batching:serve continuous_batching:check_alone speculative:round_""",
    "it causes a failure or measures something": """
        threads_or_processes:data_parallel ready_twice:losses late_parameters:apply_change
        in_place_grad_view:kept_gradients rank0_only:run gradient_clipping:clip_then_average
        gradient_clipping:average_then_clip cpu_oversubscribed:seconds_per_step
        naive_split:split_step recompute:step own_schedule:train_step unscaled_loss:step
        tied_embeddings:split_backward batchnorm_micro_batches:gradient
        stale_optimizer:built_before stale_optimizer:built_after resumed_without_scaler:step
        uneven_forwards:evaluate local_norm:clip_by_own_norm underflow:gradients
        clip_before_unscale:wrong leaks:cycle leaks:no_cycle leaks:Node leaks:loss_with_graph
        leaks:loss_as_number leaks:error_kept leaks:error_as_text leaks:hook_left
        leaks:hook_removed loader_failures:TooLarge loader_failures:Ragged
        dropout_in_eval:Forgetful dropout_in_eval:Fixed export_decode:Halves
        export_decode:Stops export_decode:StopsNot tensorrt_road:refused elastic:save
        elastic:load sequence_lengths:of_length mfu:measure step_cost:step_seconds
        no_target_left:per_token no_target_left:accumulate frozen_inputs:require_grad""",
    "it simulates, counts or logs something, and needs no model": """
        two_link_dispatch:Hop record_stream:Allocator record_stream:Stream
        block_tables:TextPool fragmentation:Segments fragmentation:Expandable
        staging:CopyEngine nvme_bytes:Counting metrics:Metrics gpu_metrics:Gpu
        gpu_metrics:Log""",
    "it needs a parameter, not a model": "mixed_precision_policy:vectors_in_fp32",
}


def needs_a_model(node: ast.ClassDef | ast.FunctionDef) -> bool:
    """Return whether a reader can use this class or function with a different model.

    This is so for a class, unless it contains data. It is also so for a function with a
    parameter for any model or optimizer. The annotation of such a parameter is a type of torch.
    A function whose parameter has a class of its program as type works only with this class.
    """
    if isinstance(node, ast.ClassDef):
        is_dataclass = any(ast.unparse(d).startswith("dataclass") for d in node.decorator_list)
        return not is_dataclass and not NO_MODEL_BASES & set(map(ast.unparse, node.bases))
    return any(
        MODEL_TYPE.search(ast.unparse(each.annotation))
        if each.annotation
        else each.arg in MODEL_NAMES
        for each in (*node.args.args, *node.args.kwonlyargs)
    )


def embedded(text: str, section: str) -> Iterator[ast.ClassDef | ast.FunctionDef]:
    """Yield the classes and functions with the name of a section, or between its markers."""
    head, _, rest = text.partition(f"--8<-- [start:{section}]")
    begin, lines = head.count("\n") + 1, rest.partition(f"[end:{section}]")[0].count("\n")
    tree = ast.parse(text)
    functions = {node for node in tree.body if isinstance(node, ast.FunctionDef)}
    for node in functions | {node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}:
        if node.name == section or begin <= node.lineno < begin + lines:
            yield node


def shown_on_pages() -> Iterator[tuple[str, ast.ClassDef | ast.FunctionDef]]:
    """Yield the name of the program and the node of each class and function on a page."""
    for page in sorted((ROOT / "docs").glob("*.md")):
        if page.name.startswith(CHAPTERS):
            for path, name in EMBEDDED.findall(page.read_text("utf-8")):
                text = (ROOT / f"snippets/{path}.py").read_text("utf-8")
                for node in embedded(text, name):
                    yield Path(path).name, node


def names_with_a_test() -> set[str]:
    """Return the names of the classes and functions that copied.py tests with models."""
    pytest.importorskip("torch")
    copied = importlib.import_module("copied")
    titles = [*copied.WRAPPERS, *copied.MODEL_CASES, *copied.ONE_RANK_MODEL_CASES]
    return {name for title in titles for name in copied.names(title)}


def test_everything_that_readers_copy_is_tested_or_has_a_reason() -> None:
    """A function that needs no model is not tested here.

    Its arguments are numbers and tensors, and its own program checks its results.
    """
    tested = names_with_a_test()
    excluded = {name for names in REASONS.values() for name in names.split()}
    untested = {
        f"{program}:{node.name}"
        for program, node in shown_on_pages()
        if node.name not in tested and needs_a_model(node)
    }
    assert not untested - excluded, "test these in copied.py, or write a reason into REASONS"
    assert not excluded - untested, "copied.py tests these, or no page shows them"


def test_everything_that_copied_py_tests_is_shown_on_a_page() -> None:
    shown = {node.name for _, node in shown_on_pages()}
    assert names_with_a_test() - shown == NOT_ON_A_PAGE


def test_everything_that_copied_py_tests_exists() -> None:
    trees = [ast.parse((ROOT / f"snippets/{path}.py").read_text("utf-8")) for path in IMPORTED]
    nodes = (node for tree in trees for node in tree.body)
    assert names_with_a_test() <= {getattr(node, "name", "") for node in nodes}


class Ranks(NamedTuple):
    count: int
    inputs: tuple[str, ...] = ("tests/copied.py", *(f"snippets/{p}.py" for p in IMPORTED))


@pytest.mark.parametrize("ranks", [Ranks(1), Ranks(2), Ranks(3)], ids=lambda r: str(r.count))
def test_copied_classes_and_functions_work_on_different_models(
    ranks: Ranks, tmp_path: Path
) -> None:
    """The results equal those of one process, and wrong uses raise the expected errors."""
    pytest.importorskip("torch")
    words = ["torchrun", f"--nproc-per-node={ranks.count}", str(ROOT / "tests/copied.py")]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    out, err = start(words, tmp_path, environment).communicate(HANG)
    assert out.splitlines() == ["all cases ran"], out + err
