"""What a laboratory command leaves in its folder."""

import json
from pathlib import Path

from quantsink.eval.lab.output import FACTS, TABLES, Finding, is_laboratory, save
from quantsink.eval.lab.tables import Table


def test_figures_tables_and_pictures_are_saved_and_the_folder_is_known_again(tmp_path: Path) -> None:
    table = Table("Idle weight", ("variant", "weight"), (("softmax", "0.99"),))
    finding = Finding("trigger", "The trigger task", {"runs": [1]}, (table,), {"bos.png": b"picture"}, 1.234)
    save([finding, finding], tmp_path)
    experiments = json.loads((tmp_path / FACTS).read_text())["experiments"]
    assert [(e["experiment"], e["seconds"], e["runs"]) for e in experiments] == [("trigger", 1.2, [1])] * 2
    assert set(experiments[0]["versions"]) == {"python", "quantsink", "torch", "transformers"}
    page = (tmp_path / TABLES).read_text()
    assert page.count("## The trigger task\n\n### Idle weight\n") == 2
    assert "![The trigger task](bos.png)" in page
    assert (tmp_path / "bos.png").read_bytes() == b"picture"
    assert is_laboratory(tmp_path)
    (tmp_path / "notes.txt").touch()
    assert not is_laboratory(tmp_path)


def test_an_empty_folder_is_not_a_laboratory(tmp_path: Path) -> None:
    assert not is_laboratory(tmp_path)
