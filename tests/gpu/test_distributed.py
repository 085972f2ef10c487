"""DDP and FSDP2 over one rank: NCCL on a card, gloo in a rehearsal."""

import pytest
import torch
import torch.distributed as dist

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


def test_collectives(tmp_path):
    """What training asks of the process group: sums, a gather, a broadcast, a barrier."""
    backend = "gloo" if DEVICE == "cpu" else "nccl"
    dist.init_process_group(backend, init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        x = torch.arange(4.0, device=DEVICE)
        total, parts = x.clone(), [torch.zeros_like(x)]
        dist.all_reduce(total)
        dist.all_gather(parts, x)
        dist.broadcast(x, 0)
        dist.barrier()
        assert dist.get_backend() == backend
        assert torch.equal(total, x) and torch.equal(parts[0], x)
    finally:
        dist.destroy_process_group()
