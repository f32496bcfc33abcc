"""Keys are turned to another position by the model's own rotary code, or the model is refused."""

import pytest
import torch

from quantsink.errors import ArchitectureError
from quantsink.models.rotary import keys_at, rotations


@pytest.mark.parametrize("family", ["tiny_llama", "tiny_gemma"])
@pytest.mark.parametrize("shift", [-7, 0, 1, 250])
def test_turned_keys_are_those_of_the_other_position(family, shift, request):
    model = request.getfixturevalue(family)()
    layers = list(range(model.config.num_hidden_layers))
    rotate = rotations(model, layers)
    before, after = keys_at(model, 20), keys_at(model, 20 + shift)
    for layer in layers:
        turned = rotate[layer](before[layer], shift)
        assert turned.dtype == before[layer].dtype
        torch.testing.assert_close(turned, after[layer], rtol=1e-4, atol=1e-4)
        assert (shift == 0) == torch.equal(before[layer], after[layer])


def test_rotations_add_up(tiny_llama):
    model = tiny_llama()
    rotate, keys = rotations(model, [0])[0], keys_at(model, 3)[0]
    torch.testing.assert_close(rotate(rotate(keys, 11), -4), rotate(keys, 7), rtol=1e-5, atol=1e-5)


def test_reading_keys_leaves_the_mode_of_the_model(tiny_llama):
    model = tiny_llama().train()
    keys_at(model, 5)
    assert all(module.training for module in model.modules())


def test_frequencies_that_depend_on_the_length_are_refused(tiny_llama):
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    with pytest.raises(ArchitectureError, match="needs fixed rotary positions, the model has dynamic"):
        rotations(tiny_llama(rope_parameters=rope), [0])


def test_a_model_without_weights_is_refused(tiny_llama):
    with pytest.raises(ArchitectureError, match="needs a model with its weights loaded"):
        rotations(tiny_llama().to("meta"), [0])
