"""The heat maps that lie beside a calibration."""

import io

import numpy as np
from matplotlib.image import imread

from quantsink.calibration import Calibration, calibrate
from quantsink.calibration.plots import heat_map, save_with_pictures
from quantsink.calibration.stored import PICTURES, is_calibration


def test_pictures_lie_beside_the_tables(tiny_llama, tokenizer, tmp_path, same_tensors):
    calibration = calibrate(tiny_llama(), tokenizer, "builtin:prose", seq_len=64, max_tokens=128)
    save_with_pictures(calibration, tmp_path)
    assert set(PICTURES) < {path.name for path in tmp_path.iterdir()}
    assert is_calibration(tmp_path)
    assert same_tensors(Calibration.load(tmp_path), calibration)


def test_a_picture_shows_the_statistics(tiny_llama, tokenizer):
    calibration = calibrate(tiny_llama(), tokenizer, "builtin:prose", seq_len=64, max_tokens=128)
    before = imread(io.BytesIO(heat_map(calibration, "bos_mass", "title")))
    again = imread(io.BytesIO(heat_map(calibration, "bos_mass", "title")))
    fields = calibration.total.heads["model.layers.0.self_attn"]
    fields["bos_mass"][2] = fields["rows"][2]
    after = imread(io.BytesIO(heat_map(calibration, "bos_mass", "title")))
    assert np.array_equal(before, again)
    assert not np.array_equal(before, after)
