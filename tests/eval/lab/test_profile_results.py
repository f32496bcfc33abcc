"""A profile's words and numbers as plain data."""

import json

from quantsink.eval.lab.profile_results import (
    AGREES,
    DISAGREES,
    IN_PART,
    Profile,
)


def test_a_profile_is_plain_data(profile: Profile) -> None:
    data = json.loads(json.dumps(profile.to_dict(), allow_nan=False))
    assert [(s["length"], s["bos"], s["windows"]) for s in data["shares"]] == [
        (64, True, 4),
        (64, False, 4),
        (128, True, 2),
        (128, False, 2),
    ]
    assert data["contrast"]["length"] == (32 if profile.model_type.startswith("gemma") else 96)
    assert data["comparisons"][0]["verdict"] in (AGREES, IN_PART, DISAGREES)
    assert len(data["shares"][0]["heads"]) == profile.layers * 4
    assert data["sentences"]["shares"]["deep layers"]["heads"] == profile.layers * 2
