"""The laboratory's models are models of transformers in what quantsink asks of them."""

import pytest
import torch

from quantsink.errors import ArchitectureError
from quantsink.eval.lab.attention import AttentionSpec
from quantsink.eval.lab.model import FeatureModel, LabConfig
from quantsink.models.inputs import example


def test_a_model_of_vectors_is_tried_in_its_own_type() -> None:
    model = FeatureModel(LabConfig(), AttentionSpec()).to(torch.float64)
    assert example(model)["inputs_embeds"].dtype == torch.float64

    class Silent(FeatureModel):
        dummy_inputs = {}  # noqa: RUF012

    with pytest.raises(ArchitectureError, match="its dummy_inputs hold no inputs_embeds"):
        example(Silent(LabConfig(), AttentionSpec()))
