"""XLA's collectives are those that the parallelism asks for; ``isthmus.explain`` lists them by kind, bytes and line."""

from __future__ import annotations

import pytest

from isthmus._runtime.collectives import Collective, collectives
from tests.distributed.mesh_process import run

HLO = """
  %all-gather.2 = f32[64,16]{1,0} all-gather(%param), metadata={op_name="jit(f)/model.py:12/dot_general"}
  %ag = (bf16[8]{0}, bf16[64]{0}) all-gather-start(%p), metadata={op_name="jit(f)/model.py:12/dot_general"}
  %done = bf16[64]{0} all-gather-done(%ag), metadata={op_name="jit(f)/model.py:12/dot_general"}
  ROOT %all-reduce = (f32[2]{0}, pred[3]{0}) all-reduce(%a, %b), metadata={op_name="jit(f)/add"}
  %fusion = f32[2,64]{1,0} fusion(%param, %all-gather), kind=kLoop
"""


def test_collectives_are_read_from_the_text_of_a_program() -> None:
    assert collectives(HLO) == [
        Collective("all-gather", "model.py:12", 2, 64 * 16 * 4 + 8 * 2 + 64 * 2),
        Collective("all-reduce", "", 1, 2 * 4 + 3),
    ]


@pytest.mark.timeout(300)
def test_fully_sharded_weights_are_gathered_and_activations_stay() -> None:
    (said,) = run("mesh_programs", "fsdp", timeout=280)
    weights = 2 * (16 * 64 + 64 + 64 * 16 + 16) * 4
    ((kind, count, size, line),) = said["forward"]
    assert (kind, count, size) == ("all-gather", 8, weights)
    assert line.startswith("mesh_programs.py:")
    assert {row[0] for row in said["both"]} <= {"all-gather", "all-reduce", "reduce-scatter"}
    assert (
        f"all-gather  {count + 3}" in said["text"]
    )  # backward gathers the weights again that it multiplies by


@pytest.mark.timeout(300)
def test_a_tensor_parallel_pair_has_one_all_reduce() -> None:
    (said,) = run("mesh_programs", "tp", timeout=280)
    ((kind, count, size, _),) = said["forward"]
    assert (kind, count, size) == ("all-reduce", 2, 2 * 4 * 16 * 4)


@pytest.mark.timeout(300)
def test_a_tensor_parallel_block_has_two_all_reduces() -> None:
    (said,) = run("mesh_programs", "block", timeout=280)
    assert [(kind, size) for kind, _, size, _ in said["forward"]] == [("all-reduce", 4 * 8 * 16 * 4)] * 2
    assert {kind for kind, *_ in said["both"]} == {"all-reduce"}
