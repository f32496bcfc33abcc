"""A calibration: saved and loaded, and what it says of each head."""

import json

from quantsink.calibration import Calibration, calibrate
from quantsink.calibration.stored import FACTS


def test_a_saved_calibration_loads_to_the_same_bits(tiny_llama, tokenizer, tmp_path, same_tensors):
    calibration = calibrate(tiny_llama(), tokenizer, ["builtin:prose", "builtin:code"], seq_len=64, max_tokens=1024)
    calibration.save(tmp_path)
    again = Calibration.load(tmp_path)
    assert same_tensors(calibration, again)
    assert again.heads() == calibration.heads()
    assert (again.settings, again.domains, again.layers) == (
        calibration.settings,
        calibration.domains,
        calibration.layers,
    )
    facts = json.loads((tmp_path / FACTS).read_text())
    assert len(facts["heads"]) == 8
    assert {"layer", "head", "kv_head", "bos_mass", "sink_mass", "entropy", "sink", "route"} <= facts["heads"][0].keys()
