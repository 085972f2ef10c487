"""DDP and FSDP2 over one rank: NCCL on a card, gloo in a rehearsal."""

import pytest
import torch

from tests.gpu.cases import DEVICE, REHEARSAL
from tests.gpu.runs import check_losses, continued, train, weights

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def alone(recipe, tmp_path_factory):
    """The run without a process group."""
    return train(recipe, tmp_path_factory.mktemp("alone"), alone=True)


@pytest.mark.parametrize("strategy", ["ddp", *([] if REHEARSAL else ["fsdp2"])])  # on gloo: tests/integration
def test_one_rank_is_a_run_alone(recipe, alone, tmp_path, strategy):
    """Losses, resuming and the export; checkpointed activations and LoRA take part."""
    run = train(recipe, tmp_path, f"trainer.strategy={strategy}", alone=True)
    bound = {"rtol": 1e-4, "abs": 1e-5} if DEVICE == "cpu" else {"rtol": 2e-2, "abs": 1e-3}
    assert check_losses(run) == pytest.approx(check_losses(alone), rel=bound["rtol"], abs=bound["abs"])
    again = continued(run, tmp_path / "again", alone=True)
    for name, mine in weights(again).items():
        torch.testing.assert_close(mine, weights(run)[name], rtol=bound["rtol"], atol=bound["abs"])
    assert (run / "export" / "adapter" / "adapter_model.safetensors").is_file()
