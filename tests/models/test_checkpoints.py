"""What the matrix relies on: checkpoints are repeatable, and no tensor in them is without effect."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from demo.checkpoint import SPECIAL
from tests.models.checkpoints import FAMILIES, SIZE, Family, write_checkpoint

TOKENS = 48


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_every_tensor_matters(family: Family, tmp_path: Path) -> None:
    """Shift the elements of one tensor after the other: each time, the logits of some token are different."""
    model = AutoModelForCausalLM.from_pretrained(write_checkpoint(tmp_path, family), dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(len(SPECIAL), SIZE.vocabulary, (1, TOKENS), generator=generator)
    without_effect = []
    with torch.no_grad():
        native = model(tokens).logits
        for name, tensor in model.state_dict().items():
            saved = tensor.clone()
            tensor.copy_(saved.flatten().roll(1).view_as(saved) if saved.numel() > 1 else saved + 1.0)
            if torch.equal(model(tokens).logits, native):
                without_effect.append(name)
            tensor.copy_(saved)
        assert torch.equal(model(tokens).logits, native)
    assert without_effect == []
    assert native.std() > 1.0


def test_same_seed_gives_the_same_file(tmp_path: Path) -> None:
    one, same, other = (
        write_checkpoint(tmp_path / name, FAMILIES[0], seed) for name, seed in (("one", 0), ("same", 0), ("other", 1))
    )
    file = "model.safetensors"
    assert (one / file).read_bytes() == (same / file).read_bytes()
    assert (one / file).read_bytes() != (other / file).read_bytes()
