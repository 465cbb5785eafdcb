from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.planning.test_planner import Model, make, prepared, profile, registry
from tests.sharded import plan_of
from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs
from torchrec.distributed.sharding_plan import column_wise, row_wise, table_wise

from recd_plugin_torchrec.shardings import RowWise
from recd_plugins.config.schema import TrainingSpec
from recd_plugins.interfaces import Table
from recd_plugins.runtime.errors import SetupError
from recd_plugins.sharding.build import build_sharders
from recd_plugins.sharding.wire import Int8, block_of, check_int8, scalar_bytes, wire_codecs


@pytest.mark.parametrize(
    ("wire", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16), ("int8", torch.uint8)]
)
def test_all_sharders_have_the_format(wire: str, dtype: torch.dtype) -> None:
    for sharder in build_sharders(prepared(registry(wire=wire))):
        if not type(sharder).__name__.startswith("Quant"):  # those of inference
            codecs = sharder.qcomm_codecs_registry
            assert codecs is not None
            assert len(codecs) == 3
            for both in codecs.values():
                assert both.forward.quantized_dtype == both.backward.quantized_dtype == dtype


def test_fp32_has_none() -> None:
    assert {each.qcomm_codecs_registry for each in build_sharders(prepared(registry()))} == {None}


def decoded_with_gradient(codec: Any, numbers: torch.Tensor) -> torch.Tensor:
    numbers.requires_grad_()
    decoded: torch.Tensor = codec.decode(codec.encode(numbers))
    decoded.sum().backward()
    assert numbers.grad is not None
    assert numbers.grad.tolist() == [1.0, 1.0]
    return decoded


@pytest.mark.parametrize("wire", ["fp16", "bf16"])
def test_gradients_pass_the_codecs(wire: str) -> None:
    """TorchRec's synchronous collectives leave that to autograd; FBGEMM's bf16 loses it."""
    codecs = wire_codecs(TrainingSpec.model_validate({"wire": wire}), None, ())
    assert codecs is not None
    for both in codecs.values():
        decoded_with_gradient(both.forward, torch.tensor([1.0, 2.5]))


def test_a_trainers_own_bf16_has_a_gradient_and_its_loss_scale() -> None:
    config = QCommsConfig(CommType.BF16, CommType.BF16, 4.0, 2.0)
    given = {"a": get_qcomm_codecs(config), "b": get_qcomm_codecs(QCommsConfig(CommType.FP16))}
    found = wire_codecs(TrainingSpec(), given, ())
    assert found is not None
    assert found["b"].forward is given["b"].forward
    for way in ("forward", "backward"):
        numbers, own = torch.tensor([1.0, 0.3]), getattr(given["a"], way)
        decoded = decoded_with_gradient(getattr(found["a"], way), numbers)
        assert torch.equal(decoded, own.decode(own.encode(numbers)))


def tables(*dims: int) -> list[Table]:
    return [Table(f"t{dim}", ("f",), 10, dim, pooled=True) for dim in dims]


def through(numbers: torch.Tensor, block: int = 16) -> torch.Tensor:
    codec = Int8(block)
    there, back = codec.create_context(), codec.create_context()
    encoded = codec.encode(numbers.view(-1), there)
    assert len(encoded) == codec.calc_quantized_size(numbers.numel(), back)
    return codec.decode(encoded, there).view(numbers.shape)


@pytest.mark.parametrize("block", [16, 32])
@pytest.mark.parametrize("size", [1e-12, 1e-3, 1e4])
def test_numbers_are_within_half_a_step(size: float, block: int) -> None:
    """Small ones too: FBGEMM takes ranges of less than 1e-8 for none."""
    torch.manual_seed(0)
    numbers = torch.randn(50, block) * size
    ranges = numbers.amax(1, keepdim=True) - numbers.amin(1, keepdim=True)
    assert ((through(numbers, block) - numbers).abs() <= ranges / 510 * 1.001).all()
    assert through(torch.zeros(2, block)).eq(0).all()
    assert len(through(torch.empty(0, block))) == 0


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_what_is_no_number_stays_none(wrong: float) -> None:
    numbers = torch.rand(3, 16)
    numbers[1, 3] = wrong
    found = through(numbers)
    assert found[1].isnan().all()
    assert not found[[0, 2]].isnan().any()


def test_blocks_are_whole_in_every_table() -> None:
    assert [block_of(tables(*dims)) for dims in ((64, 32), (48, 64), (16,), ())] == [32, 16, 16, 32]
    assert scalar_bytes("int8", tables(16)) == 1.5
    with pytest.raises(SetupError, match="table 't24': embedding_dim 24"):
        block_of(tables(32, 24))


def test_sums_on_their_way_and_lost_gradients_are_refused() -> None:
    codec, numbers = Int8(16), torch.ones(32, requires_grad=True)
    with pytest.raises(SetupError, match=r"training\.wire: int8 does not support"):
        codec.encode(numbers.detach())
    with pytest.raises(SetupError, match=r"training\.wire: int8 does not support"):
        codec.encode(numbers, codec.create_context())


@pytest.mark.parametrize(
    ("kind", "pooled", "message"),
    [
        (row_wise(), True, "table 'a' is pooled and sharded 'row_wise'"),
        (column_wise(ranks=[0, 1]), True, "a shard of 8 columns, but .* blocks of 16"),
        (column_wise(ranks=[0, 1]), False, "a shard of 8 columns, but .* blocks of 16"),
        (row_wise(), False, None),
        (table_wise(rank=1), True, None),
    ],
)
def test_plans_that_cannot_be_sent(kind: Any, pooled: bool, message: str | None) -> None:
    model = Model()
    bags, sequences, *_ = build_sharders(prepared(registry(wire="int8")))
    sharder: Any = bags if pooled else sequences
    module = model.bags if pooled else model.sequences
    plan = plan_of(module, kind, build_sharders(prepared(registry()))[not pooled], 2, 2)
    if message is None:
        check_int8(sharder.qcomm_codecs_registry, plan, pooled=pooled)
    else:
        with pytest.raises(SetupError, match=message):
            sharder.shard(module, plan, None, torch.device("cpu"))


def test_a_planner_takes_no_row_wise_bags() -> None:
    ready = prepared(registry((make(RowWise), ["a"]), wire="int8"))
    planner = ready.planner(world_size=2, profile=profile())
    with pytest.raises(SetupError, match=r"sharded 'row_wise' .* 'data_parallel', 'table_wise'"):
        planner.plan(ready.model, ready.sharders())
