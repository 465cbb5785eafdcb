from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tests.planning.test_planner import make, prepared, registry
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs
from torchrec.distributed.types import ModuleSharder

from recd_plugins.config.schema import TrainingSpec
from recd_plugins.interfaces import PluginOptions, SharderArguments, Sharding
from recd_plugins.runtime.errors import SetupError
from recd_plugins.sharding.build import build_sharders
from recd_plugins.sharding.wire import wire_codecs


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


def test_two_formats_are_refused() -> None:
    codecs: Any = {"a": None}
    with pytest.raises(SetupError, match=r"training\.wire is bf16, and the sharders have a qcomm"):
        build_sharders(prepared(registry(wire="bf16")), qcomm_codecs_registry=codecs)


class _Sequences(nn.Module):
    pass


class _Sharder(EmbeddingCollectionSharder):
    @property
    def module_type(self) -> Any:
        return _Sequences


class Own(Sharding):
    """Shards a module of its own."""

    name = "test.own"

    class Options(PluginOptions):
        pass

    def sharders(self, arguments: SharderArguments) -> Sequence[ModuleSharder[nn.Module]]:
        sharder: Any = _Sharder(arguments.fused_params, arguments.qcomm_codecs_registry)
        return [sharder]


class Failing(Own):
    def sharders(self, arguments: SharderArguments) -> Sequence[ModuleSharder[nn.Module]]:
        raise KeyError(len(arguments.kernels))


def test_sharders_that_fail_name_their_plugin() -> None:
    with pytest.raises(KeyError, match=r"0\ntest\.own: sharders failed at .*py:\d+"):
        build_sharders(prepared(registry((make(Failing), ["t"]))))


@pytest.mark.parametrize("wire", ["fp16", "bf16"])
def test_gradients_pass_the_codecs(wire: str) -> None:
    """TorchRec's synchronous collectives leave that to autograd; FBGEMM's bf16 loses it."""
    codecs = wire_codecs(TrainingSpec.model_validate({"wire": wire}), None, ())
    assert codecs is not None
    for both in codecs.values():
        numbers = torch.tensor([1.0, 2.5], requires_grad=True)
        both.forward.decode(both.forward.encode(numbers)).sum().backward()
        assert numbers.grad is not None
        assert numbers.grad.tolist() == [1.0, 1.0]


def test_a_trainers_own_bf16_has_a_gradient_and_its_loss_scale() -> None:
    config = QCommsConfig(CommType.BF16, CommType.BF16, 4.0, 2.0)
    given = {"a": get_qcomm_codecs(config), "b": get_qcomm_codecs(QCommsConfig(CommType.FP16))}
    found = wire_codecs(TrainingSpec(), given, ())
    assert found is not None
    assert found["b"].forward is given["b"].forward
    for mended, own in (
        (found["a"].forward, given["a"].forward),
        (found["a"].backward, given["a"].backward),
    ):
        numbers = torch.tensor([1.0, 0.3], requires_grad=True)
        decoded = mended.decode(mended.encode(numbers))
        assert torch.equal(decoded, own.decode(own.encode(numbers)))
        decoded.sum().backward()
        assert numbers.grad is not None
        assert numbers.grad.tolist() == [1.0, 1.0]
