"""Exporters and reports are added from outside, by name, and those of the package are loaded when one is looked for."""
from __future__ import annotations

import subprocess
import sys

import pytest

from analyzer import Profile, register_exporter, register_report
from analyzer.errors import DuplicateRegistrationError, InputError
from analyzer.report.choice import read_shown

NET = Profile(name="Net", mode="infer", params=3)


def test_an_exporter_from_outside(tmp_path):
    with register_exporter.scope():
        @register_exporter("yaml")
        def write_yaml(profile, path, *, indent=0):
            path.write_text(f"{' ' * indent}params: {profile.params}\n")
            return path

        assert NET.export("yaml", tmp_path / "p.yaml", indent=2).read_text() == "  params: 3\n"
    with pytest.raises(InputError, match=r"export\('yaml'\): must be one of .*'json'"):
        NET.export("yaml")


def test_a_report_from_outside_is_printed_by_the_command_line_too(capsys):
    with register_report.scope():
        @register_report("short")
        def tell(profile, *, loud=False):
            return profile.name.upper() if loud else profile.name

        assert (NET.report("short"), NET.report("short", loud=True)) == ("Net", "NET")
        with pytest.raises(InputError, match=r"report\('short', quiet=...\): its options are loud"):
            NET.report("short", quiet=True)
        assert read_shown("short") == ["short"]
    with pytest.raises(InputError, match=r"report\('short'\): must be one of .*'deepspeed'"):
        NET.report("short")


def test_a_name_that_is_taken_is_refused_and_can_be_replaced_for_a_while():
    before = NET.summary()
    with pytest.raises(DuplicateRegistrationError, match="summary"):
        register_report("summary", lambda profile: "mine")
    with register_report.scope():
        register_report("summary", lambda profile: "mine")
        assert NET.summary() == "mine"
    assert NET.summary() == before


@pytest.mark.parametrize("use", [
    "with analyzer.register_report.scope(): pass",
    "analyzer.register_report('summary', lambda profile: 'mine', override=True)",
    "analyzer.register_exporter('mine', lambda profile: None)",
])
def test_views_are_loaded_when_one_is_first_used(use):
    code = f"""
import sys, analyzer
assert not [name for name in sys.modules if name.startswith("analyzer.report.")], "import loads no report"
{use}
p = analyzer.Profile(name="Net", mode="infer")
print(len(p.to_json()) > 100, p.summary()[:3], len(analyzer.register_report.list_options("deepspeed")) > 3)
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert out == ["True", "min" if "mine" in use and "summary" in use else "Net", "True"]
