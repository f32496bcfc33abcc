"""What a model's forward takes."""

import inspect

import pytest
import torch
from torch import nn

from quantsink.errors import ModelError
from quantsink.models.inputs import cache_argument, example, input_device


def test_the_cache_argument_is_one_that_the_forward_has(tiny_llama):
    model = tiny_llama()
    assert cache_argument(model) in inspect.signature(model.forward).parameters


def test_the_example_of_a_language_model_is_one_token(tiny_llama):
    model = tiny_llama()
    inputs = example(model)
    assert {name: tuple(x.shape) for name, x in inputs.items()} == {"input_ids": (1, 1)}
    assert model(**inputs).logits.shape == (1, 1, 258)


def test_inputs_go_where_the_parameters_are(tiny_llama):
    assert input_device(tiny_llama()) == torch.device("cpu")
    assert input_device(tiny_llama().to("meta")) == torch.device("meta")
    with pytest.raises(ModelError, match="no parameters"):
        input_device(nn.ReLU())
