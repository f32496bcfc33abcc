"""`quantsink demo`: which model it takes and which folder --force may replace. tests/real runs it as a whole."""

import shutil

from quantsink.cli import demo


def test_the_model_is_the_gguf_file_of_the_installed_package_or_the_hub_id(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(demo, "PACKAGE", "package_with_a_model")
    assert demo.model_name() == demo.HUB
    (tmp_path / "package_with_a_model").mkdir()
    (tmp_path / "package_with_a_model" / "__init__.py").write_text("raise ImportError")
    assert demo.model_name() == demo.HUB
    (tmp_path / "package_with_a_model" / "model.gguf").touch()
    assert demo.model_name() == str(tmp_path / "package_with_a_model" / "model.gguf")


def test_force_may_replace_only_what_a_demo_wrote(work, tmp_path):
    for part in ("calibration", "checkpoint"):
        shutil.copytree(work / part, tmp_path / "demo" / part)
    assert demo.is_demo(tmp_path / "demo")
    (tmp_path / "demo" / "thesis.txt").write_text("mine")
    assert not demo.is_demo(tmp_path / "demo")
    (tmp_path / "demo" / "thesis.txt").rename(tmp_path / "demo" / "calibration" / "thesis.txt")
    assert not demo.is_demo(tmp_path / "demo")


def test_the_report_calls_the_checkpoint_by_its_final_folder(work, tmp_path, monkeypatch):
    """The demo works in a temporary folder; nothing that it leaves may name it."""
    monkeypatch.setattr(demo, "model_name", lambda: str(work / "model"))
    monkeypatch.setattr(demo, "CALIBRATION_TOKENS", 1024)
    monkeypatch.setattr(demo, "REPORT_LENGTH", 128)
    monkeypatch.setattr(demo, "METHODS", "reference")
    output = tmp_path / "demo"
    exported, report, words = demo.run(output, force=False, say=lambda _: None, progress=lambda *_: None)
    assert exported.checkpoint == str(output / "checkpoint")
    assert [row.method for row in report.rows] == ["reference", "checkpoint (demo/checkpoint)"]
    assert isinstance(words, str)
    for name in ("report.html", "report.json"):
        assert ".part" not in (output / "report" / name).read_text()
