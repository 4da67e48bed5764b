"""What CI runs is what the README promises: an emptied script once passed unseen."""

from pathlib import Path

SCRIPT = Path(__file__).parent.parent / ".ci" / "run"


def test_ci_runs_the_checks_the_tests_the_faults_and_the_demo():
    lines = SCRIPT.read_text().splitlines()
    commands = [line for line in lines if line.startswith("make ")]
    assert [line.split()[1] for line in commands] == ["check", "test", "chaos", "demo"]
