"""What the tests of export share."""

import pytest
from tiny import calibrated


@pytest.fixture(scope="session")
def calibrated_model(tiny_llama, tokenizer, tmp_path_factory):
    """A folder with a tiny model in `model` and its calibration in `calibration`."""
    folder, model = tmp_path_factory.mktemp("export"), tiny_llama()
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    calibrated(model, tokenizer).save(folder / "calibration")
    return folder
